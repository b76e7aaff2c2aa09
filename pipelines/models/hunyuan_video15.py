"""HunyuanVideo 1.5 (``HunyuanVideo15Transformer3DModel``): text and image to video."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from diffusers.models.embeddings import apply_rotary_emb

from chipsparse.pipelines.padded_text import PaddedTextAdapter
from chipsparse.pipelines.processors import dispatch, joint_states
from chipsparse.pipelines.tensor_facts import TensorFacts

STOCK_PROCESSOR = "HunyuanVideo15AttnProcessor2_0"


class TagPassing:
    """Mixin of a patched processor: passes a tag on to the dispatcher.

    The stock one makes a mask of all pairs of tokens from whatever mask it is given.
    """

    _attention_backend: Any
    _parallel_config: Any

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Video and text tokens, both ``[B, N, C]``, after attention to each other.

        Args:
            attn: the attention module.
            hidden_states: video tokens ``[B, N, C]``.
            encoder_hidden_states: text tokens ``[B, M, C]``.
            attention_mask: a tag, or the mask of the text tokens ``[B, M]``.
            image_rotary_emb: rotary embeddings of the video tokens, both ``[N, D]``.
        """
        if attention_mask is None or attention_mask.dtype != torch.int64:
            output: tuple[torch.Tensor, torch.Tensor] = super().__call__(  # type: ignore[misc]
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
            return output
        assert encoder_hidden_states is not None
        query, key, value = joint_states(
            attn,
            hidden_states,
            encoder_hidden_states,
            lambda states: apply_rotary_emb(states, image_rotary_emb, sequence_dim=1),
        )
        joint = dispatch(self, query, key, value, attention_mask).to(query.dtype)
        seen = hidden_states.shape[1]
        project, dropout = attn.to_out
        return dropout(project(joint[:, :seen])), attn.to_add_out(joint[:, seen:])


class HunyuanVideo15Adapter(PaddedTextAdapter):
    """Joint attention and video feed-forward layers of all blocks.

    The text is that of a multimodal language model, a glyph encoder's, and the embedding of a
    image; the model puts what is valid of each in front of all padding. Each is cut before it
    enters the model, the image's embedding to nothing where there is no image (all zeros).
    Text columns are always kept, and the text's feed-forward layers stay dense.
    """

    transformer_class = "HunyuanVideo15Transformer3DModel"
    families = "HunyuanVideo 1.5: text and image to video (from Python only)"
    sparse_attention = "joint attention"
    sparse_mlp = "feed-forward of the video tokens"
    shares_tokens = True
    mlp_sees_text = False
    text_masks: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "encoder_hidden_states": "encoder_attention_mask",
            "encoder_hidden_states_2": "encoder_attention_mask_2",
        }
    )

    @classmethod
    def is_guided(cls, pipe: Any, arguments: Mapping[str, Any]) -> bool:
        """Plain pipelines of this family have a guider."""
        return getattr(getattr(pipe, "guider", None), "num_conditions", 1) > 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._holds_image = TensorFacts(holds_image)
        super().__init__(*args, **kwargs)

    def dispatching_processor(self, module: Any) -> None:
        """None: the stock processor stays, as a `TagPassing` one; another stays as it is."""
        processor = module.processor
        if type(processor).__name__ == STOCK_PROCESSOR and not isinstance(processor, TagPassing):
            self._patches.set_class(processor, TagPassing)

    def kept_text(self, arguments: dict[str, Any]) -> dict[str, int]:
        """The tokens that a caching call keeps, with the image's."""
        image = arguments["image_embeds"]
        tokens = image.shape[1] if self._holds_image(image) else 0
        return {**super().kept_text(arguments), "image_embeds": tokens}


def holds_image(embeds: torch.Tensor) -> bool:
    """Return whether an image embedding is not all zeros, as for text to video.

    Args:
        embeds: ``[B, N, C]``. Waits for the device.
    """
    return bool(embeds.any())

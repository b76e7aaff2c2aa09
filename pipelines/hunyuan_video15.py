"""HunyuanVideo 1.5 (``HunyuanVideo15Transformer3DModel``): text and image to video."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb

from chipsparse.layout import Grid, LayerKind, ModelLayout
from chipsparse.pipelines.feed_forward import FeedForwardModule, FeedForwardSite
from chipsparse.pipelines.padded_text import PaddedTextAdapter, token_grid
from chipsparse.pipelines.tensor_facts import TensorFacts
from chipsparse.pipelines.timesteps import value_passed_as

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
        video = [layer(hidden_states) for layer in (attn.to_q, attn.to_k, attn.to_v)]
        text = [
            layer(encoder_hidden_states)
            for layer in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        ]
        video, text = (
            [each.unflatten(2, (attn.heads, -1)) for each in part] for part in (video, text)
        )
        for place, norm in enumerate((attn.norm_q, attn.norm_k)):
            video[place] = apply_rotary_emb(norm(video[place]), image_rotary_emb, sequence_dim=1)
        for place, norm in enumerate((attn.norm_added_q, attn.norm_added_k)):
            text[place] = text[place] if norm is None else norm(text[place])
        query, key, value = (torch.cat(pair, dim=1) for pair in zip(video, text, strict=True))
        joint = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        joint = joint.flatten(2).to(query.dtype)
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
    announces_guidance = False
    text_masks: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "encoder_hidden_states": "encoder_attention_mask",
            "encoder_hidden_states_2": "encoder_attention_mask_2",
        }
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._holds_image = TensorFacts(holds_image)
        super().__init__(*args, **kwargs)

    def self_attentions(self) -> list[Any]:
        """``attn`` of every block."""
        return [block.attn for block in self._model.transformer_blocks]

    def dispatching_processor(self, module: Any) -> None:
        """None: the stock processor stays, as a `TagPassing` one; another stays as it is."""
        processor = module.processor
        if type(processor).__name__ == STOCK_PROCESSOR and not isinstance(processor, TagPassing):
            self._patches.set_class(processor, TagPassing)

    def feed_forwards(self) -> list[FeedForwardSite]:
        """``ff`` of every block."""
        return [FeedForwardModule(block, "ff") for block in self._model.transformer_blocks]

    @classmethod
    def planned_layout(
        cls, config: Mapping[str, Any], *, latents: Grid, text_tokens: int = 0, batch: int = 1
    ) -> ModelLayout:
        """Sizes for latents of this size; prompts without padding, an image's tokens included."""
        heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
        width = int(heads * head_dim * config["mlp_ratio"])
        return ModelLayout(
            kinds=(LayerKind("block", config["num_layers"], width, mlp_sees_text=False),),
            heads=heads,
            head_dim=head_dim,
            batch=batch,
            grids=(token_grid(config, latents),),
            text_tokens=text_tokens,
        )

    def kept_text(self, arguments: dict[str, Any]) -> dict[str, int]:
        """As `PaddedTextAdapter`, with the image's tokens."""
        image = arguments["image_embeds"]
        tokens = image.shape[1] if self._holds_image(image) else 0
        return {**super().kept_text(arguments), "image_embeds": tokens}

    def scheduled_timestep(self, timestep: Any, schedule: Any) -> float:
        """The scheduler's value that pipelines round to the latents' dtype."""
        value = value_passed_as(timestep, schedule)
        return float(torch.as_tensor(timestep).max()) if value is None else value


def holds_image(embeds: torch.Tensor) -> bool:
    """Whether an image embedding is not all zeros, as a text-to-video pipeline passes it.

    Args:
        embeds: ``[B, N, C]``. Waits for the device.
    """
    return bool(embeds.any())

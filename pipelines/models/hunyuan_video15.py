"""HunyuanVideo 1.5 (``HunyuanVideo15Transformer3DModel``): text and image to video."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb

from chipsparse.pipelines.padded_text import PaddedTextAdapter
from chipsparse.pipelines.processors import JointProcessor
from chipsparse.pipelines.tensor_facts import remembered


class HunyuanVideo15Processor(JointProcessor):
    """Joint attention of a processor that makes a mask of all pairs of whatever it is given."""

    _attention_backend = None  # as in the stock processor: the one that is active in diffusers

    def rotated(self, states: torch.Tensor, rotary: Any) -> torch.Tensor:
        return apply_rotary_emb(states, rotary, sequence_dim=1)


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
    own_processors = MappingProxyType({"HunyuanVideo15AttnProcessor2_0": HunyuanVideo15Processor})
    text_masks = MappingProxyType(
        {
            "encoder_hidden_states": "encoder_attention_mask",
            "encoder_hidden_states_2": "encoder_attention_mask_2",
        }
    )

    # True unless an embedding ``[B, N, C]`` is all zeros; waits for the device.
    _holds_image = remembered(lambda embeds: bool(embeds.any()))

    @classmethod
    def is_guided(cls, pipe: Any, arguments: Mapping[str, Any]) -> bool:
        """Plain pipelines of this family have a guider."""
        return getattr(getattr(pipe, "guider", None), "num_conditions", 1) > 1

    def kept_text(self, arguments: dict[str, Any]) -> dict[str, int]:
        image = arguments["image_embeds"]
        tokens = image.shape[1] if self._holds_image(image) else 0
        return {**super().kept_text(arguments), "image_embeds": tokens}

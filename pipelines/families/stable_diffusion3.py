"""Stable Diffusion 3 and 3.5 (``SD3Transformer2DModel``), medium and large."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from types import MappingProxyType
from typing import Any

from chipsparse.layout import Grid, LayerKind
from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.pipelines.processors import JointProcessor

CLIP_TOKENS = 77  # which stand in the sequence before those of T5


class StableDiffusion3Adapter(ModelAdapter):
    """Joint attention and image feed-forward layers of all blocks, the text behind the image.

    The text's columns are always kept, and its feed-forward layers stay dense. So does the second
    attention of the dual layers of 3.5 medium (``attn2``), which sees the image alone. The patch
    embedding adds the positions of the image tokens.
    """

    transformer_class = "SD3Transformer2DModel"
    families = "Stable Diffusion 3 and 3.5: text and image to image, inpainting, ControlNet"
    sparse_attention = "joint attention; the second one of 3.5 medium (attn2) is left dense"
    sparse_mlp = "feed-forward of the image tokens"
    shares_tokens = True
    guides_in_batch = True
    default_latents = 128
    cuts_at_blocks = True
    tags_over_masks = True  # which the stock processor does not read
    own_processors = MappingProxyType({"JointAttnProcessor2_0": JointProcessor})
    embedding_name = "pos_embed"
    last_name = "norm_out"
    token_arguments = MappingProxyType({"block_controlnet_hidden_states": 1})

    @classmethod
    def further_branches(cls, argument: Callable[[str], Any]) -> int:
        """Guidance that passes some layers over is a call of its own."""
        guided = (argument("guidance_scale") or 0.0) > 1
        return int(guided and argument("skip_guidance_layers") is not None)

    @classmethod
    def kinds(cls, config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
        dual = [layer in config["dual_attention_layers"] for layer in range(config["num_layers"])]
        return tuple(
            LayerKind(
                "dual" if is_dual else "joint",
                len(list(layers)),
                cls.neurons(config),
                mlp_sees_text=False,
                projections=2 * cls.projections if is_dual else cls.projections,
            )
            for is_dual, layers in groupby(dual)
        )

    @classmethod
    def planned_text(cls, text_tokens: int, latents: Grid) -> int:
        """The pipeline's length of the prompt is that of T5 alone."""
        return CLIP_TOKENS + text_tokens

    def notes(self, arguments: dict[str, Any]) -> list[str]:
        blocks = self._model.transformer_blocks
        dual = sum(block.attn2 is not None for block in blocks)
        if dual == 0 or not (self.session.caching and self.session.config.attention.is_sparse):
            return []
        return [
            f"the second attention (attn2) of {dual} of {len(blocks)} layers runs dense: "
            "only the joint one is sparse",
        ]

    @classmethod
    def why_not_split(cls, config: Mapping[str, Any]) -> str | None:
        if not config["dual_attention_layers"]:
            return super().why_not_split(config)
        return "its second attention (attn2, in dual layers) is not exchanged between them"

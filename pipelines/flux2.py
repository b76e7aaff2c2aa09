"""FLUX.2 (``Flux2Transformer2DModel``): dev, and the Klein models."""

from __future__ import annotations

from typing import Any

from chipsparse.pipelines.adapter import tagged
from chipsparse.pipelines.feed_forward import (
    FeedForwardModule,
    FeedForwardSite,
    FusedParallelFeedForward,
)
from chipsparse.pipelines.flux import ATTENTION_ARGUMENTS, FluxAdapter

SINGLE_ATTENTION_ARGUMENTS = ("hidden_states", "attention_mask", "image_rotary_emb")


class Flux2Adapter(FluxAdapter):
    """As FLUX.1, with gated feed-forward layers; those of the single blocks are one with the rest.

    Reference images stand behind the image and have grids of their own. Where the pipeline keeps
    their keys and values after the first step, the attention is left to its processors; the
    feed-forward layers run sparse from the third step on, when the caches are filled anew.
    """

    transformer_class = "Flux2Transformer2DModel"
    families = "FLUX.2 dev and Klein: text to image, reference images"
    sparse_attention = "joint attention of double and single blocks"
    sparse_mlp = (
        "feed-forward (gated) of the image tokens in double blocks, of all tokens in single ones"
    )
    shares_tokens = True
    shares_guidance = True
    # Klein's guidance_scale is that of classifier-free guidance, dev's is an input of the model.
    guidance_argument = "true_cfg_scale"
    announces_guidance = True
    mlp_linears = 3

    def feed_forwards(self) -> list[FeedForwardSite]:
        """``ff`` of the double blocks, then the other half of the single blocks' attention."""
        return [
            *(FeedForwardModule(block, "ff") for block in self._double_blocks),
            *(FusedParallelFeedForward(block) for block in self._single_blocks),
        ]

    @staticmethod
    def tag_attention(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Passes the tag as the attention mask, which a FLUX.2 block never sets."""
        single = hasattr(module, "to_qkv_mlp_proj")
        return tagged(
            module, args, kwargs, SINGLE_ATTENTION_ARGUMENTS if single else ATTENTION_ARGUMENTS
        )

    def why_attention_is_dense(self, arguments: dict[str, Any]) -> str | None:
        """Some Klein pipelines compute keys and values of their reference images only once."""
        if not self.needs_mask(arguments):
            return None
        return "the pipeline keeps the keys and values of its reference images"

    def needs_mask(self, arguments: dict[str, Any]) -> bool:
        """Such a call is no plain attention, though its processors mask nothing."""
        return arguments.get("kv_cache_mode") is not None

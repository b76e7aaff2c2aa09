"""FLUX.2 (``Flux2Transformer2DModel``): dev, and the Klein models."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from chipsparse.pipelines.feed_forward import FusedParallelFeedForward
from chipsparse.pipelines.feed_forward_forms import MLPParts
from chipsparse.pipelines.models.flux import FluxAdapter


class Flux2Adapter(FluxAdapter):
    """FLUX.2: gated feed-forward layers; those of the single blocks are one with the rest.

    Reference images stand behind the image and have grids of their own. Where the pipeline keeps
    their keys and values after the first step, the attention is left to its processors; the
    feed-forward layers run sparse from the third step on, when the caches are filled anew.
    """

    transformer_class = "Flux2Transformer2DModel"
    families = "FLUX.2 dev and Klein: text to image, reference images"
    sparse_mlp = (
        "feed-forward (gated) of the image tokens in double blocks, of all tokens in single ones"
    )
    shares_tokens = True
    shares_guidance = True
    # Klein's guidance_scale is that of classifier-free guidance, dev's is an input of the model.
    guidance_argument = "true_cfg_scale"
    mlp_linears = 3
    mlp_parts = MLPParts("linear_in", "linear_out", None, "act_fn")
    single_mlp = FusedParallelFeedForward
    # Some Klein pipelines compute keys and values of their reference images only once.
    dense_arguments: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"kv_cache_mode": "the pipeline keeps the keys and values of its reference images"}
    )

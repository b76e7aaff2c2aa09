"""FLUX.1 and FLUX.2, and Chroma, LongCat-Image, Bria 3 and Ovis-Image with their blocks."""

from __future__ import annotations

from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from chipsparse.layout import Grid
from chipsparse.pipelines.double_and_single import DoubleAndSingleBlocks
from chipsparse.pipelines.feed_forward import FusedParallelFeedForward, GatedParallelFeedForward
from chipsparse.pipelines.feed_forward_forms import MLPParts
from chipsparse.pipelines.tensor_facts import TensorFacts
from chipsparse.pipelines.token_grids import fitting, grids_of

CONTROL_SAMPLES = ("controlnet_block_samples", "controlnet_single_block_samples")
MASKED = "the pipeline passes an attention mask"
GATED = "feed-forward (gated) of the image tokens in double blocks, of all tokens in single ones"


class FluxAdapter(DoubleAndSingleBlocks):
    """Joint attention and image feed-forward layers of all blocks; double blocks come first.

    Text tokens stand before the image tokens; their columns are always kept, and their feed-forward
    layers in the double blocks stay dense. The image tokens are put in order as they enter the
    transformer, with their position ids and the residuals of a ControlNet. No hook is inside a
    transformer block, and none is on a linear, which an adapter may wrap.
    """

    transformer_class = "FluxTransformer2DModel"
    families = "FLUX.1: text and image to image, inpainting, Fill, control, ControlNet, Kontext"
    sparse_mlp = "feed-forward of the image tokens in double blocks, of all tokens in single ones"
    shares_tokens = True
    guidance_argument = "true_cfg_scale"
    default_latents = 128
    timestep_scale = 1000
    text_place = "first"
    token_patch = (1, 2, 2)
    last_name = "norm_out"
    dense_arguments = MappingProxyType({"attention_mask": MASKED})

    _grids_of = cached_property(lambda _: TensorFacts(grids_of))

    def called_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...]:
        """The grids of packed latents ``[B, N, C]`` at the places that ``img_ids`` names."""
        tokens = arguments["hidden_states"].shape[1]
        return fitting(self._grids_of(arguments["img_ids"]), tokens)

    def notes(self, arguments: dict[str, Any]) -> list[str]:
        unordered = self._grids_of(arguments["img_ids"]) is None
        if not unordered or self.session.tile_order is None:
            return []
        return ["image tokens stay in the pipeline's order: their img_ids form no full grids"]

    def order_inputs(self, arguments: dict[str, Any]) -> None:
        arguments["hidden_states"] = self.ordered(arguments["hidden_states"], 1)
        arguments["img_ids"] = self.ordered(arguments["img_ids"], -2)
        self.order_residuals(arguments, *CONTROL_SAMPLES)
        mask = arguments.get("attention_mask")
        if mask is not None:
            text = arguments["encoder_hidden_states"].shape[1]
            image = self.ordered(mask[:, text:], 1)
            arguments["attention_mask"] = torch.cat([mask[:, :text], image], dim=1)
        arguments["encoder_hidden_states"] = self.own_text(arguments["encoder_hidden_states"], 1)
        arguments["txt_ids"] = self.own_text(arguments["txt_ids"], -2)


class ChromaAdapter(FluxAdapter):
    """FLUX with a prompt mask in all calls, so that only the feed-forward layers run sparse."""

    transformer_class = "ChromaTransformer2DModel"
    families = "Chroma: text and image to image, inpainting"
    guidance_argument = "guidance_scale"
    masked_parts = MappingProxyType({"attention": MASKED})
    why_whole = MASKED


class LongCatImageAdapter(FluxAdapter):
    """FLUX with guidance by calls of its own."""

    transformer_class = "LongCatImageTransformer2DModel"
    families = "LongCat-Image: text to image, editing"
    shares_tokens = True
    shares_guidance = True
    guidance_argument = "guidance_scale"


class BriaAdapter(FluxAdapter):
    """FLUX with pipelines that pass the scheduler's timesteps."""

    transformer_class = "BriaTransformer2DModel"
    families = "Bria 3: text to image"
    shares_tokens = True
    guidance_argument = "guidance_scale"
    guides_in_batch = True
    timestep_scale = 1


class OvisImageAdapter(FluxAdapter):
    """FLUX with gated feed-forward layers."""

    transformer_class = "OvisImageTransformer2DModel"
    families = "Ovis-Image: text to image"
    sparse_mlp = GATED
    guidance_argument = "guidance_scale"
    mlp_linears = 3
    single_mlp = GatedParallelFeedForward


class Flux2Adapter(FluxAdapter):
    """FLUX with gated feed-forward layers, which in single blocks are one with the rest.

    Reference images stand behind the image and have grids of their own. Where the pipeline keeps
    their keys and values after the first step, the attention is left to its processors; the
    feed-forward layers run sparse from the third step on, when the caches are filled anew.
    """

    transformer_class = "Flux2Transformer2DModel"
    families = "FLUX.2 dev and Klein: text to image, reference images"
    sparse_mlp = GATED
    shares_tokens = True
    shares_guidance = True
    # Klein's guidance_scale is that of classifier-free guidance, dev's is an input of the model.
    guidance_argument = "true_cfg_scale"
    mlp_linears = 3
    mlp_parts = MLPParts("linear_in", "linear_out", None, "act_fn")
    single_mlp = FusedParallelFeedForward
    # Some Klein pipelines compute keys and values of their reference images only once.
    dense_arguments = MappingProxyType(
        {"kv_cache_mode": "the pipeline keeps the keys and values of its reference images"}
    )

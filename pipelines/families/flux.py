"""FLUX.1, FLUX.2 and FLUX.3, and Chroma, LongCat-Image, Bria 3 and Ovis-Image with their blocks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from chipsparse.layout import Grid, LayerKind
from chipsparse.pipelines.double_and_single import DoubleAndSingleBlocks
from chipsparse.pipelines.feed_forward import (
    FeedForwardModule,
    FeedForwardSite,
    FusedParallelFeedForward,
    GatedParallelFeedForward,
)
from chipsparse.pipelines.feed_forward_forms import MLPParts
from chipsparse.pipelines.tensor_facts import remembered
from chipsparse.pipelines.token_grids import fitting, grids_of

REFERENCES = "image_cond_hidden_states"
REFERENCE_IDS = "image_cond_ids"
MASKED = "the pipeline passes an attention mask"
GATED = "feed-forward (gated) of the image tokens in double blocks, of all tokens in single ones"
GATED_PARTS = MLPParts("linear_in", "linear_out", None, "act_fn")


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
    token_arguments = MappingProxyType(
        {
            "hidden_states": 1,
            "img_ids": -2,
            "controlnet_block_samples": 1,
            "controlnet_single_block_samples": 1,
        },
    )
    dense_arguments = MappingProxyType({"attention_mask": MASKED})

    _grids_of = remembered(grids_of)

    def called_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...]:
        """The grids of packed latents ``[B, N, C]`` at the places that ``img_ids`` names."""
        tokens = arguments["hidden_states"].shape[1]
        return fitting(self._grids_of(arguments["img_ids"]), tokens)

    def notes(self, arguments: dict[str, Any]) -> list[str]:
        if self._grids_of(arguments["img_ids"]) is not None or self.session.tile_order is None:
            return []
        return ["image tokens stay in the pipeline's order: their img_ids form no full grids"]

    def order_inputs(self, arguments: dict[str, Any]) -> None:
        super().order_inputs(arguments)
        if (mask := arguments.get("attention_mask")) is not None:
            arguments["attention_mask"] = self.ordered_beside_text(mask, 1)
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
    mlp_parts = GATED_PARTS
    single_mlp = FusedParallelFeedForward
    # Some Klein pipelines compute keys and values of their reference images only once.
    dense_arguments = MappingProxyType(
        {"kv_cache_mode": "the pipeline keeps the keys and values of its reference images"},
    )


class Flux3Adapter(FluxAdapter):
    """Joint attention and feed-forward layers of the single blocks.

    The blocks before them see the image, the references or the text alone, and stay dense. In the
    joint sequence the text stands first, then the image, then the references, which have grids of
    their own.
    """

    transformer_class = "Flux3Transformer2DModel"
    families = "FLUX.3, step-distilled too: text to image, reference images"
    sparse_attention = "joint attention of the single blocks"
    sparse_mlp = "feed-forward (gated) of all tokens in single blocks"
    guidance_argument = "guidance_scale"
    drops_last_grids = True
    mlp_parts = GATED_PARTS
    why_whole = "blocks before the joint ones see the image or the text alone, and stay as they are"

    _grids_of = remembered(lambda ids: grids_of(unscaled(ids)))

    def blocks(self) -> list[Any]:
        return list(self._model.single_transformer_blocks)

    def feed_forwards(self) -> list[FeedForwardSite]:
        return [FeedForwardModule(block, "ff", self.mlp_parts) for block in self.blocks()]

    @classmethod
    def kinds(cls, config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
        layers = config["num_single_layers"]
        width = cls.neurons(config)
        return (LayerKind("single", layers, width, mlp_linears=3),)

    def called_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...]:
        grids = super().called_grids(arguments)
        if arguments.get(REFERENCES) is not None:
            tokens = arguments[REFERENCES].shape[1]
            grids += fitting(self._grids_of(arguments[REFERENCE_IDS]), tokens)
        return grids

    def order_inputs(self, arguments: dict[str, Any]) -> None:
        if self.session.tile_order is None:
            return
        order, _ = self.session.tile_order
        image = arguments["hidden_states"].shape[1]
        parts = {"hidden_states": order[:image], "img_ids": order[:image]}
        if arguments.get(REFERENCES) is not None:
            parts |= dict.fromkeys((REFERENCES, REFERENCE_IDS), order[image:] - image)
        for name, part in parts.items():
            arguments[name] = arguments[name].index_select(-2, part.to(arguments[name].device))


def unscaled(ids: torch.Tensor) -> torch.Tensor:
    """Position ids ``[N, 4]`` in whole rows and columns; pipelines multiply these by a factor."""
    ids = ids.cpu().clone()
    places = ids[:, 1:3]
    steps = places[places > 0]
    if steps.numel() > 0:
        ids[:, 1:3] = (places / steps.min()).round()
    return ids

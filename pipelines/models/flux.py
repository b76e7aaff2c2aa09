"""FLUX.1 (``FluxTransformer2DModel``), and Chroma, LongCat-Image, Bria 3 and Ovis-Image."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from chipsparse.config import Part
from chipsparse.layout import Grid
from chipsparse.pipelines.double_and_single import DoubleAndSingleBlocks
from chipsparse.pipelines.feed_forward import GatedParallelFeedForward
from chipsparse.pipelines.tensor_facts import TensorFacts
from chipsparse.pipelines.token_grids import fitting, grids_of, patched

CONTROL_SAMPLES = ("controlnet_block_samples", "controlnet_single_block_samples")
PACKED = (1, 2, 2)  # frames, rows and columns of latents that pipelines join to one token
MASKED = "the pipeline passes an attention mask"


class FluxAdapter(DoubleAndSingleBlocks):
    """Joint attention and image feed-forward layers of all blocks; double blocks come first.

    Text tokens stand before the image tokens; their columns are always kept, and their feed-forward
    layers in the double blocks stay dense. The image tokens are put in order as they enter the
    transformer, with their position ids and the residuals of a ControlNet, and in raster order
    again before the output norm. None of these hooks is inside a transformer block, and none is on
    a linear, which an adapter may wrap.
    """

    transformer_class = "FluxTransformer2DModel"
    families = "FLUX.1: text and image to image, inpainting, Fill, control, ControlNet, Kontext"
    sparse_mlp = "feed-forward of the image tokens in double blocks, of all tokens in single ones"
    shares_tokens = True
    guidance_argument = "true_cfg_scale"
    default_latents = 128
    timestep_scale = 1000
    text_place = "first"
    dense_arguments: ClassVar[Mapping[str, str]] = MappingProxyType({"attention_mask": MASKED})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._grids_of = TensorFacts(grids_of)
        super().__init__(*args, **kwargs)

    @classmethod
    def grids(cls, config: Mapping[str, Any], latents: Grid) -> tuple[Grid, ...]:
        """That of one image, without reference images."""
        return patched((1, *latents[1:]), PACKED)

    def called_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...]:
        """The grids of packed latents ``[B, N, C]`` at the places that ``img_ids`` names."""
        tokens = arguments["hidden_states"].shape[1]
        return fitting(self._grids_of(arguments["img_ids"]), tokens)

    def install_tile_order(self) -> None:
        """Hooks the transformer's inputs and its output norm."""
        self.hook_inputs(self._order_inputs)
        norm = self._model.norm_out
        self._patches.add_hook(norm.register_forward_pre_hook(self.restore_order))

    def notes(self, arguments: dict[str, Any]) -> list[str]:
        """A note if the image tokens could not be put in order."""
        unordered = self._grids_of(arguments["img_ids"]) is None
        if not unordered or self.session.tile_order is None:
            return []
        return ["image tokens stay in the pipeline's order: their img_ids form no full grids"]

    def _order_inputs(self, arguments: dict[str, Any]) -> None:
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
    """Chroma has the blocks of FLUX; with its prompt mask only the feed-forward layers run sparse.

    Its pipelines always pass that mask.
    """

    transformer_class = "ChromaTransformer2DModel"
    families = "Chroma: text and image to image, inpainting"
    guidance_argument = "guidance_scale"
    masked_parts: ClassVar[Mapping[Part, str]] = MappingProxyType({"attention": MASKED})

    @classmethod
    def why_not_split(cls, config: Mapping[str, Any]) -> str:
        """Its attention is not ours."""
        return MASKED


class LongCatImageAdapter(FluxAdapter):
    """LongCat-Image has the blocks of FLUX."""

    transformer_class = "LongCatImageTransformer2DModel"
    families = "LongCat-Image: text to image, editing"
    shares_tokens = True
    shares_guidance = True
    guidance_argument = "guidance_scale"


class BriaAdapter(FluxAdapter):
    """Bria 3 has the blocks of FLUX, and pipelines that pass the scheduler's timesteps."""

    transformer_class = "BriaTransformer2DModel"
    families = "Bria 3: text to image"
    shares_tokens = True
    guidance_argument = "guidance_scale"
    guides_in_batch = True
    timestep_scale = 1


class OvisImageAdapter(FluxAdapter):
    """Ovis-Image has the blocks of FLUX with gated feed-forward layers."""

    transformer_class = "OvisImageTransformer2DModel"
    families = "Ovis-Image: text to image"
    sparse_mlp = (
        "feed-forward (gated) of the image tokens in double blocks, of all tokens in single ones"
    )
    guidance_argument = "guidance_scale"
    mlp_linears = 3
    single_mlp = GatedParallelFeedForward

"""FLUX.1 (``FluxTransformer2DModel``) and Chroma (``ChromaTransformer2DModel``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from chipsparse.config import Part
from chipsparse.layout import Grid, LayerKind, ModelLayout
from chipsparse.pipelines.adapter import ModelAdapter, tagged
from chipsparse.pipelines.feed_forward import (
    FeedForwardModule,
    FeedForwardSite,
    ParallelFeedForward,
)
from chipsparse.pipelines.tensor_facts import TensorFacts
from chipsparse.pipelines.timesteps import value_passed_as

ATTENTION_ARGUMENTS = (
    "hidden_states",
    "encoder_hidden_states",
    "attention_mask",
    "image_rotary_emb",
)
CONTROL_SAMPLES = ("controlnet_block_samples", "controlnet_single_block_samples")
MLP_RATIO = 4  # fixed in the code of models whose config has none
PACKED = 2  # rows and columns of latents that pipelines join to one token
MASKED = "the pipeline passes an attention mask"
TIMESTEP_SCALE = 1000  # pipelines divide the scheduler's timesteps by it
MOST_GRIDS = 8  # more than that are no images, but positions of another kind


class FluxAdapter(ModelAdapter):
    """Joint attention and image feed-forward layers of all blocks; double blocks come first.

    Text tokens stand before the image tokens; their columns are always kept, and their feed-forward
    layers in the double blocks stay dense. The image tokens are put in order as they enter the
    transformer, with their position ids and the residuals of a ControlNet, and in raster order
    again before the output norm. None of these hooks is inside a transformer block, and none is on
    a linear, which an adapter may wrap.
    """

    transformer_class = "FluxTransformer2DModel"
    families = "FLUX.1: text and image to image, inpainting, Fill, control, ControlNet, Kontext"
    sparse_attention = "joint attention of double and single blocks"
    sparse_mlp = "feed-forward of the image tokens in double blocks, of all tokens in single ones"
    shared_mlp_kinds = frozenset({"single"})
    shares_tokens = True
    guidance_argument = "true_cfg_scale"
    announces_guidance = False
    default_latents = 128

    mlp_linears: ClassVar[int] = 2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._grids_of = TensorFacts(grids_of)
        super().__init__(*args, **kwargs)

    def self_attentions(self) -> list[Any]:
        """``attn`` of every block."""
        return [block.attn for block in self._double_blocks + self._single_blocks]

    def feed_forwards(self) -> list[FeedForwardSite]:
        """``ff`` of the double blocks, then what the single blocks run beside their attention."""
        return [
            *(FeedForwardModule(block, "ff") for block in self._double_blocks),
            *(ParallelFeedForward(block) for block in self._single_blocks),
        ]

    @classmethod
    def planned_layout(
        cls, config: Mapping[str, Any], *, latents: Grid, text_tokens: int = 0, batch: int = 1
    ) -> ModelLayout:
        """Sizes for one image without reference images."""
        _, rows, columns = latents
        grids = ((1, rows // PACKED, columns // PACKED),)
        return cls._sizes(config, grids=grids, text_tokens=text_tokens, batch=batch)

    @classmethod
    def _sizes(
        cls, config: Mapping[str, Any], *, grids: tuple[Grid, ...], text_tokens: int, batch: int
    ) -> ModelLayout:
        channels = config["num_attention_heads"] * config["attention_head_dim"]
        width = int(channels * config.get("mlp_ratio", MLP_RATIO))
        double = LayerKind("double", config["num_layers"], width, mlp_sees_text=False)
        single = LayerKind("single", config["num_single_layers"], width)
        return ModelLayout(
            kinds=tuple(replace(kind, mlp_linears=cls.mlp_linears) for kind in (double, single)),
            heads=config["num_attention_heads"],
            head_dim=config["attention_head_dim"],
            batch=batch,
            grids=grids,
            text_tokens=text_tokens,
            text_first=True,
        )

    def layout(self, arguments: dict[str, Any]) -> ModelLayout:
        """Sizes for packed latents ``[B, N, C]`` at the places that ``img_ids`` names."""
        batch, tokens, _ = arguments["hidden_states"].shape
        grids = self._grids_of(arguments["img_ids"])
        if grids is not None and sum(math.prod(grid) for grid in grids) != tokens:
            grids = None  # the model says itself what does not fit
        return self._sizes(
            self._model.config,
            grids=((1, 1, tokens),) if grids is None else grids,
            text_tokens=arguments["encoder_hidden_states"].shape[1],
            batch=batch,
        )

    @staticmethod
    def tag_attention(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Passes the tag as the attention mask, which a FLUX block never sets."""
        return tagged(module, args, kwargs, ATTENTION_ARGUMENTS)

    def install_tile_order(self) -> None:
        """Hooks the transformer's inputs and its output norm."""
        add = self._patches.add_hook
        add(self._model.register_forward_pre_hook(self._order_inputs, with_kwargs=True))
        add(self._model.norm_out.register_forward_pre_hook(self.restore_order))

    def scheduled_timestep(self, timestep: Any, schedule: Any) -> float:
        """See `undivided_timestep`."""
        return undivided_timestep(timestep, schedule)

    def remarks(self, arguments: dict[str, Any]) -> list[str]:
        """Whether the image tokens could not be put in order."""
        unordered = self._grids_of(arguments["img_ids"]) is None
        if not unordered or self.session.tile_order is None:
            return []
        return ["image tokens stay in the pipeline's order: their img_ids form no full grids"]

    def why_attention_is_dense(self, arguments: dict[str, Any]) -> str | None:
        """Chroma masks the padding of its prompt."""
        if arguments.get("attention_mask") is None:
            return None
        return MASKED

    @property
    def _double_blocks(self) -> list[Any]:
        return list(self._model.transformer_blocks)

    @property
    def _single_blocks(self) -> list[Any]:
        return list(self._model.single_transformer_blocks)

    def _order_inputs(
        self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self.moves_tokens:
            return None
        arguments = {**dict(zip(self._argument_names, args, strict=False)), **kwargs}

        arguments["hidden_states"] = self.ordered(arguments["hidden_states"], 1)
        arguments["img_ids"] = self.ordered(arguments["img_ids"], -2)
        for name in CONTROL_SAMPLES:
            if arguments.get(name) is not None:
                arguments[name] = [self.ordered(sample, 1) for sample in arguments[name]]
        mask = arguments.get("attention_mask")
        if mask is not None:
            text = arguments["encoder_hidden_states"].shape[1]
            image = self.ordered(mask[:, text:], 1)
            arguments["attention_mask"] = torch.cat([mask[:, :text], image], dim=1)
        arguments["encoder_hidden_states"] = self.own_text(arguments["encoder_hidden_states"], 1)
        arguments["txt_ids"] = self.own_text(arguments["txt_ids"], -2)
        return (), arguments


class ChromaAdapter(FluxAdapter):
    """Chroma has the blocks of FLUX; with its prompt mask only the feed-forward layers run sparse.

    Its pipelines always pass that mask.
    """

    transformer_class = "ChromaTransformer2DModel"
    families = "Chroma: text and image to image, inpainting"
    guidance_argument = "guidance_scale"
    announces_guidance = True
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
    announces_guidance = True


class BriaAdapter(FluxAdapter):
    """Bria 3 has the blocks of FLUX, and pipelines that pass the scheduler's timesteps."""

    transformer_class = "BriaTransformer2DModel"
    families = "Bria 3: text to image"
    shares_tokens = True
    guidance_argument = "guidance_scale"
    announces_guidance = True
    guides_in_batch = True

    def scheduled_timestep(self, timestep: Any, schedule: Any) -> float:
        """The scheduler's value, perhaps rounded to the latents' dtype."""
        value = value_passed_as(timestep, schedule)
        return float(torch.as_tensor(timestep).max()) if value is None else value


def undivided_timestep(timestep: Any, schedule: Any) -> float:
    """The scheduler's value that pipelines divide by 1,000 and round to the latents' dtype.

    Args:
        timestep: what the transformer is called with, a number or a tensor of any shape.
        schedule: the scheduler's timesteps, or None.
    """
    value = value_passed_as(timestep, schedule, lambda values: values / TIMESTEP_SCALE)
    return float(torch.as_tensor(timestep).max()) * TIMESTEP_SCALE if value is None else value


def grids_of(ids: torch.Tensor) -> tuple[Grid, ...] | None:
    """The full grids of image tokens, one behind the other, that position ids name.

    Args:
        ids: ``[N, D]``, or ``[B, N, D]`` with the same for all samples: image, row and column of
            each token in any dtype, and what else there is. Waits for the device.

    Returns:
        Each grid as (1, rows, columns); None where the ids form no grids, or too many.
    """
    ids = (ids if ids.ndim == 2 else ids[0]).cpu()
    grids: list[Grid] = []
    while ids.shape[0] > 0:
        if len(grids) == MOST_GRIDS:
            return None
        place = torch.arange(ids.shape[0])
        columns = _matching(ids, place * 0, place)
        rows = _matching(ids, place // columns, place % columns) // columns
        grids.append((1, rows, columns))
        ids = ids[rows * columns :]
    return tuple(grids) or None


def _matching(ids: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> int:
    """How many ids, from the first on, lie at these rows and columns seen from the first."""
    shift = torch.zeros(ids.shape, dtype=torch.int64)
    shift[:, 1], shift[:, 2] = row, column
    # Half precision cannot hold every whole number: round as the pipeline did.
    expected = (ids[0].double() + shift).to(ids.dtype)
    different = (ids != expected).any(dim=1).nonzero()
    return len(ids) if different.numel() == 0 else int(different[0])

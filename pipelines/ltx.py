"""LTX-Video (``LTXVideoTransformer3DModel``)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from chipsparse.layout import Grid, LayerKind, ModelLayout
from chipsparse.pipelines.feed_forward import FeedForwardModule, FeedForwardSite
from chipsparse.pipelines.processor_tags import ProcessorTaggingAdapter
from chipsparse.pipelines.tensor_facts import TensorFacts

MLP_RATIO = 4  # fixed in the model's code


class LTXAdapter(ProcessorTaggingAdapter):
    """Self-attention (``attn1``) and feed-forward layers of every block; cross-attention is left.

    The tokens are put in order as they enter the transformer, with their timesteps where each has
    one of its own, and so are the rotary embeddings. They leave the transformer in raster order: in
    front of the output norm would be too early, for the modulation behind it may be per token, too.
    """

    transformer_class = "LTXVideoTransformer3DModel"
    families = "LTX-Video: text and image to video, conditions"
    sparse_attention = "self-attention; cross-attention is left"
    sparse_mlp = "feed-forward"
    shares_tokens = True
    guides_in_batch = True

    projections: ClassVar[int] = (
        6  # q, k, v and out of self-attention; q and out of cross-attention
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._grids_at = TensorFacts(lambda coordinates: grids_at(self.places(coordinates)))
        super().__init__(*args, **kwargs)

    def self_attentions(self) -> list[Any]:
        """``attn1`` of every block."""
        return [block.attn1 for block in self._model.transformer_blocks]

    def feed_forwards(self) -> list[FeedForwardSite]:
        """``ff`` of every block."""
        return [FeedForwardModule(block, "ff") for block in self._model.transformer_blocks]

    @classmethod
    def planned_layout(
        cls, config: Mapping[str, Any], *, latents: Grid, text_tokens: int = 0, batch: int = 1
    ) -> ModelLayout:
        """Sizes of one video without further images; text tokens are in cross-attention only."""
        patch = (config["patch_size_t"], config["patch_size"], config["patch_size"])
        frames, rows, columns = (size // side for size, side in zip(latents, patch, strict=True))
        return cls._sizes(config, grids=((frames, rows, columns),), batch=batch)

    @classmethod
    def _sizes(
        cls, config: Mapping[str, Any], *, grids: tuple[Grid, ...], batch: int
    ) -> ModelLayout:
        width = MLP_RATIO * config["num_attention_heads"] * config["attention_head_dim"]
        kind = LayerKind("block", config["num_layers"], width, projections=cls.projections)
        return ModelLayout(
            kinds=(kind,),
            heads=config["num_attention_heads"],
            head_dim=config["attention_head_dim"],
            batch=batch,
            grids=grids,
        )

    def layout(self, arguments: dict[str, Any]) -> ModelLayout:
        """Sizes for packed latents ``[B, N, C]`` at the places that the call names."""
        batch, tokens, _ = arguments["hidden_states"].shape
        grids = self._read_grids(arguments)
        if grids is None or sum(math.prod(grid) for grid in grids) != tokens:
            grids = ((1, 1, tokens),)  # where it is not remarked, the model says what does not fit
        return self._sizes(self._model.config, grids=grids, batch=batch)

    def install_tile_order(self) -> None:
        """Hooks the transformer's inputs and output, and its rotary embedding."""
        model, add = self._model, self._patches.add_hook
        add(model.register_forward_pre_hook(self._order_inputs, with_kwargs=True))
        add(model.rope.register_forward_hook(self._order_rotary))
        add(model.register_forward_hook(self._restore_output))

    def remarks(self, arguments: dict[str, Any]) -> list[str]:
        """Whether the video tokens could not be put in order."""
        if self._read_grids(arguments) is not None or self.session.tile_order is None:
            return []
        return ["video tokens stay in the pipeline's order: their video_coords form no full grids"]

    def _read_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...] | None:
        """The grids of tokens that a call names, by their coordinates or by one size."""
        coordinates = arguments.get("video_coords")
        if coordinates is None:
            return ((arguments["num_frames"], arguments["height"], arguments["width"]),)
        return self._grids_at(coordinates)

    @staticmethod
    def places(coordinates: torch.Tensor) -> torch.Tensor:
        """Time, row and column ``[3, N]`` of the tokens, from what a call names for all samples."""
        return coordinates[0]

    def _order_inputs(
        self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self.moves_tokens:
            return None
        arguments = {**dict(zip(self._argument_names, args, strict=False)), **kwargs}
        self.order_arguments(arguments)
        return (), arguments

    def order_arguments(self, arguments: dict[str, Any]) -> None:
        """Puts the tokens among the transformer's arguments in order."""
        batch, tokens, _ = arguments["hidden_states"].shape
        arguments["hidden_states"] = self.ordered(arguments["hidden_states"], 1)
        if arguments["timestep"].numel() == batch * tokens:
            arguments["timestep"] = self.ordered(arguments["timestep"].view(batch, tokens), 1)

    def _order_rotary(
        self, _module: Any, _args: Any, output: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        return tuple(self.ordered(part, 1) for part in output)

    def _restore_output(self, module: Any, _args: Any, output: Any) -> Any:
        restored = self.restore_order(module, (output[0],))
        if restored is None:
            return None
        return self.wrap_output(restored[0], {"return_dict": not isinstance(output, tuple)})


def grids_at(coordinates: torch.Tensor) -> tuple[Grid, ...] | None:
    """The full grids of video tokens, one behind the other, that coordinates name.

    Args:
        coordinates: ``[3, N]``: time, row and column of each token. Waits for the device.

    Returns:
        Each grid as (frames, rows, columns), all with frames of one size; a new one begins where
        time does not go on. None where the coordinates form no such grids.
    """
    time, row, column = coordinates.cpu()
    tokens = time.numel()
    again = (row == row[0]) & (column == column[0])
    again[0] = False
    area = int(again.nonzero()[0]) if again.any() else tokens
    columns = int((row[:area] == row[0]).sum())
    if tokens % area != 0 or area % columns != 0:
        return None
    time, row, column = (axis.view(-1, area // columns, columns) for axis in (time, row, column))
    full = (
        (time == time[:, :1, :1]).all()
        and (row == row[:1, :, :1]).all()
        and (column == column[:1, :1]).all()
    )
    if not full:
        return None
    starts = (time[1:, 0, 0] <= time[:-1, 0, 0]).nonzero().flatten() + 1
    edges = [0, *starts.tolist(), time.shape[0]]
    lengths = [end - start for start, end in itertools.pairwise(edges)]
    return tuple((frames, area // columns, columns) for frames in lengths)

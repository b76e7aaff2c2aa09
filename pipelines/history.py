"""Models that continue a video: earlier frames stand before the present ones in the sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from chipsparse.layout import Grid
from chipsparse.pipelines.adapter import ModelAdapter


class HistoryAdapter(ModelAdapter):
    """The part that such models share; comes before another adapter's class.

    The earlier frames, older ones in larger patches, stay in the model's order. They count as one
    row of tokens before the grid of the present frames, which alone is put in order. The rotary
    embedding is made part by part, so that of the present frames is known by the frame numbers that
    it is made for.
    """

    why_whole = "its blocks tell earlier frames from present ones by their places among all tokens"

    rotary_name = ""  # hooked otherwise
    present_indices: ClassVar[str]  # the argument with the numbers of the present frames
    # Arguments with the latents of earlier frames: how many times as large as those of the present
    # the patches are, and how many frames pipelines pass, even if they are empty.
    history: ClassVar[Mapping[str, tuple[int, int]]]

    _present: torch.Tensor | None = None  # the frame numbers of the open call

    @classmethod
    def grids(cls, config: Mapping[str, Any], latents: Grid) -> tuple[Grid, ...]:
        """Those of the present frames, behind as many earlier ones as pipelines pass."""
        _, rows, columns = latents
        earlier = sum(
            tokens_of((frames, rows, columns), cls.patch(config, factor))
            for factor, frames in cls.history.values()
        )
        return ((1, 1, earlier), *super().grids(config, latents))

    def called_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...]:
        earlier = sum(
            tokens_of(arguments[name].shape[2:], self.patch(self._model.config, factor))
            for name, (factor, _) in self.history.items()
            if arguments.get(name) is not None
        )
        _, *present = super().called_grids(arguments)  # as `grids`, with what pipelines pass
        return ((1, 1, earlier), *present) if earlier > 0 else tuple(present)

    def install_tile_order(self) -> None:
        """Not as models without earlier frames, whose rotary embedding is made at once."""
        ModelAdapter.install_tile_order(self)
        self.hook_output("rope", self._order_present, with_kwargs=True)

    @classmethod
    def patch(cls, config: Mapping[str, Any], factor: int) -> Grid:
        """Frames, rows and columns of latents in a patch that is so many times as large."""
        raise NotImplementedError

    def video_order(self) -> torch.Tensor | None:
        """Order of the present frames' tokens, int64 ``[N]``; None: unchanged."""
        return self.grid_order(-1)

    def order_inputs(self, arguments: dict[str, Any]) -> None:
        """Makes sure that the present frames have numbers, which tell their rotary embedding."""
        super().order_inputs(arguments)
        if arguments.get(self.present_indices) is None:
            batch, _, frames, *_ = arguments["hidden_states"].shape
            frames //= self.patch(self._model.config, 1)[0]
            numbers = torch.arange(frames, device="cpu")
            arguments[self.present_indices] = numbers.expand(batch, -1)
        self._present = arguments[self.present_indices]

    def _order_present(
        self,
        _module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        """Forward hook of the rotary embedding, which the model calls for each part."""
        indices = kwargs.get("frame_indices", args[0] if args else None)
        order = self.video_order()
        if order is None or indices is not self._present:
            return None
        return self.ordered_places(output, order)

    def ordered_places(self, output: Any, order: torch.Tensor) -> Any:
        """The rotary embedding of the present frames in another order."""
        raise NotImplementedError


def tokens_of(latents: Sequence[int], patch: Grid) -> int:
    """Tokens of so many frames, rows and columns; the model repeats the edges of what is left."""
    return math.prod(math.ceil(size / edge) for size, edge in zip(latents, patch, strict=True))

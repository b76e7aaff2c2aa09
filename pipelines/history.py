"""Models that continue a video: earlier frames come before the present ones in the sequence.

The earlier frames, older ones in larger patches, stay in the model's order. They count as one row
of tokens before the grid of the present frames, which alone is reordered. The rotary embedding is
made part by part, so that of the present frames is known by the frame numbers that it is made for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chipsparse.layout import Grid
from chipsparse.pipelines.call_reader import Arguments
from chipsparse.pipelines.family_facts import Config
from chipsparse.pipelines.token_grids import patch_of, patched
from chipsparse.pipelines.token_order import TokenOrder

WHY_WHOLE = "its blocks tell earlier frames from present ones by their places among all tokens"


@dataclass(frozen=True)
class History:
    """The earlier frames of a family; as its `FamilyFacts.grids`, the grids of planned calls."""

    present_indices: str  # the argument with the numbers of the present frames
    # Arguments with the latents of earlier frames: how many times as large as those of the present
    # the patches are, and how many frames pipelines pass, even if they are empty.
    earlier: Mapping[str, tuple[int, int]]
    # Frames, rows and columns of latents in a patch that is this many times as large.
    patch: Callable[[Config, int], Grid]

    def __call__(self, config: Config, latents: Grid) -> tuple[Grid, ...]:
        """Return the grid of the present frames, after the earlier ones that pipelines pass."""
        _, rows, columns = latents
        earlier = sum(
            tokens_of((frames, rows, columns), self.patch(config, factor))
            for factor, frames in self.earlier.values()
        )
        return ((1, 1, earlier), *patched(latents, patch_of(config)))

    def called(self, config: Config, arguments: Arguments) -> tuple[Grid, ...]:
        """Return the grids of a call."""
        earlier = sum(
            tokens_of(arguments[name].shape[2:], self.patch(config, factor))
            for name, (factor, _) in self.earlier.items()
            if arguments.get(name) is not None
        )
        _, _, frames, rows, columns = arguments["hidden_states"].shape
        present = patched((frames, rows, columns), patch_of(config))
        return ((1, 1, earlier), *present) if earlier > 0 else present


class PresentFrames:
    """Orders the rotary embedding of the present frames, which the model makes for each part."""

    def __init__(
        self,
        history: History,
        tokens: TokenOrder,
        reorder: Callable[[Any, torch.Tensor], Any],  # of the rotary embedding
    ) -> None:
        self._history = history
        self._tokens = tokens
        self._reorder = reorder
        self._indices: torch.Tensor | None = None  # the frame numbers of the open call
        tokens.hook_output("rope", self._order_present, with_kwargs=True)

    def order(self) -> torch.Tensor | None:
        """Return the order of the present frames' tokens, int64 ``[N]``; None: unchanged."""
        return self._tokens.grid_order(-1)

    def number(self, arguments: Arguments) -> None:
        """Make sure that the present frames have numbers, which tell their rotary embedding."""
        name = self._history.present_indices
        if arguments.get(name) is None:
            batch, _, frames, *_ = arguments["hidden_states"].shape
            frames //= self._history.patch(self._tokens.model.config, 1)[0]
            numbers = torch.arange(frames, device="cpu")
            arguments[name] = numbers.expand(batch, -1)
        self._indices = arguments[name]

    def _order_present(
        self,
        _module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        """Forward hook of the rotary embedding."""
        indices = kwargs.get("frame_indices", args[0] if args else None)
        order = self.order()
        if order is None or indices is not self._indices:
            return None
        return self._reorder(output, order)


def tokens_of(latents: Sequence[int], patch: Grid) -> int:
    """Return the tokens of frames, rows and columns; the model fills up incomplete patches."""
    return math.prod(math.ceil(size / edge) for size, edge in zip(latents, patch, strict=True))

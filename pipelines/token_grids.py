"""Grids of tokens: what models make of latents, and what positions of tokens name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch

from chipsparse.layout import Grid

MOST_GRIDS = 8  # more than that are no images, but positions of another kind


def patched(latents: Grid, patch: Grid) -> tuple[Grid]:
    """Return the one grid of whole patches of frames, rows and columns."""
    frames, rows, columns = (size // edge for size, edge in zip(latents, patch, strict=True))
    return ((frames, rows, columns),)


def patch_of(config: Mapping[str, Any]) -> Grid:
    """Frames, rows and columns of the latents that make one token of a transformer."""
    size = config["patch_size"]
    if isinstance(size, (list, tuple)):
        frames, rows, columns = size
        return frames, rows, columns
    return config.get("patch_size_t") or 1, size, size


def frame_by_frame(tokens: Grid) -> tuple[Grid, ...]:
    """A grid for each frame of a video."""
    frames, rows, columns = tokens
    return ((1, rows, columns),) * frames


def fitting(grids: tuple[Grid, ...] | None, tokens: int) -> tuple[Grid, ...]:
    """Return the grids, or one row if they do not make up all tokens: the model then complains."""
    if grids is None or sum(map(math.prod, grids)) != tokens:
        return ((1, 1, tokens),)
    return grids


def grids_of(ids: torch.Tensor) -> tuple[Grid, ...] | None:
    """Return the full grids of image tokens, one after the other, that position ids name.

    The ids ``[N, D]``, or ``[B, N, D]`` with the same for all samples, are image, row and column of
    each token in any dtype, and what else there is. Waits for the device. Each grid is (1, rows,
    columns); None where the ids form no grids, or too many.
    """
    ids = (ids if ids.ndim == 2 else ids[0]).cpu()
    grids: list[Grid] = []
    while ids.shape[0] > 0:
        if len(grids) == MOST_GRIDS:
            return None
        place = torch.arange(ids.shape[0], device="cpu")
        columns = _matching(ids, place * 0, place)
        rows = _matching(ids, place // columns, place % columns) // columns
        grids.append((1, rows, columns))
        ids = ids[rows * columns :]
    return tuple(grids) or None


def _matching(ids: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> int:
    """The number of leading ids that lie at these rows and columns seen from the first."""
    shift = torch.zeros(ids.shape, dtype=torch.int64, device="cpu")
    shift[:, 1] = row
    shift[:, 2] = column
    # Half precision cannot hold every whole number: round as the pipeline did.
    expected = (ids[0].double() + shift).to(ids.dtype)
    different = (ids != expected).any(dim=1).nonzero()
    return len(ids) if different.numel() == 0 else int(different[0])


def grids_at(coordinates: torch.Tensor) -> tuple[Grid, ...] | None:
    """Return the full grids of video tokens, one after the other, that coordinates name.

    Coordinates are ``[3, N]``: time, row and column of each token. Waits for the device. Each grid
    is (frames, rows, columns), all with frames of one size; a new one begins where time does not go
    on. None where the coordinates form no such grids.
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


def reorder_patches(latents: torch.Tensor, patch: Grid, order: torch.Tensor) -> torch.Tensor:
    """Moves patches, each as a whole, for models that cut them within a compiled block.

    A hook after such a patch embedding would be part of its graph. The embedding treats all patches
    alike, so its tokens come out in this order. The ``i``-th position of latents ``[B, C, F, H,
    W]``, in raster order, gets the patch ``order[i]``, int64 ``[N]``. Incomplete patches are
    dropped.
    """
    batch, channels = latents.shape[:2]
    grid = [size // edge for size, edge in zip(latents.shape[2:], patch, strict=True)]
    edges = [count * edge for count, edge in zip(grid, patch, strict=True)]
    whole = latents[:, :, : edges[0], : edges[1], : edges[2]]
    split = [size for pair in zip(grid, patch, strict=True) for size in pair]
    patches = whole.reshape(batch, channels, *split).permute(0, 1, 2, 4, 6, 3, 5, 7).flatten(2, 4)
    moved = patches.index_select(2, order.to(latents.device)).unflatten(2, grid)
    return moved.permute(0, 1, 2, 5, 3, 6, 4, 7).reshape(batch, channels, *edges)

"""Token permutation: video or image tokens by 3D tiles, which makes query blocks compact.

A block of consecutive rows in raster order is a thin line of the image; its tokens attend to
different positions. A tile (a few frames, rows and columns) attends to much the same columns, so
one index list serves all its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def grids_permutation(grids: Sequence[tuple[int, int, int]], tile: tuple[int, ...]) -> torch.Tensor:
    """The `tile_permutation` of several grids in a row; int64 ``[N]`` over all their tokens."""
    orders = []
    first = 0
    for grid in grids:
        orders.append(first + tile_permutation(grid, tile))
        first += math.prod(grid)
    return torch.cat(orders)


def tile_permutation(grid: tuple[int, int, int], tile: tuple[int, ...]) -> torch.Tensor:
    """The permutation that lists the tokens of each tile one after the other, int64 ``[N]``.

    Position ``i`` of the new order holds raster token ``order[i]``. Sizes that the tile does not
    divide leave smaller tiles at the far edges; every token is kept.
    """
    axes = (torch.arange(size, device="cpu") for size in grid)
    frame, row, column = (axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij"))
    key = torch.zeros_like(frame)
    coarse = [axis // size for axis, size in zip((frame, row, column), tile, strict=True)]
    for axis in coarse:
        key = key * (int(axis.max()) + 1) + axis
    return torch.argsort(key, stable=True)


def inverse_permutation(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes ``order`` (int64 ``[N]``)."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse

"""The columns that layers keep: read from packed bits by the host on request, for the report."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch

from chipsparse.config import SparsityConfig
from chipsparse.layout import ModelLayout

REGIONS = 3  # that are named
REGION = (4, 4, 8)  # frames, rows and columns of one where tokens have no tiles


@dataclass(frozen=True)
class KeptRegion:
    """A piece of the video or image whose columns are kept by many query blocks."""

    grid: int  # number of the image or video; 0 but where a model sees several in one sequence
    frames: tuple[int, int]  # first and last, in tokens, as are rows and columns
    rows: tuple[int, int]
    columns: tuple[int, int]
    kept: float  # mean share of the query blocks of all heads that keep one of its columns


@dataclass(frozen=True)
class KeptColumns:
    """The columns that one layer's sparse attention keeps now. Shares are from 0 to 1."""

    transformer: str
    branch: str
    layer: int
    columns: int  # how many there are
    lists: int  # how many choose for themselves: query blocks of all heads and samples
    kept: float  # mean share of the columns in a list
    text: float  # share of what all lists keep that are text columns
    static: float  # the same of the columns that `static_columns` names
    local: float  # the same of a query block's own columns
    everywhere: float  # share of the columns that every list has
    nowhere: float  # share of the columns that no list has
    regions: tuple[KeptRegion, ...]  # those that are kept most, the first one most


def read_kept_columns(
    packed: torch.Tensor,  # uint8 `[B, H, G, ceil(N / 8)]`
    layout: ModelLayout,
    config: SparsityConfig,
    *,
    static: torch.Tensor | None,  # bool `[N]`, the columns that the user always keeps
    order: torch.Tensor | None,  # of the video or image tokens, int64; None for raster order
    where: tuple[str, str, int],  # transformer, branch and layer, for the result
) -> KeptColumns:
    """Read the packed bits of one layer; the host waits for them."""
    blocks = packed.shape[2]
    size = config.block_size
    query_rows = layout.query_rows
    lists = packed.flatten(0, 2).cpu().numpy()
    counts = np.zeros(layout.tokens, np.int64)  # of lists that hold each column
    local = 0
    for number, row in enumerate(lists):
        bits = np.unpackbits(row, bitorder="little", count=layout.tokens)
        own = query_rows[number % blocks * size :][:size]
        local += int(bits[max(0, own.start) : max(0, own.stop)].sum())
        counts += bits
    in_static = 0 if static is None else counts[static.cpu().numpy()].sum()
    kept = int(counts.sum())
    of_grid = counts[layout.grid_columns]
    shares = of_grid / len(lists)
    if order is not None:
        shares[order.cpu().numpy()] = shares.copy()
    return KeptColumns(
        *where,
        columns=layout.tokens,
        lists=len(lists),
        kept=kept / (len(lists) * layout.tokens),
        text=(kept - int(of_grid.sum())) / max(1, kept),
        static=int(in_static) / max(1, kept),
        local=local / max(1, kept),
        everywhere=int((counts == len(lists)).sum()) / layout.tokens,
        nowhere=int((counts == 0).sum()) / layout.tokens,
        regions=tuple(_regions(shares, layout, config.tile or REGION)),
    )


def _regions(shares: np.ndarray, layout: ModelLayout, tile: tuple[int, ...]) -> list[KeptRegion]:
    regions: list[KeptRegion] = []
    first = 0
    for number, grid in enumerate(layout.grids):
        own = shares[first : first + math.prod(grid)].reshape(grid)
        first += own.size
        pieces = (
            [(start, min(start + step, size) - 1) for start in range(0, size, step)]
            for size, step in zip(grid, tile, strict=True)
        )
        for frames, rows, columns in itertools.product(*pieces):
            places = tuple(slice(a, b + 1) for a, b in (frames, rows, columns))
            kept = float(own[places].mean())
            regions.append(KeptRegion(number, frames, rows, columns, kept))
    return sorted(regions, key=lambda region: -region.kept)[:REGIONS]

"""The columns that a layer keeps, read from packed bits by the host on request."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch
from bitarray import bitarray
from bitarray.util import count_and, zeros

from chipsparse.layers.static_columns import mask_bits
from chipsparse.layout import Grid, ModelLayout
from chipsparse.report.kept_columns import KeptColumns, KeptRegion

REGIONS = 3  # that are named


def read_kept_columns(
    packed: torch.Tensor,
    layout: ModelLayout,
    *,
    block_size_q: int,
    static: torch.Tensor | None,
    order: torch.Tensor | None,
    tile: tuple[int, ...],
    where: tuple[str, str, int],
) -> KeptColumns:
    """Reads the bits of one layer; the host waits for them.

    Args:
        packed: uint8 ``[B, H, G, ceil(N / 8)]``, as `pack_mask` makes them.
        layout: of the call.
        block_size_q: query rows that share one list.
        static: bool ``[N]``, the columns that the user always keeps, or None.
        order: of the video or image tokens, int64; None for raster order.
        tile: frames, rows and columns of a region, in tokens.
        where: transformer, branch and layer, for the result.
    """
    tokens, blocks = layout.tokens, packed.shape[2]
    query_rows, rows = layout.query_rows, packed.flatten(0, 2).cpu().numpy()
    text = _text_bits(layout)
    always = zeros(tokens, endian="little") if static is None else mask_bits(static)
    common, union = ~zeros(tokens, endian="little"), zeros(tokens, endian="little")
    kept = in_text = in_static = local = 0
    for number, row in enumerate(rows):
        bits = bitarray(endian="little")
        bits.frombytes(row.tobytes())
        del bits[tokens:]
        own = query_rows[number % blocks * block_size_q :][:block_size_q]
        kept += bits.count()
        local += bits.count(1, max(0, own.start), max(0, own.stop))
        in_text += count_and(bits, text)
        in_static += count_and(bits, always)
        common &= bits
        union |= bits
    return KeptColumns(
        *where,
        columns=tokens,
        lists=len(rows),
        kept=kept / (len(rows) * tokens),
        text=in_text / max(1, kept),
        static=in_static / max(1, kept),
        local=local / max(1, kept),
        everywhere=common.count() / tokens,
        nowhere=union.count(0) / tokens,
        regions=tuple(_regions(_column_counts(rows, layout, order) / len(rows), layout, tile)),
    )


def _text_bits(layout: ModelLayout) -> bitarray:
    bits = zeros(layout.tokens, endian="little")
    first = 0 if layout.text_first else layout.grid_tokens
    bits[first : first + layout.text_tokens] = 1
    return bits


def _column_counts(rows: np.ndarray, layout: ModelLayout, order: torch.Tensor | None) -> np.ndarray:
    """Return the number of lists that hold each video or image token, in raster order."""
    counts = np.zeros(layout.tokens, np.int64)
    for row in rows:
        counts += np.unpackbits(row, bitorder="little", count=layout.tokens)
    first = layout.text_tokens if layout.text_first else 0
    own = counts[first : first + layout.grid_tokens]
    if order is None:
        return own
    raster = np.empty_like(own)
    raster[order.cpu().numpy()] = own
    return raster


def _regions(shares: np.ndarray, layout: ModelLayout, tile: tuple[int, ...]) -> list[KeptRegion]:
    """Those with the largest mean share."""
    found: list[KeptRegion] = []
    first = 0
    for number, grid in enumerate(layout.grids):
        size = math.prod(grid)
        found += _tiles(shares[first : first + size].reshape(grid), grid, tile, number)
        first += size
    return sorted(found, key=lambda region: -region.kept)[:REGIONS]


def _tiles(
    shares: np.ndarray, grid: Grid, tile: tuple[int, ...], number: int
) -> Iterator[KeptRegion]:
    pieces = (
        [(start, min(start + step, size) - 1) for start in range(0, size, step)]
        for size, step in zip(grid, tile, strict=True)
    )
    for frames, rows, columns in itertools.product(*pieces):
        places = tuple(slice(a, b + 1) for a, b in (frames, rows, columns))
        yield KeptRegion(number, frames, rows, columns, float(shares[places].mean()))

"""Definition of `column_selection`: an exact top-k, and one column of each stratum by a hash."""

from __future__ import annotations

from itertools import product
from typing import TypeVar

import torch

from chipsparse.kernels.checks import TRANSIENT_BYTES, ranges
from chipsparse.kernels.column_selection import ColumnSelection
from chipsparse.kernels.mask_packing.reference import packed_bits

# What a row holds per column while it is chosen: keys and top-k values, then distances and masks.
TRANSIENT_BYTES_PER_COLUMN = 32
INT32_MAX = 2**31 - 1
LOW_32_BITS = 2**32 - 1

Integers = TypeVar("Integers", int, torch.Tensor)


def column_selection(call: ColumnSelection) -> torch.Tensor:
    """Run a checked `ColumnSelection`."""
    column_sums, static_columns = call.column_sums, call.every_static_column()
    batch, heads, blocks, columns = column_sums.shape
    packed = torch.empty(
        batch, heads, blocks, -(-columns // 8), dtype=torch.uint8, device=column_sums.device
    )
    bytes_per_block = columns * TRANSIENT_BYTES_PER_COLUMN
    for b, h in product(range(batch), range(heads)):
        for first, last in ranges(blocks, bytes_per_block, TRANSIENT_BYTES):
            sums = column_sums[b, h, first:last].float()
            keys = _ordered_keys(sums)
            static = None if static_columns is None else static_columns[b, h, first:last]
            if static is not None:
                keys.masked_fill_(static, INT32_MAX)
            mask = largest(keys, call.keep_count)
            if static is not None:
                mask |= static
            if call.random_count > 0 and columns > 0:
                blocks_drawn = range(call.first_block + first, call.first_block + last)
                head = call.first_head + h
                mask |= drawn_columns(mask, call.random_count, call.seed, b, head, blocks_drawn)
            mask |= sums.isnan().any(-1, keepdim=True)
            packed[b, h, first:last] = packed_bits(mask)
    return packed


def largest(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Marks the ``count`` largest integers of each row, lower columns first among equal ones."""
    count = min(count, keys.shape[-1])
    if count == 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    threshold = keys.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = keys > threshold, keys == threshold
    still_free = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= still_free))


def drawn_columns(
    kept: torch.Tensor, random_count: int, seed: int, batch: int, head: int, blocks: range
) -> torch.Tensor:
    """Draws a column that is not kept in each of ``random_count`` strata of about equal width.

    Stratum i of r is the columns from floor(i M / r) to floor((i + 1) M / r). A hash of the seed,
    the position of the row and i gives a column of it; the first one from there, in a circle
    within the stratum, that is not kept is drawn. Takes and returns bool ``[blocks, M]``.
    """
    columns, device = kept.shape[-1], kept.device
    strata = min(random_count, columns)
    edges = torch.arange(strata + 1, dtype=torch.int64, device=device) * columns // strata
    widths = edges.diff()
    hashes = random_hashes(seed, batch, head, blocks, strata, device)
    stratum = torch.arange(strata, device=device).repeat_interleave(widths, output_size=columns)
    first = (edges[:-1] + hashes % widths)[:, stratum]
    column = torch.arange(columns, dtype=torch.int64, device=device)
    distance = (column - first) % widths[stratum]
    distance.masked_fill_(kept, columns)
    nearest = torch.full_like(hashes, columns)
    nearest.scatter_reduce_(-1, stratum.expand_as(distance), distance, "amin")
    return (distance == nearest[:, stratum]) & ~kept


def random_hashes(
    seed: int, batch: int, head: int, blocks: range, strata: int, device: torch.device
) -> torch.Tensor:
    """Pseudo-random integers below 2**32 from the position alone: int64 ``[blocks, strata]``."""
    row = torch.arange(blocks.start, blocks.stop, dtype=torch.int64, device=device)[:, None]
    stratum = torch.arange(strata, dtype=torch.int64, device=device)
    state = torch.full((), position_state(seed, batch, head), dtype=torch.int64, device=device)
    for part in (row, stratum):
        state = _mix(((state + 0x9E3779B9) ^ part) & LOW_32_BITS)
    return state


def position_state(seed: int, *position: int) -> int:
    """State of the hash after both halves of the seed and the first parts of a position."""
    state = 0
    for part in (seed & LOW_32_BITS, (seed >> 32) & LOW_32_BITS, *position):
        state = _mix(((state + 0x9E3779B9) ^ part) & LOW_32_BITS)
    return state


def _mix(x: Integers) -> Integers:
    """The 32-bit finalizer of MurmurHash3 (Appleby), a bijection; below 2**32 in and out."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & LOW_32_BITS
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & LOW_32_BITS
    return x ^ (x >> 16)


def _ordered_keys(sums: torch.Tensor) -> torch.Tensor:
    """float32 to int32 in the same order; every number, +inf too, stays below ``INT32_MAX``.

    The bits of non-negative floats are ordered as integers already; those of negative ones run
    backwards, so all but their sign are flipped.
    """
    bits = (sums + 0.0).view(torch.int32)  # adding 0 turns -0 into 0
    return bits ^ ((bits >> 31) & INT32_MAX)

"""Definition of `column_selection`: an exact top-k."""

from __future__ import annotations

from itertools import product

import torch

from chipsparse.kernels.checks import TRANSIENT_BYTES, ranges
from chipsparse.kernels.column_selection import ColumnSelection
from chipsparse.kernels.mask_packing.reference import packed_bits

# What a row holds per column while it is chosen: keys, top-k values and masks.
TRANSIENT_BYTES_PER_COLUMN = 32
INT32_MAX = 2**31 - 1


def column_selection(call: ColumnSelection) -> torch.Tensor:
    """Run a checked `ColumnSelection`."""
    column_sums = call.column_sums
    static = call.static_columns
    batch, heads, blocks, columns = column_sums.shape
    packed = torch.empty(
        batch,
        heads,
        blocks,
        -(-columns // 8),
        dtype=torch.uint8,
        device=column_sums.device,
    )
    bytes_per_block = columns * TRANSIENT_BYTES_PER_COLUMN
    for b, h in product(range(batch), range(heads)):
        for first, last in ranges(blocks, bytes_per_block, TRANSIENT_BYTES):
            sums = column_sums[b, h, first:last].float()
            keys = _ordered_keys(sums)
            if static is not None:
                keys.masked_fill_(static, INT32_MAX)
            mask = largest(keys, call.keep_count)
            if static is not None:
                mask |= static
            mask |= sums.isnan().any(-1, keepdim=True)
            packed[b, h, first:last] = packed_bits(mask)
    return packed


def largest(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Marks the ``count`` largest integers of each row, lower columns first among equal ones."""
    count = min(count, keys.shape[-1])
    if count == 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    threshold = keys.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above = keys > threshold
    equal = keys == threshold
    still_free = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= still_free))


def _ordered_keys(sums: torch.Tensor) -> torch.Tensor:
    """float32 to int32 in the same order; every number, +inf too, stays below ``INT32_MAX``.

    The bits of non-negative floats are ordered as integers already; those of negative ones run
    backwards, so all but their sign are flipped.
    """
    bits = (sums + 0.0).view(torch.int32)  # adding 0 turns -0 into 0
    return bits ^ ((bits >> 31) & INT32_MAX)

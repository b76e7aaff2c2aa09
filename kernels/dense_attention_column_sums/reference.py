"""Definition of `dense_attention_column_sums`: one head and a few query groups at a time."""

from __future__ import annotations

from itertools import product

import torch

from chipsparse.kernels.checks import (
    compute_dtype,
    group_chunks,
    group_count,
    tile_bytes,
)
from chipsparse.kernels.dense_attention_column_sums import DenseAttentionColumnSums
from chipsparse.kernels.softmax import softmax_with_lse

# exp(80) times the rows of a group stays within float32.
LARGEST_EXPONENT = 80.0


def dense_attention_column_sums(
    call: DenseAttentionColumnSums,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `DenseAttentionColumnSums`; the call is checked.

    Holds scores and weights of so many bytes at a time, one group of one head at least, and a copy
    of one head's keys and values where they are not fp32.
    """
    query, key, value, group_rows = call.query, call.key, call.value, call.group_rows
    batch, heads, rows, _ = query.shape
    columns, groups = key.shape[2], group_count(rows, group_rows)
    dtype, device = compute_dtype(query), query.device
    output = torch.empty_like(query)
    lse = torch.empty(batch, heads, rows, dtype=dtype, device=device)
    column_sums = torch.empty(
        batch, heads, groups, columns, dtype=column_sums_dtype(query), device=device
    )
    group_bytes = 2 * group_rows * columns * dtype.itemsize
    limit = tile_bytes(device)
    lse_previous = call.lse_previous.to(dtype)
    for b, h in product(range(batch), range(heads)):
        key_tile, value_tile = key[b, h].to(dtype), value[b, h].to(dtype)
        for chunk in group_chunks(rows, group_rows, group_bytes, limit):
            scores = torch.mm(query[b, h, chunk.rows].to(dtype) * call.softmax_scale, key_tile.T)
            weights, chunk_lse = softmax_with_lse(scores)
            output[b, h, chunk.rows] = torch.mm(weights, value_tile)
            lse[b, h, chunk.rows] = chunk_lse
            # exp(s - lse_previous) = weights * exp(lse - lse_previous): no second exponential. The
            # clamp keeps 0 * inf, a NaN, out of the sums where the constants are stale.
            shift = chunk_lse - lse_previous[b, h, chunk.rows]
            factor = shift.clamp_(max=LARGEST_EXPONENT).exp_().unflatten(0, chunk.shape)
            sums = torch.bmm(factor.unsqueeze(1), weights.unflatten(0, chunk.shape))
            column_sums[b, h, chunk.groups] = sums.squeeze(1)
    return output, lse, column_sums


def column_sums_dtype(query: torch.Tensor) -> torch.dtype:
    """bf16 for half precision, to halve what selection reads; else the dtype of the query."""
    return query.dtype if query.dtype.itemsize > 2 else torch.bfloat16

"""Definition of `dense_attention_column_sums`: one head and a few query blocks at a time."""

from __future__ import annotations

from itertools import product

import torch

from chipsparse.kernels.checks import block_chunks, block_count, compute_dtype, tile_bytes
from chipsparse.kernels.dense_attention.reference import softmax_with_lse
from chipsparse.kernels.dense_attention_column_sums import DenseAttentionColumnSums

# exp(80) times the rows of a block stays within float32.
LARGEST_EXPONENT = 80.0


def dense_attention_column_sums(
    call: DenseAttentionColumnSums,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run a checked `DenseAttentionColumnSums`."""
    query = call.query
    key = call.key
    value = call.value
    block_size_q = call.block_size_q
    batch, heads, rows, _ = query.shape
    columns = key.shape[2]
    blocks = block_count(rows, block_size_q)
    dtype = compute_dtype(query)
    device = query.device
    output = torch.empty_like(query)
    lse = torch.empty(batch, heads, rows, dtype=dtype, device=device)
    column_sums = torch.empty(
        batch,
        heads,
        blocks,
        columns,
        dtype=column_sums_dtype(query),
        device=device,
    )
    block_bytes = 2 * block_size_q * columns * dtype.itemsize
    limit = tile_bytes(device)
    lse_previous = call.lse_previous.to(dtype)
    for b, h in product(range(batch), range(heads)):
        key_tile = key[b, h].to(dtype)
        value_tile = value[b, h].to(dtype)
        for chunk in block_chunks(rows, block_size_q, block_bytes, limit):
            scores = torch.mm(query[b, h, chunk.rows].to(dtype) * call.softmax_scale, key_tile.T)
            weights, chunk_lse = softmax_with_lse(scores)
            output[b, h, chunk.rows] = torch.mm(weights, value_tile)
            lse[b, h, chunk.rows] = chunk_lse
            # exp(s - lse_previous) = weights * exp(lse - lse_previous): no second exponential. The
            # clamp keeps 0 * inf, a NaN, out of the sums where the LSE is stale.
            shift = chunk_lse - lse_previous[b, h, chunk.rows]
            factor = shift.clamp_(max=LARGEST_EXPONENT).exp_().unflatten(0, chunk.shape)
            sums = torch.bmm(factor.unsqueeze(1), weights.unflatten(0, chunk.shape))
            column_sums[b, h, chunk.blocks] = sums.squeeze(1)
    return output, lse, column_sums


def column_sums_dtype(query: torch.Tensor) -> torch.dtype:
    """bf16 for half precision, to halve what selection reads; else the dtype of the query."""
    return query.dtype if query.dtype.itemsize > 2 else torch.bfloat16

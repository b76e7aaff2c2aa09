"""Definition of `dense_attention`: an exact softmax in float32, a few query rows at a time."""

from __future__ import annotations

import torch

from chipsparse.kernels.checks import compute_dtype, ranges, tile_bytes
from chipsparse.kernels.dense_attention.call import DenseAttention


def dense_attention(call: DenseAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a checked `DenseAttention`."""
    query = call.query
    batch, heads, rows, _ = query.shape
    dtype = compute_dtype(query)
    output = torch.empty_like(query)
    lse = torch.empty(batch, heads, rows, dtype=dtype, device=query.device)
    key = call.key.to(dtype)
    value = call.value.to(dtype)
    row_bytes = 2 * batch * heads * key.shape[2] * dtype.itemsize
    limit = tile_bytes(query.device)
    for first, last in ranges(rows, row_bytes, limit):
        scores = (query[:, :, first:last].to(dtype) * call.softmax_scale) @ key.mT
        weights, lse[:, :, first:last] = softmax_with_lse(scores)
        output[:, :, first:last] = weights @ value
    return output, lse


def softmax_with_lse(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last dimension, and the natural log-sum-exp; a row of -inf gives NaN."""
    weights = torch.softmax(scores, dim=-1)
    # The largest weight of a row is exp(max - lse): no second exponential of every score.
    return weights, scores.amax(-1) - weights.amax(-1).log_()

"""Definition of `fp8_dense_attention`: one head and a few query blocks at a time, in float32."""

from __future__ import annotations

from itertools import product

import torch

from chipsparse.kernels.checks import block_chunks, block_count, tile_bytes
from chipsparse.kernels.dense_attention_column_sums.reference import (
    LARGEST_EXPONENT,
    column_sums_dtype,
)
from chipsparse.kernels.fp8_dense_attention import WEIGHT_BITS, Fp8DenseAttention
from chipsparse.kernels.fp8_quantization import FP8
from chipsparse.kernels.fp8_quantization.reference import restore


def fp8_dense_attention(
    call: Fp8DenseAttention,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Run a checked `Fp8DenseAttention`."""
    tensors = call.tensors
    block_size_q = call.block_size_q
    lse_previous = call.lse_previous
    batch, heads, rows, _ = tensors.query.shape
    columns = tensors.columns
    blocks = block_count(rows, block_size_q)
    device = tensors.query.device
    output = torch.empty_like(tensors.query, dtype=tensors.dtype)
    lse = torch.empty(batch, heads, rows, device=device)
    sums = None
    if lse_previous is not None:
        like = torch.empty(0, dtype=tensors.dtype)
        shape = (batch, heads, blocks, columns)
        sums = torch.empty(shape, dtype=column_sums_dtype(like), device=device)
    block_bytes = 4 * 4 * block_size_q * columns
    for head in product(range(batch), range(heads)):
        key = tensors.key[head].float()
        value = restore(tensors.value[head], columns).float()
        for chunk in block_chunks(rows, block_size_q, block_bytes, tile_bytes(device)):
            some = (*head, chunk.rows)
            scores = tensors.query[some].float() @ key.T * tensors.row_factor[some][:, None]
            largest = scores.amax(-1, keepdim=True)
            weights = (scores - largest).exp_()
            total = weights.sum(-1, keepdim=True)
            # Rounded as they are multiplied, relative to the largest.
            rounded = (weights * 2**WEIGHT_BITS).to(FP8).float().mul_(2**-WEIGHT_BITS)
            attended = rounded @ value / total
            output[some] = attended * tensors.value_scale[head] + tensors.value_mean[head]
            lse[some] = (largest + total.log()).squeeze(-1) + tensors.row_shift[some]
            if sums is not None:
                assert lse_previous is not None
                shift = lse[some] - lse_previous[some].float()
                factor = shift.clamp_(max=LARGEST_EXPONENT).exp_() / total.squeeze(-1)
                by_block = factor.unflatten(0, chunk.shape).unsqueeze(1)
                chunk_sums = torch.bmm(by_block, weights.unflatten(0, chunk.shape))
                sums[(*head, chunk.blocks)] = chunk_sums.squeeze(1)
    return output, lse, sums

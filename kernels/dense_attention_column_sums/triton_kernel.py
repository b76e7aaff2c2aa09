"""Attention with column sums in plain Triton: every GPU from Ampere on, and Triton's interpreter.

One program owns a tile of rows of a query block and passes once over all keys, so the column sums
of a tile are final as soon as its weights are known: they are stored once, without atomics.

A weight of online softmax is ``p = exp(s - m)`` with the largest score m so far, and a column sums
``exp(s - lse_previous) = p exp(m - lse_previous)``: one multiplication per score, and a second
exponential only per row and tile.

The same kernel computes `fp8_dense_attention` (NVIDIA GPUs from Ada on). ``gluon_sm90.py`` there
explains the levels that its weights are relative to, and why no product is added up by tensor
cores. The keys of a tile are then read in the order in which the values are stored.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from chipsparse.kernels.checks import TRANSIENT_BYTES, block_count, ranges
from chipsparse.kernels.dense_attention_column_sums import DenseAttentionColumnSums
from chipsparse.kernels.dense_attention_column_sums.reference import LARGEST_EXPONENT
from chipsparse.kernels.fp8_dense_attention import LOWEST_BITS, WEIGHT_BITS, Fp8DenseAttention
from chipsparse.kernels.launch import launch
from chipsparse.kernels.triton_blocks import (
    SCORE_OFFSET,
    dot,
    fp8_dot,
    int8_dot,
    rows_per_program,
    stored_token,
    to_fp8,
)
from chipsparse.kernels.triton_support import cdiv, compute_capability, with_positive_scale

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))
LARGEST_SHIFT = tl.constexpr(LARGEST_EXPONENT * math.log2(math.e))
FP8_BITS = tl.constexpr(float(WEIGHT_BITS))
LOWEST = tl.constexpr(float(LOWEST_BITS))
# ``STAGES`` of the loop over full tiles, whose pipelining is set there and not for the kernel: the
# loads of the last tile need none.
CONFIGS: dict[str, dict[str, Any]] = {
    name: {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "STAGES": stages}
    for name, m, n, warps, stages in (
        ("m128n64w8s3", 128, 64, 8, 3),
        ("m128n32w4s3", 128, 32, 4, 3),
        ("m64n64w4s2", 64, 64, 4, 2),
    )
}
FP8_CONFIG = "m128n64w8s3"

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def dense_attention_column_sums(
    call: DenseAttentionColumnSums,
    *,
    config: str | None = None,
    with_column_sums: bool = True,
) -> Result:
    """Run a checked `DenseAttentionColumnSums`; ``config`` names one of `CONFIGS`."""
    query, scale = with_positive_scale(call.query, call.softmax_scale)
    return _launch(
        query,
        call.key,
        call.value,
        lse_previous=call.lse_previous if with_column_sums else None,
        block_size_q=call.block_size_q,
        options=CONFIGS[config or default_config(query)],
        scale=scale,
    )


def fp8_dense_attention(call: Fp8DenseAttention) -> Result:
    """Run a checked `Fp8DenseAttention`."""
    tensors = call.tensors
    return _launch(
        tensors.query,
        tensors.key,
        tensors.value,
        lse_previous=call.lse_previous,
        block_size_q=call.block_size_q,
        options=CONFIGS[FP8_CONFIG],
        factors=tensors.factors,
        dtype=tensors.dtype,
    )


def default_config(query: torch.Tensor) -> str:
    """Return the entry of `CONFIGS` for this device."""
    if torch.version.hip is not None:
        return "m64n64w4s2"  # within 64 KiB of shared memory
    if query.device.type == "cuda" and compute_capability(query.device)[0] == 9:
        return "m128n32w4s3"
    return "m128n64w8s3"  # within 99 KiB without Hopper's query tile


def _launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    lse_previous: torch.Tensor | None,
    block_size_q: int,
    options: dict[str, Any],
    scale: float = 1.0,
    factors: list[torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Result:
    """Return output, log-sum-exp, and column sums where there is a previous LSE.

    A block of more rows than a tile gets sums per tile in float32, added in a fixed order; as
    many blocks are done at a time as `TRANSIENT_BYTES` has room for.

    Numbers in 16 bits have a positive ``scale`` of the scores. Those in 8 bits, with the value
    ``[B, H, D, M']``, have the ``factors`` of `Fp8Attention` and the ``dtype`` of their output.
    """
    batch, heads, rows, head_dim = query.shape
    columns = key.shape[2]
    device = query.device
    tile_rows = rows_per_program(block_size_q, options["BLOCK_M"])
    blocks = block_count(rows, block_size_q)
    row_tiles = cdiv(block_size_q, tile_rows)
    units = batch * heads * blocks
    # Laid out like the query, so that a view of [B, N, H, D] gives one: no copy follows.
    output = torch.empty_like(query, dtype=dtype)
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=device)
    previous = lse if lse_previous is None else lse_previous.float().contiguous()

    sizes = (heads, rows, columns, value.shape[3], blocks, block_size_q, row_tiles)

    def attend(first_unit: int, last_unit: int, sums: torch.Tensor) -> None:
        # Consecutive programs share a head, so that they find its keys in the cache.
        launch(
            _attention_kernel,
            ((last_unit - first_unit) * row_tiles,),
            query,
            key,
            value,
            *(factors or [lse] * 4),  # never read of 16-bit numbers
            previous,
            output,
            lse,
            sums,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *output.stride()[:3],
            *sizes,
            first_unit,
            scale * LOG2_E.value,
            HEAD_DIM=head_dim,
            IN_8_BITS=factors is not None,
            WITH_COLUMN_SUMS=lse_previous is not None,
            WIDE_PRODUCTS=device.type == "cpu",
            **(options | {"BLOCK_M": tile_rows}),
        )

    if lse_previous is None:
        attend(0, units, lse)
        return output, lse, None
    column_sums = torch.empty(batch, heads, blocks, columns, dtype=torch.bfloat16, device=device)
    if row_tiles == 1:
        attend(0, units, column_sums)
        return output, lse, column_sums
    unit_sums = column_sums.view(units, columns)
    # One more row for their sum, which is float32 before it is rounded.
    for first, last in ranges(units, 4 * (row_tiles + 1) * columns, TRANSIENT_BYTES):
        sums = torch.empty(last - first, row_tiles, columns, dtype=torch.float32, device=device)
        attend(first, last, sums)
        unit_sums[first:last] = sums.sum(1)
    return output, lse, column_sums


@triton.jit
def _add_tile(
    query,
    key,
    value,
    column_exists,
    factor,
    level,
    largest,
    total,
    out,
    IN_8_BITS: tl.constexpr,
    WIDE_PRODUCTS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add a tile of keys and values to a softmax: its weights, and what the rows have so far.

    The level is the score, in units of ln 2, that a weight of 1 (in 8 bits: of 256) has.
    """
    if IN_8_BITS:
        scores = int8_dot(query, key.T)
        if MASKED:
            scores = tl.where(column_exists[None, :], scores, float("-inf"))
        of_tile = (tl.max(scores, 1) - SCORE_OFFSET) * factor
        new_level = tl.maximum(of_tile, largest - LOWEST)
        largest = tl.maximum(largest, of_tile)
        offset = new_level - FP8_BITS + SCORE_OFFSET * factor
        weights = tl.exp2(scores * factor[:, None] - offset[:, None])
    else:
        scores = dot(query, key.T, None, WIDE_PRODUCTS)
        if MASKED:
            scores = tl.where(column_exists[None, :], scores, float("-inf"))
        new_level = tl.maximum(level, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - new_level[:, None])
    rescale = tl.exp2(level - new_level)
    total = total * rescale + tl.sum(weights, 1)
    if IN_8_BITS:
        part = fp8_dot(to_fp8(weights, WIDE_PRODUCTS), value.T, WIDE_PRODUCTS)
        # Not a sum, which the compiler would leave to the tensor cores.
        out = tl.fma(out, rescale[:, None] + tl.zeros_like(out), part)
    else:
        out = out * rescale[:, None]
        out = dot(weights.to(value.dtype), value, out, WIDE_PRODUCTS)
    return weights, new_level, largest, total, out


@triton.jit
def _sum_weights(weights, level, lse_previous, IN_8_BITS: tl.constexpr):
    """Return the sums over rows of weights under a level, as weights under another LSE."""
    shift = level - lse_previous
    shift = tl.where(shift > LARGEST_SHIFT, LARGEST_SHIFT, shift)  # keeps NaN, unlike tl.minimum
    if IN_8_BITS:
        shift -= FP8_BITS
    return tl.sum(weights * tl.exp2(shift)[:, None], 0)


@triton.jit
def _attention_kernel(
    query_ptr,  # [B, H, N, D]
    key_ptr,  # [B, H, M, D]
    value_ptr,  # [B, H, M, D]; in 8 bits [B, H, D, M']
    row_factor_ptr,  # in 8 bits [B, H, N], contiguous, as row_shift, lse_previous and lse
    row_shift_ptr,
    value_scale_ptr,  # in 8 bits [B, H, D], contiguous
    value_mean_ptr,
    lse_previous_ptr,
    output_ptr,  # [B, H, N, D]
    lse_ptr,
    column_sums_ptr,  # [units, row_tiles, M], contiguous, from first_unit on
    query_stride_b,
    query_stride_h,
    query_stride_n,
    key_stride_b,
    key_stride_h,
    key_stride_m,
    value_stride_b,
    value_stride_h,
    value_stride,  # between tokens; in 8 bits between channels
    output_stride_b,
    output_stride_h,
    output_stride_n,
    heads,
    rows,
    num_columns,
    stored,  # M'
    blocks,
    block_size_q,
    row_tiles,  # per block
    first_unit,  # a unit is one block of one head
    scale,  # of 16-bit scores in units of ln 2
    HEAD_DIM: tl.constexpr,
    IN_8_BITS: tl.constexpr,
    WITH_COLUMN_SUMS: tl.constexpr,
    WIDE_PRODUCTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    unit = first_unit + tl.program_id(0) // row_tiles
    row_tile = tl.program_id(0) % row_tiles
    block = unit % blocks
    head = unit // blocks
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    head = head.to(tl.int64)
    query_ptr += b * query_stride_b + h * query_stride_h
    key_ptr += b * key_stride_b + h * key_stride_h
    value_ptr += b * value_stride_b + h * value_stride_h
    column_sums_ptr += tl.program_id(0).to(tl.int64) * num_columns

    in_block = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = block * block_size_q + in_block
    row_exists = (in_block < block_size_q) & (row < rows)
    dims = tl.arange(0, HEAD_DIM)
    per_row = head * rows + row
    query = tl.load(
        query_ptr + row[:, None].to(tl.int64) * query_stride_n + dims[None, :],
        mask=row_exists[:, None],
        other=0,
    )
    factor = scale
    if IN_8_BITS:
        factor = tl.load(row_factor_ptr + per_row, mask=row_exists, other=0.0) * LOG2_E
        shift = tl.load(row_shift_ptr + per_row, mask=row_exists, other=0.0) * LOG2_E
    lse_previous = tl.full([BLOCK_M], float("inf"), tl.float32)
    if WITH_COLUMN_SUMS:
        # Rows that do not exist weigh exp(-inf) in the column sums.
        lse_previous = tl.load(lse_previous_ptr + per_row, mask=row_exists, other=float("inf"))
        lse_previous *= LOG2_E
        if IN_8_BITS:
            lse_previous -= shift

    # The loop takes the tiles before the last, which are full and need no mask. It runs at least
    # once, as ptxas makes matrix products wait for each other where sums may skip the loop; with no
    # full tile it computes something valid that is then dropped.
    full = (num_columns - 1) // BLOCK_N * BLOCK_N
    place = tl.arange(0, BLOCK_N)
    token = place
    if IN_8_BITS:
        token = stored_token(place)
    tile = tl.minimum(token, num_columns - 1).to(tl.int64)[:, None]
    key_tile_ptr = key_ptr + tile * key_stride_m + dims[None, :]
    if IN_8_BITS:
        value_tile_ptr = value_ptr + dims[:, None].to(tl.int64) * value_stride + place[None, :]
        in_stored = (place < stored)[None, :]
    else:
        value_tile_ptr = value_ptr + tile * value_stride + dims[None, :]
    level = tl.full([BLOCK_M], float("-inf"), tl.float32)
    largest = level
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for first in tl.range(0, tl.maximum(full, BLOCK_N), BLOCK_N, num_stages=STAGES):
        key = tl.load(key_tile_ptr + tl.cast(first, tl.int64) * key_stride_m)
        if IN_8_BITS:
            value = tl.load(value_tile_ptr + first, mask=in_stored, other=0.0)
        else:
            value = tl.load(value_tile_ptr + tl.cast(first, tl.int64) * value_stride)
        weights, level, largest, total, out = _add_tile(
            query,
            key,
            value,
            token,
            factor,
            level,
            largest,
            total,
            out,
            IN_8_BITS,
            WIDE_PRODUCTS,
            False,
        )
        if WITH_COLUMN_SUMS:
            sums = _sum_weights(weights, level, lse_previous, IN_8_BITS)
            sums = sums.to(column_sums_ptr.dtype.element_ty)
            tl.store(column_sums_ptr + first + token, sums, mask=token < full)
    level = tl.where(full > 0, level, float("-inf"))
    largest = tl.where(full > 0, largest, float("-inf"))
    total = tl.where(full > 0, total, 0.0)
    out = tl.where(full > 0, out, 0.0)

    # The last tile, which may be partial.
    column = full + token
    column_exists = column < num_columns
    offsets = column[:, None].to(tl.int64) * key_stride_m + dims[None, :]
    key = tl.load(key_ptr + offsets, mask=column_exists[:, None], other=0)
    if IN_8_BITS:
        in_stored = (full + place < stored)[None, :]
        value = tl.load(value_tile_ptr + full, mask=in_stored, other=0.0)
    else:
        offsets = column[:, None].to(tl.int64) * value_stride + dims[None, :]
        value = tl.load(value_ptr + offsets, mask=column_exists[:, None], other=0.0)
    weights, level, largest, total, out = _add_tile(
        query,
        key,
        value,
        column_exists,
        factor,
        level,
        largest,
        total,
        out,
        IN_8_BITS,
        WIDE_PRODUCTS,
        True,
    )
    if WITH_COLUMN_SUMS:
        sums = _sum_weights(weights, level, lse_previous, IN_8_BITS)
        sums = sums.to(column_sums_ptr.dtype.element_ty)
        tl.store(column_sums_ptr + column, sums, mask=column_exists)

    lse = level + tl.log2(total)
    out = out / total[:, None]
    if IN_8_BITS:
        lse = lse - FP8_BITS + shift
        value_scale = tl.load(value_scale_ptr + head * HEAD_DIM + dims)
        value_mean = tl.load(value_mean_ptr + head * HEAD_DIM + dims)
        out = out * value_scale[None, :] + value_mean[None, :]
    tl.store(lse_ptr + per_row, lse * LN_2, mask=row_exists)
    output_ptr += b * output_stride_b + h * output_stride_h
    tl.store(
        output_ptr + row[:, None].to(tl.int64) * output_stride_n + dims[None, :],
        out.to(output_ptr.dtype.element_ty),
        mask=row_exists[:, None],
    )

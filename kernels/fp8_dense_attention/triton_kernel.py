"""`fp8_dense_attention` in plain Triton: NVIDIA GPUs from Ada on, and Triton's interpreter.

As ``dense_attention_column_sums/triton_kernel.py``, with what FP8 changes: see ``gluon_sm90.py``
for the levels that weights are relative to, and why no product is added up by tensor cores. Here
the keys of a tile are read in the order in which the values are stored.
"""

# Triton reads the annotations of a kernel in its own way.
# mypy: allow-untyped-defs
from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from chipsparse.kernels.checks import TRANSIENT_BYTES, block_count, ranges
from chipsparse.kernels.dense_attention_column_sums.triton_kernel import sum_weights
from chipsparse.kernels.fp8_dense_attention import LOWEST_BITS, WEIGHT_BITS, Fp8DenseAttention
from chipsparse.kernels.launch import launch_changing
from chipsparse.kernels.triton_blocks import (
    SCORE_OFFSET,
    fp8_dot,
    int8_dot,
    rows_per_program,
    stored_token,
    to_fp8,
)
from chipsparse.kernels.triton_support import cdiv

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))
BITS = tl.constexpr(float(WEIGHT_BITS))
LOWEST = tl.constexpr(float(LOWEST_BITS))

# BLOCK_M is the largest tile of rows; smaller blocks take smaller tiles.
CONFIG: dict[str, Any] = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "STAGES": 3}


def fp8_dense_attention(
    call: Fp8DenseAttention,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Run a checked `Fp8DenseAttention`.

    A block of more rows than a tile gets sums per tile in float32, added in a fixed order; as
    many blocks are done at a time as `TRANSIENT_BYTES` has room for.
    """
    tensors, block_size_q, lse_previous = call.tensors, call.block_size_q, call.lse_previous
    query, key, value = tensors.query, tensors.key, tensors.value
    batch, heads, rows, head_dim = query.shape
    columns, device = tensors.columns, query.device
    options = dict(CONFIG)
    tile_rows = rows_per_program(block_size_q, options.pop("BLOCK_M"))
    blocks, row_tiles = block_count(rows, block_size_q), cdiv(block_size_q, tile_rows)
    units = batch * heads * blocks
    output = torch.empty_like(query, dtype=tensors.dtype)
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=device)
    previous = lse if lse_previous is None else lse_previous.float().contiguous()
    per_row = [each.contiguous() for each in (tensors.row_factor, tensors.row_shift)]
    per_channel = [each.contiguous() for each in (tensors.value_scale, tensors.value_mean)]

    def launch(first_unit: int, last_unit: int, sums: torch.Tensor) -> None:
        # Consecutive programs share a head, so that they find its keys in the cache.
        with torch.cuda.device_of(query):
            launch_changing(
                _fp8_dense_attention_kernel,
                ((last_unit - first_unit) * row_tiles,),
                query,
                key,
                value,
                *per_row,
                *per_channel,
                previous,
                output,
                lse,
                sums,
                *query.stride()[:3],
                *key.stride()[:3],
                *value.stride()[:3],
                *output.stride()[:3],
                heads,
                rows,
                columns,
                value.shape[3],
                blocks,
                block_size_q,
                row_tiles,
                first_unit,
                HEAD_DIM=head_dim,
                WITH_COLUMN_SUMS=lse_previous is not None,
                WIDE_PRODUCTS=device.type == "cpu",
                BLOCK_M=tile_rows,
                **options,
            )

    if lse_previous is None:
        launch(0, units, lse)
        return output, lse, None
    shape = (batch, heads, blocks, columns)
    column_sums = torch.empty(shape, dtype=torch.bfloat16, device=device)
    if row_tiles == 1:
        launch(0, units, column_sums)
        return output, lse, column_sums
    unit_sums = column_sums.view(units, columns)
    # One more row for their sum, which is float32 before it is rounded.
    for first, last in ranges(units, 4 * (row_tiles + 1) * columns, TRANSIENT_BYTES):
        sums = torch.empty(last - first, row_tiles, columns, dtype=torch.float32, device=device)
        launch(first, last, sums)
        unit_sums[first:last] = sums.sum(1)
    return output, lse, column_sums


@triton.jit
def _fp8_dense_attention_kernel(
    query_ptr,  # [B, H, N, D]
    key_ptr,  # [B, H, M, D]
    value_ptr,  # [B, H, D, M']
    row_factor_ptr,  # [B, H, N], contiguous, as row_shift, lse_previous and lse
    row_shift_ptr,
    value_scale_ptr,  # [B, H, D], contiguous
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
    value_stride_d,
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
    HEAD_DIM: tl.constexpr,
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
    factor = tl.load(row_factor_ptr + per_row, mask=row_exists, other=0.0) * LOG2_E
    shift = tl.load(row_shift_ptr + per_row, mask=row_exists, other=0.0) * LOG2_E
    offset = SCORE_OFFSET * factor
    # Rows that do not exist weigh exp(-inf) in the column sums.
    lse_previous = float("inf") + shift
    if WITH_COLUMN_SUMS:
        lse_previous = tl.load(lse_previous_ptr + per_row, mask=row_exists, other=float("inf"))
        lse_previous = lse_previous * LOG2_E - shift

    # The loop takes the tiles before the last, which are full and need no mask; it runs at least
    # once, and what it computes is dropped where no tile is full.
    full = (num_columns - 1) // BLOCK_N * BLOCK_N
    place = tl.arange(0, BLOCK_N)
    token = stored_token(place)
    tile = tl.minimum(token, num_columns - 1).to(tl.int64)[:, None]
    key_tile_ptr = key_ptr + tile * key_stride_m + dims[None, :]
    value_tile_ptr = value_ptr + dims[:, None].to(tl.int64) * value_stride_d + place[None, :]
    in_stored = (place < stored)[None, :]
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    level = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for first in tl.range(0, tl.maximum(full, BLOCK_N), BLOCK_N, num_stages=STAGES):
        key = tl.load(key_tile_ptr + tl.cast(first, tl.int64) * key_stride_m)
        value = tl.load(value_tile_ptr + first, mask=in_stored, other=0.0)
        scores = int8_dot(query, key.T)
        of_tile = (tl.max(scores, 1) - SCORE_OFFSET) * factor
        new_level = tl.maximum(of_tile, largest - LOWEST)
        largest = tl.maximum(largest, of_tile)
        weights = tl.exp2(scores * factor[:, None] - (new_level - BITS + offset)[:, None])
        rescale = tl.exp2(level - new_level)
        level = new_level
        total = total * rescale + tl.sum(weights, 1)
        part = fp8_dot(to_fp8(weights, WIDE_PRODUCTS), value.T, WIDE_PRODUCTS)
        # Not a sum, which the compiler would leave to the tensor cores.
        out = tl.fma(out, rescale[:, None] + tl.zeros_like(out), part)
        if WITH_COLUMN_SUMS:
            sums = sum_weights(weights, level, lse_previous, BITS)
            sums = sums.to(column_sums_ptr.dtype.element_ty)
            tl.store(column_sums_ptr + first + token, sums, mask=token < full)
    largest = tl.where(full > 0, largest, float("-inf"))
    level = tl.where(full > 0, level, float("-inf"))
    total = tl.where(full > 0, total, 0.0)
    out = tl.where(full > 0, out, 0.0)

    # The last tile, which may be partial.
    column = full + token
    column_exists = column < num_columns
    offsets = column[:, None].to(tl.int64) * key_stride_m + dims[None, :]
    key = tl.load(key_ptr + offsets, mask=column_exists[:, None], other=0)
    in_stored = (full + place < stored)[None, :]
    value = tl.load(value_tile_ptr + full, mask=in_stored, other=0.0)
    scores = int8_dot(query, key.T)
    scores = tl.where(column_exists[None, :], scores, float("-inf"))
    of_tile = (tl.max(scores, 1) - SCORE_OFFSET) * factor
    new_level = tl.maximum(of_tile, largest - LOWEST)
    weights = tl.exp2(scores * factor[:, None] - (new_level - BITS + offset)[:, None])
    rescale = tl.exp2(level - new_level)
    total = total * rescale + tl.sum(weights, 1)
    part = fp8_dot(to_fp8(weights, WIDE_PRODUCTS), value.T, WIDE_PRODUCTS)
    out = out * rescale[:, None] + part
    if WITH_COLUMN_SUMS:
        sums = sum_weights(weights, new_level, lse_previous, BITS)
        sums = sums.to(column_sums_ptr.dtype.element_ty)
        tl.store(column_sums_ptr + column, sums, mask=column_exists)

    lse = (new_level - BITS + tl.log2(total) + shift) * LN_2
    tl.store(lse_ptr + per_row, lse, mask=row_exists)
    value_scale = tl.load(value_scale_ptr + head * HEAD_DIM + dims)
    value_mean = tl.load(value_mean_ptr + head * HEAD_DIM + dims)
    out = out / total[:, None] * value_scale[None, :] + value_mean[None, :]
    output_ptr += b * output_stride_b + h * output_stride_h
    tl.store(
        output_ptr + row[:, None].to(tl.int64) * output_stride_n + dims[None, :],
        out.to(output_ptr.dtype.element_ty),
        mask=row_exists[:, None],
    )

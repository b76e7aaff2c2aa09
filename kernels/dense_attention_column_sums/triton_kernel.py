"""`dense_attention_column_sums` in plain Triton: every GPU from Ampere on, and its interpreter.

One program owns a tile of rows of a query block and passes once over all keys, so the column sums
of a tile are final as soon as its weights are known: they are stored once, without atomics.

A weight of online softmax is ``p = exp(s - m)`` with the largest score m so far, and a column sums
``exp(s - lse_previous) = p exp(m - lse_previous)``: one multiplication per score, and a second
exponential only per row and tile.
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
from chipsparse.kernels.dense_attention_column_sums import DenseAttentionColumnSums
from chipsparse.kernels.dense_attention_column_sums.reference import LARGEST_EXPONENT
from chipsparse.kernels.launch import launch_changing
from chipsparse.kernels.triton_blocks import dot, rows_per_program
from chipsparse.kernels.triton_support import cdiv, compute_capability, with_positive_scale

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))
LARGEST_SHIFT = tl.constexpr(LARGEST_EXPONENT * math.log2(math.e))

# BLOCK_M is the largest tile of rows; smaller blocks take smaller tiles.
CONFIGS: dict[str, dict[str, Any]] = {
    name: {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "STAGES": stages}
    for name, m, n, warps, stages in (
        ("m128n64w8s3", 128, 64, 8, 3),
        ("m128n32w4s3", 128, 32, 4, 3),
        ("m64n64w4s2", 64, 64, 4, 2),
    )
}


def dense_attention_column_sums(
    call: DenseAttentionColumnSums, *, config: str | None = None, with_column_sums: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Run a checked `DenseAttentionColumnSums`; ``config`` names one of `CONFIGS`.

    A block of more rows than a tile gets sums per tile in float32, added in a fixed order; as
    many blocks are done at a time as `TRANSIENT_BYTES` has room for. Without
    ``with_column_sums`` the kernel is plain attention, to show that the rest stays the same.
    """
    query, scale = with_positive_scale(call.query, call.softmax_scale)
    key, value, block_size_q = call.key, call.value, call.block_size_q
    batch, heads, rows, head_dim = query.shape
    columns, device = key.shape[2], query.device
    options = dict(CONFIGS[config or default_config(query)])
    tile_rows = rows_per_program(block_size_q, options.pop("BLOCK_M"))
    blocks, row_tiles = block_count(rows, block_size_q), cdiv(block_size_q, tile_rows)
    units = batch * heads * blocks
    # Laid out like the query, so that a view of [B, N, H, D] gives one: no copy follows.
    output = torch.empty_like(query)
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=device)
    sums_shape = (batch, heads, blocks, columns if with_column_sums else 0)
    column_sums = torch.empty(sums_shape, dtype=torch.bfloat16, device=device)
    lse_previous = call.lse_previous.float().contiguous()

    def launch(first_unit: int, last_unit: int, sums: torch.Tensor) -> None:
        # Consecutive programs share a head, so that they find its keys in the cache.
        with torch.cuda.device_of(query):
            launch_changing(
                _dense_attention_column_sums_kernel,
                ((last_unit - first_unit) * row_tiles,),
                query,
                key,
                value,
                lse_previous,
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
                blocks,
                block_size_q,
                row_tiles,
                first_unit,
                scale * LOG2_E.value,
                HEAD_DIM=head_dim,
                WITH_COLUMN_SUMS=with_column_sums,
                WIDE_PRODUCTS=device.type == "cpu",
                BLOCK_M=tile_rows,
                **options,
            )

    if not with_column_sums:
        launch(0, units, column_sums)
        return output, lse, None
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


def default_config(query: torch.Tensor) -> str:
    """The entry of `CONFIGS` for this device and head size."""
    if torch.version.hip is not None:
        return "m64n64w4s2"  # within 64 KiB of shared memory
    if query.device.type == "cuda" and compute_capability(query.device)[0] == 9:
        return "m128n32w4s3"
    return "m128n64w8s3"  # within 99 KiB without Hopper's query tile


@triton.jit
def sum_weights(weights, largest, lse_previous, BITS: tl.constexpr = 0.0):
    """Sums over rows of weights, 2 ** BITS at the largest score, as weights under another LSE."""
    shift = largest - lse_previous
    shift = tl.where(shift > LARGEST_SHIFT, LARGEST_SHIFT, shift)  # keeps NaN, unlike tl.minimum
    return tl.sum(weights * tl.exp2(shift - BITS)[:, None], 0)


@triton.jit
def _dense_attention_column_sums_kernel(
    query_ptr,  # [B, H, N, D]
    key_ptr,  # [B, H, M, D]
    value_ptr,  # [B, H, M, D]
    lse_previous_ptr,  # [B, H, N], contiguous, as lse
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
    value_stride_m,
    output_stride_b,
    output_stride_h,
    output_stride_n,
    heads,
    rows,
    num_columns,
    blocks,
    block_size_q,
    row_tiles,  # per block
    first_unit,  # a unit is one block of one head
    scale,  # of the scores in units of ln 2
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
    query_ptr += b * query_stride_b + h * query_stride_h
    key_ptr += b * key_stride_b + h * key_stride_h
    value_ptr += b * value_stride_b + h * value_stride_h
    column_sums_ptr += tl.program_id(0).to(tl.int64) * num_columns

    in_block = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = block * block_size_q + in_block
    row_exists = (in_block < block_size_q) & (row < rows)
    dims = tl.arange(0, HEAD_DIM)
    per_row = head.to(tl.int64) * rows + row
    query = tl.load(
        query_ptr + row[:, None].to(tl.int64) * query_stride_n + dims[None, :],
        mask=row_exists[:, None],
        other=0.0,
    )
    # Rows that do not exist weigh exp(-inf) in the column sums.
    lse_previous = tl.load(lse_previous_ptr + per_row, mask=row_exists, other=float("inf"))
    lse_previous *= LOG2_E

    # The loop takes the tiles before the last, which are full and need no mask. It runs at least
    # once, as ptxas makes matrix products wait for each other where sums may skip the loop; with no
    # full tile it computes something valid that is then dropped.
    full = (num_columns - 1) // BLOCK_N * BLOCK_N
    entries = tl.arange(0, BLOCK_N)
    tile = tl.minimum(entries, num_columns - 1).to(tl.int64)[:, None]
    key_tile_ptr = key_ptr + tile * key_stride_m + dims[None, :]
    value_tile_ptr = value_ptr + tile * value_stride_m + dims[None, :]
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for first in tl.range(0, tl.maximum(full, BLOCK_N), BLOCK_N, num_stages=STAGES):
        key = tl.load(key_tile_ptr + tl.cast(first, tl.int64) * key_stride_m)
        value = tl.load(value_tile_ptr + tl.cast(first, tl.int64) * value_stride_m)
        scores = dot(query, key.T, None, WIDE_PRODUCTS)
        new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_largest[:, None])
        correction = tl.exp2(largest - new_largest)
        total = total * correction + tl.sum(weights, 1)
        out = out * correction[:, None]
        out = dot(weights.to(value.dtype), value, out, WIDE_PRODUCTS)
        largest = new_largest
        if WITH_COLUMN_SUMS:
            sums = sum_weights(weights, largest, lse_previous)
            sums = sums.to(column_sums_ptr.dtype.element_ty)
            tl.store(column_sums_ptr + first + entries, sums, mask=entries < full)
    largest = tl.where(full > 0, largest, float("-inf"))
    total = tl.where(full > 0, total, 0.0)
    out = tl.where(full > 0, out, 0.0)

    # The last tile, which may be partial.
    column = full + entries
    column_exists = column < num_columns
    offsets = column[:, None].to(tl.int64) * key_stride_m + dims[None, :]
    key = tl.load(key_ptr + offsets, mask=column_exists[:, None], other=0.0)
    offsets = column[:, None].to(tl.int64) * value_stride_m + dims[None, :]
    value = tl.load(value_ptr + offsets, mask=column_exists[:, None], other=0.0)
    scores = dot(query, key.T, None, WIDE_PRODUCTS) * scale
    scores = tl.where(column_exists[None, :], scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - new_largest[:, None])
    correction = tl.exp2(largest - new_largest)
    total = total * correction + tl.sum(weights, 1)
    out = out * correction[:, None]
    out = dot(weights.to(value.dtype), value, out, WIDE_PRODUCTS)
    if WITH_COLUMN_SUMS:
        sums = sum_weights(weights, new_largest, lse_previous)
        sums = sums.to(column_sums_ptr.dtype.element_ty)
        tl.store(column_sums_ptr + column, sums, mask=column_exists)

    lse = (new_largest + tl.log2(total)) * LN_2
    tl.store(lse_ptr + per_row, lse, mask=row_exists)
    output_ptr += b * output_stride_b + h * output_stride_h
    tl.store(
        output_ptr + row[:, None].to(tl.int64) * output_stride_n + dims[None, :],
        (out / total[:, None]).to(output_ptr.dtype.element_ty),
        mask=row_exists[:, None],
    )

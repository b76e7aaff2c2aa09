"""`column_sparse_attention` in plain Triton: every GPU from Ampere on, and Triton's interpreter.

One program attends from a tile of rows of a query block to the block's list of columns. Key and
value rows are gathered straight into tiles; nothing is packed in global memory. The scores of a
tile live only in registers, so no memory is needed besides the results.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from chipsparse.kernels.checks import block_count
from chipsparse.kernels.column_sparse_attention import ColumnSparseAttention
from chipsparse.kernels.launch import Launch
from chipsparse.kernels.triton_blocks import dot, from_fp8_bits, rows_per_program
from chipsparse.kernels.triton_support import cdiv, with_positive_scale

LOG2_E = math.log2(math.e)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)

# BLOCK_M is the largest tile of rows; smaller blocks take smaller tiles. Others were measured and
# left out: benchmarks/notes/column_sparse_attention.md.
CONFIGS: dict[str, dict[str, int]] = {
    name: {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "STAGES": stages}
    for name, m, n, warps, stages in (
        ("m128n64w8s3p", 128, 64, 8, 3),
        ("m128n64w4s2p", 128, 64, 4, 2),
        ("m64n64w4s2p", 64, 64, 4, 2),
    )
}


def column_sparse_attention(
    call: ColumnSparseAttention,
    *,
    config: str | None = None,
) -> torch.Tensor:
    """Run a checked `ColumnSparseAttention`; ``config`` names one of `CONFIGS`."""
    query, scale = with_positive_scale(call.query, call.softmax_scale)
    batch, heads, rows, head_dim = query.shape
    # Laid out like the query, so that a view of [B, N, H, D] gives one: no copy follows.
    output = torch.empty_like(query)
    # The kernel never reads what stands in for a tensor that is not given.
    residual = query if call.residual is None else call.residual
    in_fp8 = call.residual_scale is not None

    launch = call.known().get(("triton", config))
    if launch is None:
        key = call.key
        value = call.value
        block_size_q = call.block_size_q
        options = dict(CONFIGS[config or default_config(query)])
        tile_rows = rows_per_program(block_size_q, options.pop("BLOCK_M"))
        blocks = block_count(rows, block_size_q)
        row_tiles = cdiv(block_size_q, tile_rows)
        sizes = (heads, rows, blocks, block_size_q, row_tiles)
        launch = call.known()["triton", config] = Launch(
            _column_sparse_attention_kernel,
            # Consecutive programs share a head, and tiles of a block are neighbours: both reuse the
            # cache.
            (blocks * row_tiles, batch * heads),
            *(stride for tensor in (query, key, value) for stride in tensor.stride()[:3]),
            *call.indices.stride(),
            *output.stride()[:3],
            *residual.stride(),
            *sizes,
            scale * LOG2_E,
            0 if call.mean_key is None else call.mean_key.shape[2],
            math.log2(call.mean_weight),
            HEAD_DIM=head_dim,
            HAS_RESIDUAL=call.residual is not None,
            IN_FP8=in_fp8,
            MEANS=call.mean_key is not None,
            WIDE_OFFSETS=max(largest_offset(key), largest_offset(value)) >= 2**31,
            WIDE_PRODUCTS=query.device.type == "cpu",
            BLOCK_M=tile_rows,
            **options,
        )
    launch(
        query,
        call.key,
        call.value,
        call.indices,
        call.counts.contiguous(),
        output,
        residual.view(torch.uint8) if in_fp8 else residual,
        call.query if call.residual_scale is None else call.residual_scale.contiguous(),
        call.key if call.mean_key is None else call.mean_key.contiguous(),
        call.value if call.mean_value is None else call.mean_value.contiguous(),
    )
    return output


def default_config(query: torch.Tensor) -> str:
    """The entry of `CONFIGS` for this device and head size."""
    if torch.version.hip is not None:
        return "m64n64w4s2p"  # within 64 KiB of shared memory
    if query.shape[-1] == 64:
        return "m128n64w4s2p"
    return "m128n64w8s3p"  # the fastest at 118k tokens; within 99 KiB without Hopper's query tile


def largest_offset(tensor: torch.Tensor) -> int:
    """No element of a head of ``[B, H, M, D]`` is further from its first, in elements."""
    return tensor.shape[2] * tensor.stride(2) + tensor.shape[3]


@triton.jit
def _row_offsets(columns, stride, dims, WIDE_OFFSETS: tl.constexpr):
    if WIDE_OFFSETS:
        columns = columns.to(tl.int64)
    return columns[:, None] * stride + dims[None, :]


@triton.jit
def _column_sparse_attention_kernel(
    query_ptr,  # [B, H, N, D]
    key_ptr,  # [B, H, M, D]
    value_ptr,  # [B, H, M, D]
    indices_ptr,  # [B, H, G, K]
    counts_ptr,  # [B, H, G], contiguous
    output_ptr,  # [B, H, N, D]
    residual_ptr,  # [B, H, N, D]; bytes of e4m3 where IN_FP8
    residual_scale_ptr,  # [B, H, N], contiguous
    mean_key_ptr,  # [B, H, means, D], contiguous, as is mean_value
    mean_value_ptr,
    query_stride_b,
    query_stride_h,
    query_stride_n,
    key_stride_b,
    key_stride_h,
    key_stride_m,
    value_stride_b,
    value_stride_h,
    value_stride_m,
    indices_stride_b,
    indices_stride_h,
    indices_stride_g,
    indices_stride_k,
    output_stride_b,
    output_stride_h,
    output_stride_n,
    residual_stride_b,
    residual_stride_h,
    residual_stride_n,
    residual_stride_d,
    heads,
    rows,
    blocks,
    block_size_q,
    row_tiles,  # per block
    scale,  # of the scores in units of ln 2
    means,
    mean_bias,  # of their scores in units of ln 2
    HEAD_DIM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IN_FP8: tl.constexpr,
    MEANS: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
    WIDE_PRODUCTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    block = tl.program_id(0) // row_tiles
    row_tile = tl.program_id(0) % row_tiles
    head = tl.program_id(1)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    query_ptr += b * query_stride_b + h * query_stride_h
    key_ptr += b * key_stride_b + h * key_stride_h
    value_ptr += b * value_stride_b + h * value_stride_h
    indices_ptr += b * indices_stride_b + h * indices_stride_h
    indices_ptr += block.to(tl.int64) * indices_stride_g
    count = tl.load(counts_ptr + head.to(tl.int64) * blocks + block)

    in_block = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = block * block_size_q + in_block
    row_exists = (in_block < block_size_q) & (row < rows)
    dims = tl.arange(0, HEAD_DIM)
    entries = tl.arange(0, BLOCK_N)
    query = tl.load(
        query_ptr + row[:, None].to(tl.int64) * query_stride_n + dims[None, :],
        mask=row_exists[:, None],
        other=0.0,
    )

    # The loop takes the tiles before the last, which are full: their scores need no mask. It runs
    # at least once, as ptxas makes matrix products wait for each other where sums may skip the
    # loop; with no full tile it attends to row 0, and that is dropped. The last tile stands after
    # the loop, not before it, as Triton would keep its shared memory through the loop.
    full = tl.maximum(count - 1, 0) // BLOCK_N * BLOCK_N
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    kept = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    # The columns of a tile are read one iteration early, so that the gather of its rows waits for
    # no other load.
    next_columns = tl.load(indices_ptr + entries * indices_stride_k, mask=entries < full, other=0)
    for first in tl.range(0, tl.maximum(full, BLOCK_N), BLOCK_N, num_stages=STAGES):
        columns = next_columns
        following = tl.minimum(first + BLOCK_N, full - BLOCK_N) + entries
        next_columns = tl.load(
            indices_ptr + following * indices_stride_k,
            mask=entries < full,
            other=0,
        )
        key = tl.load(key_ptr + _row_offsets(columns, key_stride_m, dims, WIDE_OFFSETS))
        value = tl.load(value_ptr + _row_offsets(columns, value_stride_m, dims, WIDE_OFFSETS))
        scores = dot(query, key.T, None, WIDE_PRODUCTS)
        new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_largest[:, None])
        correction = tl.exp2(largest - new_largest)
        total = total * correction + tl.sum(weights, 1)
        kept = kept * correction[:, None]
        kept = dot(weights.to(value.dtype), value, kept, WIDE_PRODUCTS)
        largest = new_largest

    largest = tl.where(full > 0, largest, float("-inf"))
    total = tl.where(full > 0, total, 0.0)
    kept = tl.where(full > 0, kept, 0.0)

    # The last tile may be partial, or empty: entries past the count read nothing.
    counted = full + entries < count
    columns = tl.load(indices_ptr + (full + entries) * indices_stride_k, mask=counted, other=0)
    offsets = _row_offsets(columns, key_stride_m, dims, WIDE_OFFSETS)
    key = tl.load(key_ptr + offsets, mask=counted[:, None], other=0.0)
    offsets = _row_offsets(columns, value_stride_m, dims, WIDE_OFFSETS)
    value = tl.load(value_ptr + offsets, mask=counted[:, None], other=0.0)
    scores = dot(query, key.T, None, WIDE_PRODUCTS) * scale
    scores = tl.where(counted[None, :], scores, float("-inf"))
    # A finite maximum also where nothing counts: -inf - -inf would be NaN.
    new_largest = tl.maximum(tl.maximum(largest, tl.max(scores, 1)), LOWEST)
    weights = tl.exp2(scores - new_largest[:, None])
    correction = tl.exp2(largest - new_largest)
    total = total * correction + tl.sum(weights, 1)
    kept = kept * correction[:, None]
    kept = dot(weights.to(value.dtype), value, kept, WIDE_PRODUCTS)
    largest = new_largest

    if MEANS:
        mean_key_ptr += head.to(tl.int64) * means * HEAD_DIM
        mean_value_ptr += head.to(tl.int64) * means * HEAD_DIM
        # At least once, for the same reason as above.
        for first in tl.range(0, tl.maximum(means, BLOCK_N), BLOCK_N, num_stages=STAGES):
            there = first + entries < means
            offsets = (first + entries)[:, None] * HEAD_DIM + dims[None, :]
            key = tl.load(mean_key_ptr + offsets, mask=there[:, None], other=0.0)
            value = tl.load(mean_value_ptr + offsets, mask=there[:, None], other=0.0)
            bias = tl.where(there, mean_bias, float("-inf"))
            scores = dot(query, key.T, None, WIDE_PRODUCTS) * scale + bias[None, :]
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp2(scores - new_largest[:, None])
            correction = tl.exp2(largest - new_largest)
            total = total * correction + tl.sum(weights, 1)
            kept = kept * correction[:, None]
            kept = dot(weights.to(value.dtype), value, kept, WIDE_PRODUCTS)
            largest = new_largest

    kept = tl.where(count + means == 0, 0.0, kept / total[:, None])
    if HAS_RESIDUAL:
        residual_ptr += b * residual_stride_b + h * residual_stride_h
        residual = tl.load(
            residual_ptr
            + row[:, None].to(tl.int64) * residual_stride_n
            + dims[None, :] * residual_stride_d,
            mask=row_exists[:, None],
            other=0,
        )
        if IN_FP8:
            per_row = head.to(tl.int64) * rows + row
            residual_scale = tl.load(residual_scale_ptr + per_row, mask=row_exists, other=0.0)
            residual = from_fp8_bits(residual) * residual_scale[:, None]
        kept += residual.to(tl.float32)

    output_ptr += b * output_stride_b + h * output_stride_h
    tl.store(
        output_ptr + row[:, None].to(tl.int64) * output_stride_n + dims[None, :],
        kept.to(output_ptr.dtype.element_ty),
        mask=row_exists[:, None],
    )

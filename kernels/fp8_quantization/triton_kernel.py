"""`fp8_quantization` in Triton: three launches that read keys and values twice, the query once.

The first goes over chunks of tokens and notes the sum and the range of every channel, the second
makes means and scales of them, and the third rounds. Keys are rotated in the first and in the last:
products with ±1 of 16-bit numbers are exact, so that tensor cores can do it.
"""

# Triton reads the annotations of a kernel in its own way.
# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from chipsparse.kernels.fp8_quantization import (
    FP8,
    LARGEST_FP8,
    LARGEST_INT8,
    NO_SCALE,
    SMALLEST,
    STORED_TOGETHER,
    Fp8Attention,
    Fp8Quantization,
)
from chipsparse.kernels.launch import launch
from chipsparse.kernels.triton_blocks import dot, stored_token, to_fp8
from chipsparse.kernels.triton_support import cdiv, with_positive_scale

MOST_FP8 = tl.constexpr(LARGEST_FP8)
MOST_INT8 = tl.constexpr(LARGEST_INT8)
LEAST = tl.constexpr(SMALLEST)
NOTHING = tl.constexpr(NO_SCALE)
INFINITY = tl.constexpr(float("inf"))
TILE_TOKENS = 64
TILES_PER_CHUNK = 16
WARPS, NOTE_WARPS = 4, 8
# Rows of what a chunk notes, and of what becomes of it; each has D numbers.
NOTED = tl.constexpr(6)  # sum, least and largest of the keys, then of the values
MADE = tl.constexpr(4)  # mean of the keys and their scale, mean of the values and their scale


def fp8_quantization(call: Fp8Quantization) -> Fp8Attention:
    """See `Fp8Quantization`; the call is checked."""
    query, scale = with_positive_scale(call.query, call.softmax_scale)
    key, value = call.key, call.value
    batch, heads, rows, head_dim = query.shape
    columns, device = key.shape[2], query.device
    stored = cdiv(columns, STORED_TOGETHER) * STORED_TOGETHER
    chunks = cdiv(columns, TILE_TOKENS * TILES_PER_CHUNK)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.empty(batch, heads, *shape, dtype=torch.float32, device=device)

    noted, made = (
        numbers(chunks, NOTED.value, head_dim),
        numbers(MADE.value, head_dim),
    )
    found = Fp8Attention(
        query=torch.empty_like(query, dtype=torch.int8),
        key=torch.empty(batch, heads, columns, head_dim, dtype=torch.int8, device=device),
        value=torch.empty(batch, heads, head_dim, stored, dtype=FP8, device=device),
        row_factor=numbers(rows),
        row_shift=numbers(rows),
        value_scale=numbers(head_dim),
        value_mean=numbers(head_dim),
        columns=columns,
        dtype=query.dtype,
    )
    strides = (*key.stride()[:3], *value.stride()[:3])
    wide = device.type == "cpu"
    with torch.cuda.device_of(query):
        launch(
            _note_kernel,
            (chunks, batch * heads),
            key,
            value,
            noted,
            *strides,
            heads,
            columns,
            chunks,
            TILES=TILES_PER_CHUNK,
            HEAD_DIM=head_dim,
            ROTATE=call.rotate,
            WIDE_PRODUCTS=wide,
            TILE=TILE_TOKENS,
            num_warps=NOTE_WARPS,
        )
        launch(
            _make_kernel,
            (batch * heads,),
            noted,
            made,
            found.value_mean,
            found.value_scale,
            columns,
            chunks,
            HEAD_DIM=head_dim,
            num_warps=WARPS,
        )
        launch(
            _round_kernel,
            (cdiv(max(rows, stored), TILE_TOKENS), batch * heads),
            query,
            key,
            value,
            made,
            found.query,
            found.key,
            found.value,
            found.row_factor,
            found.row_shift,
            *query.stride()[:3],
            *strides,
            *found.query.stride()[:3],
            heads,
            rows,
            columns,
            stored,
            scale,
            HEAD_DIM=head_dim,
            ROTATE=call.rotate,
            WIDE_PRODUCTS=wide,
            TILE=TILE_TOKENS,
            num_warps=WARPS,
        )
    return found


@triton.jit
def _signs(HEAD_DIM: tl.constexpr):
    """The Hadamard matrix in ±1: the parity of the bits that row and column have in common."""
    dims = tl.arange(0, HEAD_DIM)
    common = dims[:, None] & dims[None, :]
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    return 1.0 - 2.0 * (common & 1).to(tl.float32)


@triton.jit
def _wide(tile, HEAD_DIM: tl.constexpr, ROTATE: tl.constexpr, WIDE_PRODUCTS: tl.constexpr):
    """Rows in fp32, rotated where that was asked for."""
    if not ROTATE:
        return tile.to(tl.float32)
    signs = _signs(HEAD_DIM).to(tile.dtype)
    return dot(tile, signs, None, WIDE_PRODUCTS) * (HEAD_DIM**-0.5)


@triton.jit
def _is_finite(x):
    return tl.abs(x) < INFINITY


@triton.jit
def _to_int8(x):
    """Numbers within ±127 rounded to the nearest, by what an fp32 of this size has room for."""
    return (x + 1.5 * 2.0**23).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _to_fp8(x, WIDE_PRODUCTS: tl.constexpr):
    """As e4m3; saturates, but an infinity becomes NaN."""
    x = tl.where(tl.abs(x) == INFINITY, float("nan"), x)
    x = tl.where(x > MOST_FP8, MOST_FP8, x)
    return to_fp8(tl.where(x < -MOST_FP8, -MOST_FP8, x), WIDE_PRODUCTS)


@triton.jit
def _no_range(HEAD_DIM: tl.constexpr):
    """The sum and the range of each channel of no tokens."""
    nothing = tl.zeros([HEAD_DIM], tl.float32)
    return nothing, nothing + INFINITY, nothing - INFINITY


@triton.jit
def _range(x, counts, least, most):
    """The range of each channel with that of more tokens."""
    least = tl.minimum(least, tl.min(tl.where(counts, x, INFINITY), 0))
    return least, tl.maximum(most, tl.max(tl.where(counts, x, -INFINITY), 0))


@triton.jit
def _note_kernel(
    key_ptr,  # [B, H, M, D]
    value_ptr,  # [B, H, M, D]
    noted_ptr,  # [B, H, chunks, NOTED, D], contiguous
    key_stride_b,
    key_stride_h,
    key_stride_m,
    value_stride_b,
    value_stride_h,
    value_stride_m,
    heads,
    columns,
    chunks,
    TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTATE: tl.constexpr,
    WIDE_PRODUCTS: tl.constexpr,
    TILE: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    key_ptr += b * key_stride_b + h * key_stride_h
    value_ptr += b * value_stride_b + h * value_stride_h
    dims = tl.arange(0, HEAD_DIM)
    first = chunk * TILES * TILE
    key_sum, key_least, key_most = _no_range(HEAD_DIM)
    for tile in range(TILES):
        token = first + tile * TILE + tl.arange(0, TILE)
        exists = (token < columns)[:, None]
        offsets = token.to(tl.int64)[:, None] * key_stride_m + dims[None, :]
        key = tl.load(key_ptr + offsets, mask=exists, other=0.0)
        key = _wide(key, HEAD_DIM, ROTATE, WIDE_PRODUCTS)
        # What is not finite stays in the sum, which is how the next launch finds it.
        key_sum += tl.sum(key, 0)
        key_least, key_most = _range(key, exists, key_least, key_most)
    value_sum, value_least, value_most = _no_range(HEAD_DIM)
    for tile in range(TILES):
        token = first + tile * TILE + tl.arange(0, TILE)
        exists = (token < columns)[:, None]
        offsets = token.to(tl.int64)[:, None] * value_stride_m + dims[None, :]
        value = tl.load(value_ptr + offsets, mask=exists, other=0.0).to(tl.float32)
        counts = exists & _is_finite(value)
        value_sum += tl.sum(tl.where(counts, value, 0.0), 0)
        value_least, value_most = _range(value, counts, value_least, value_most)
    noted_ptr += (head.to(tl.int64) * chunks + chunk) * NOTED * HEAD_DIM
    tl.store(noted_ptr + dims, key_sum)
    tl.store(noted_ptr + HEAD_DIM + dims, key_least)
    tl.store(noted_ptr + 2 * HEAD_DIM + dims, key_most)
    tl.store(noted_ptr + 3 * HEAD_DIM + dims, value_sum)
    tl.store(noted_ptr + 4 * HEAD_DIM + dims, value_least)
    tl.store(noted_ptr + 5 * HEAD_DIM + dims, value_most)


@triton.jit
def _int8_scale(largest):
    """What makes the largest value 127."""
    return tl.where(largest > LEAST, largest / MOST_INT8, NOTHING)


@triton.jit
def _fp8_scale(largest):
    """What makes the largest value 448; 1 where all are 0 or none is finite."""
    return tl.where(largest > 0, largest / MOST_FP8, 1.0)


@triton.jit
def _make_kernel(
    noted_ptr,  # [B, H, chunks, NOTED, D], contiguous, as all here
    made_ptr,  # [B, H, MADE, D]
    value_mean_ptr,  # [B, H, D]
    value_scale_ptr,
    columns,
    chunks,
    HEAD_DIM: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, HEAD_DIM)
    noted_ptr += head * chunks * NOTED * HEAD_DIM + dims
    key_sum, key_least, key_most = _no_range(HEAD_DIM)
    value_sum, value_least, value_most = _no_range(HEAD_DIM)
    for chunk in range(chunks):
        at = noted_ptr + chunk * NOTED * HEAD_DIM
        key_sum += tl.load(at)
        key_least = tl.minimum(key_least, tl.load(at + HEAD_DIM))
        key_most = tl.maximum(key_most, tl.load(at + 2 * HEAD_DIM))
        value_sum += tl.load(at + 3 * HEAD_DIM)
        value_least = tl.minimum(value_least, tl.load(at + 4 * HEAD_DIM))
        value_most = tl.maximum(value_most, tl.load(at + 5 * HEAD_DIM))
    key_mean = key_sum / columns
    key_scale = _int8_scale(tl.max(tl.maximum(key_most - key_mean, key_mean - key_least), 0))
    # A sum is not finite where a number is not.
    strange = tl.sum((~_is_finite(key_sum)).to(tl.int32), 0) > 0
    key_scale = tl.where(strange, float("nan"), key_scale)
    value_mean = value_sum / columns
    value_scale = _fp8_scale(tl.maximum(value_most - value_mean, value_mean - value_least))
    made_ptr += head * MADE * HEAD_DIM + dims
    tl.store(made_ptr, key_mean)
    tl.store(made_ptr + HEAD_DIM, tl.zeros([HEAD_DIM], tl.float32) + key_scale)
    tl.store(made_ptr + 2 * HEAD_DIM, value_mean)
    tl.store(made_ptr + 3 * HEAD_DIM, value_scale)
    tl.store(value_mean_ptr + head * HEAD_DIM + dims, value_mean)
    tl.store(value_scale_ptr + head * HEAD_DIM + dims, value_scale)


@triton.jit
def _round_kernel(
    query_ptr,  # [B, H, N, D]
    key_ptr,  # [B, H, M, D]
    value_ptr,  # [B, H, M, D]
    made_ptr,  # [B, H, MADE, D], contiguous
    query8_ptr,  # [B, H, N, D]
    key8_ptr,  # [B, H, M, D], contiguous, as all that follow
    value8_ptr,  # [B, H, D, M']
    row_factor_ptr,  # [B, H, N]
    row_shift_ptr,
    query_stride_b,
    query_stride_h,
    query_stride_n,
    key_stride_b,
    key_stride_h,
    key_stride_m,
    value_stride_b,
    value_stride_h,
    value_stride_m,
    query8_stride_b,
    query8_stride_h,
    query8_stride_n,
    heads,
    rows,
    columns,
    stored,
    scale,
    HEAD_DIM: tl.constexpr,
    ROTATE: tl.constexpr,
    WIDE_PRODUCTS: tl.constexpr,
    TILE: tl.constexpr,
):
    first, head = tl.program_id(0) * TILE, tl.program_id(1)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    head = head.to(tl.int64)
    dims = tl.arange(0, HEAD_DIM)
    place = tl.arange(0, TILE)
    made_ptr += head * MADE * HEAD_DIM + dims
    key_mean = tl.load(made_ptr)[None, :]
    key_scale = tl.load(made_ptr + HEAD_DIM)

    token = first + place
    row = token.to(tl.int64)[:, None]
    exists = token < rows
    query_ptr += b * query_stride_b + h * query_stride_h
    query = tl.load(
        query_ptr + row * query_stride_n + dims[None, :], mask=exists[:, None], other=0.0
    )
    x = _wide(query, HEAD_DIM, ROTATE, WIDE_PRODUCTS)
    shift = tl.sum(x * key_mean, 1) * scale
    row_scale = _int8_scale(tl.max(tl.abs(x), 1))
    x = x / row_scale[:, None]
    query8 = _to_int8(x)
    along = tl.sum(x * query8.to(tl.float32), 1)
    row_scale *= tl.where(along == 0.0, 1.0, tl.sum(x * x, 1) / along)
    query8_ptr += b * query8_stride_b + h * query8_stride_h
    tl.store(query8_ptr + row * query8_stride_n + dims[None, :], query8, mask=exists[:, None])
    factor = row_scale * tl.max(key_scale, 0) * scale
    tl.store(row_factor_ptr + head * rows + token, factor, mask=exists)
    tl.store(row_shift_ptr + head * rows + token, shift, mask=exists)

    exists = (token < columns)[:, None]
    key_ptr += b * key_stride_b + h * key_stride_h
    key = tl.load(key_ptr + row * key_stride_m + dims[None, :], mask=exists, other=0.0)
    x = _wide(key, HEAD_DIM, ROTATE, WIDE_PRODUCTS)
    tl.store(
        key8_ptr + (head * columns + row) * HEAD_DIM + dims[None, :],
        _to_int8((x - key_mean) / key_scale[None, :]),
        mask=exists,
    )

    # Rows are read in the order in which they are stored.
    token = first + stored_token(place)
    exists = (token < columns)[:, None]
    row = token.to(tl.int64)[:, None]
    value_ptr += b * value_stride_b + h * value_stride_h
    x = tl.load(value_ptr + row * value_stride_m + dims[None, :], mask=exists, other=0.0)
    x = x.to(tl.float32) - tl.load(made_ptr + 2 * HEAD_DIM)[None, :]
    x = tl.where(exists, x / tl.load(made_ptr + 3 * HEAD_DIM)[None, :], 0.0)
    value8_ptr += head * HEAD_DIM * stored
    place += first
    tl.store(
        value8_ptr + dims[:, None].to(tl.int64) * stored + place[None, :],
        tl.trans(_to_fp8(x, WIDE_PRODUCTS)),
        mask=(place < stored)[None, :],
    )

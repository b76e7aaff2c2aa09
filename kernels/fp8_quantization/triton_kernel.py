"""`fp8_quantization` in Triton: three launches that read keys and values twice, the query once.

The first goes over chunks of tokens and notes the sum and the range of every channel, the second
makes means and scales of them, and the third rounds. There keys are rotated before the mean is
taken off: products with ±1 of 16-bit numbers are exact, so that tensor cores can do it.
"""

# Triton reads the annotations of a kernel in its own way.
# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from chipsparse.kernels.fp8_quantization import (
    FP8,
    LARGEST,
    STORED_TOGETHER,
    Fp8Attention,
    Fp8Quantization,
)
from chipsparse.kernels.launch import launch
from chipsparse.kernels.triton_blocks import dot, stored_token, to_fp8
from chipsparse.kernels.triton_support import cdiv, with_positive_scale

LARGEST_FP8 = tl.constexpr(LARGEST)
INFINITY = tl.constexpr(float("inf"))
TILE_TOKENS = 64
TILES_PER_CHUNK = 16
WARPS = 4
# Rows of what a chunk notes, and of what becomes of it; each has D numbers.
NOTED = tl.constexpr(6)  # sum, least and largest of the keys, then of the values
MADE = tl.constexpr(5)  # mean of the keys, that rotated, their scale, mean and scale of the values


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
        query=torch.empty_like(query, dtype=FP8),
        key=torch.empty(batch, heads, columns, head_dim, dtype=FP8, device=device),
        value=torch.empty(batch, heads, head_dim, stored, dtype=FP8, device=device),
        row_factor=numbers(rows),
        row_shift=numbers(rows),
        value_scale=numbers(head_dim),
        value_mean=numbers(head_dim),
        columns=columns,
        dtype=query.dtype,
    )
    strides = (*key.stride()[:3], *value.stride()[:3])
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
            TILE=TILE_TOKENS,
            num_warps=WARPS,
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
            ROTATE=call.rotate,
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
            WIDE_PRODUCTS=device.type == "cpu",
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
def _rotated(tile, HEAD_DIM: tl.constexpr, WIDE_PRODUCTS: tl.constexpr):
    signs = _signs(HEAD_DIM).to(tile.dtype)
    return dot(tile, signs, None, WIDE_PRODUCTS) * (HEAD_DIM**-0.5)


@triton.jit
def _is_finite(x):
    return tl.abs(x) < INFINITY


@triton.jit
def _saturated(x, WIDE_PRODUCTS: tl.constexpr):
    """As e4m3; an infinity becomes NaN."""
    x = tl.where(tl.abs(x) == INFINITY, float("nan"), x)
    x = tl.where(x > LARGEST_FP8, LARGEST_FP8, x)
    return to_fp8(tl.where(x < -LARGEST_FP8, -LARGEST_FP8, x), WIDE_PRODUCTS)


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
    TILE: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    key_ptr += b * key_stride_b + h * key_stride_h
    value_ptr += b * value_stride_b + h * value_stride_h
    dims = tl.arange(0, HEAD_DIM)
    key_sum = tl.zeros([HEAD_DIM], tl.float32)
    value_sum = tl.zeros([HEAD_DIM], tl.float32)
    key_least = tl.full([HEAD_DIM], INFINITY, tl.float32)
    value_least = tl.full([HEAD_DIM], INFINITY, tl.float32)
    key_most = tl.full([HEAD_DIM], -INFINITY, tl.float32)
    value_most = tl.full([HEAD_DIM], -INFINITY, tl.float32)
    for tile in range(TILES):
        token = (chunk * TILES + tile) * TILE + tl.arange(0, TILE)
        exists = (token < columns)[:, None]
        row = token.to(tl.int64)[:, None]
        key = tl.load(key_ptr + row * key_stride_m + dims[None, :], mask=exists, other=0.0)
        key = key.to(tl.float32)
        strange = tl.sum((~_is_finite(key)).to(tl.int32), 1) > 0
        counts = exists & ~strange[:, None]
        key_sum += tl.sum(tl.where(counts, key, 0.0), 0)
        key_least = tl.minimum(key_least, tl.min(tl.where(counts, key, INFINITY), 0))
        key_most = tl.maximum(key_most, tl.max(tl.where(counts, key, -INFINITY), 0))
        value = tl.load(value_ptr + row * value_stride_m + dims[None, :], mask=exists, other=0.0)
        value = value.to(tl.float32)
        counts = exists & _is_finite(value)
        value_sum += tl.sum(tl.where(counts, value, 0.0), 0)
        value_least = tl.minimum(value_least, tl.min(tl.where(counts, value, INFINITY), 0))
        value_most = tl.maximum(value_most, tl.max(tl.where(counts, value, -INFINITY), 0))
    noted_ptr += (head.to(tl.int64) * chunks + chunk) * NOTED * HEAD_DIM
    tl.store(noted_ptr + dims, key_sum)
    tl.store(noted_ptr + HEAD_DIM + dims, key_least)
    tl.store(noted_ptr + 2 * HEAD_DIM + dims, key_most)
    tl.store(noted_ptr + 3 * HEAD_DIM + dims, value_sum)
    tl.store(noted_ptr + 4 * HEAD_DIM + dims, value_least)
    tl.store(noted_ptr + 5 * HEAD_DIM + dims, value_most)


@triton.jit
def _scale(largest):
    """What makes the largest value 448; 1 where all are 0 or none is finite."""
    return tl.where(largest > 0, largest / LARGEST_FP8, 1.0)


@triton.jit
def _make_kernel(
    noted_ptr,  # [B, H, chunks, NOTED, D], contiguous, as all here
    made_ptr,  # [B, H, MADE, D]
    value_mean_ptr,  # [B, H, D]
    value_scale_ptr,
    columns,
    chunks,
    HEAD_DIM: tl.constexpr,
    ROTATE: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, HEAD_DIM)
    noted_ptr += head * chunks * NOTED * HEAD_DIM + dims
    key_sum = tl.zeros([HEAD_DIM], tl.float32)
    value_sum = tl.zeros([HEAD_DIM], tl.float32)
    key_least = tl.full([HEAD_DIM], INFINITY, tl.float32)
    value_least = tl.full([HEAD_DIM], INFINITY, tl.float32)
    key_most = tl.full([HEAD_DIM], -INFINITY, tl.float32)
    value_most = tl.full([HEAD_DIM], -INFINITY, tl.float32)
    for chunk in range(chunks):
        at = noted_ptr + chunk * NOTED * HEAD_DIM
        key_sum += tl.load(at)
        key_least = tl.minimum(key_least, tl.load(at + HEAD_DIM))
        key_most = tl.maximum(key_most, tl.load(at + 2 * HEAD_DIM))
        value_sum += tl.load(at + 3 * HEAD_DIM)
        value_least = tl.minimum(value_least, tl.load(at + 4 * HEAD_DIM))
        value_most = tl.maximum(value_most, tl.load(at + 5 * HEAD_DIM))
    key_mean = key_sum / columns
    rotated_mean = key_mean
    if ROTATE:
        rotated_mean = tl.sum(_signs(HEAD_DIM) * key_mean[:, None], 0) * (HEAD_DIM**-0.5)
    ranges = tl.maximum(key_most - key_mean, key_mean - key_least)
    key_scale = _scale(tl.max(ranges, 0))
    if ROTATE:
        key_scale = _scale(tl.sum(ranges, 0) * (HEAD_DIM**-0.5))
    value_mean = value_sum / columns
    value_scale = _scale(tl.maximum(value_most - value_mean, value_mean - value_least))
    made_ptr += head * MADE * HEAD_DIM + dims
    tl.store(made_ptr, key_mean)
    tl.store(made_ptr + HEAD_DIM, rotated_mean)
    tl.store(made_ptr + 2 * HEAD_DIM, tl.zeros([HEAD_DIM], tl.float32) + key_scale)
    tl.store(made_ptr + 3 * HEAD_DIM, value_mean)
    tl.store(made_ptr + 4 * HEAD_DIM, value_scale)
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
    key_scale = tl.max(tl.load(made_ptr + 2 * HEAD_DIM), 0)

    token = first + place
    row = token.to(tl.int64)[:, None]
    exists = token < rows
    query_ptr += b * query_stride_b + h * query_stride_h
    query = tl.load(
        query_ptr + row * query_stride_n + dims[None, :], mask=exists[:, None], other=0.0
    )
    x = query.to(tl.float32)
    shift = tl.sum(x * tl.load(made_ptr)[None, :], 1) * scale
    if ROTATE:
        x = _rotated(query, HEAD_DIM, WIDE_PRODUCTS)
    row_scale = _scale(tl.max(tl.where(_is_finite(x), tl.abs(x), 0.0), 1))
    query8_ptr += b * query8_stride_b + h * query8_stride_h
    tl.store(
        query8_ptr + row * query8_stride_n + dims[None, :],
        _saturated(x / row_scale[:, None], WIDE_PRODUCTS),
        mask=exists[:, None],
    )
    tl.store(row_factor_ptr + head * rows + token, row_scale * key_scale * scale, mask=exists)
    tl.store(row_shift_ptr + head * rows + token, shift, mask=exists)

    exists = (token < columns)[:, None]
    key_ptr += b * key_stride_b + h * key_stride_h
    key = tl.load(key_ptr + row * key_stride_m + dims[None, :], mask=exists, other=0.0)
    x = key.to(tl.float32)
    if ROTATE:
        x = _rotated(key, HEAD_DIM, WIDE_PRODUCTS)
    x = (x - tl.load(made_ptr + HEAD_DIM)[None, :]) / key_scale
    tl.store(
        key8_ptr + (head * columns + row) * HEAD_DIM + dims[None, :],
        _saturated(x, WIDE_PRODUCTS),
        mask=exists,
    )

    # Rows are read in the order in which they are stored.
    token = first + stored_token(place)
    exists = (token < columns)[:, None]
    row = token.to(tl.int64)[:, None]
    value_ptr += b * value_stride_b + h * value_stride_h
    x = tl.load(value_ptr + row * value_stride_m + dims[None, :], mask=exists, other=0.0)
    x = x.to(tl.float32) - tl.load(made_ptr + 3 * HEAD_DIM)[None, :]
    x = tl.where(exists, x / tl.load(made_ptr + 4 * HEAD_DIM)[None, :], 0.0)
    value8_ptr += head * HEAD_DIM * stored
    place += first
    tl.store(
        value8_ptr + dims[:, None].to(tl.int64) * stored + place[None, :],
        tl.trans(_saturated(x, WIDE_PRODUCTS)),
        mask=(place < stored)[None, :],
    )

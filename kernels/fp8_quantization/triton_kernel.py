"""`fp8_quantization` in Triton: three launches that read keys and values twice, the query once.

The first goes over chunks of tokens and notes the sum and the range of every channel, the second
makes means and scales of them, and the third rounds. Keys are rotated in the first and in the last:
products with ±1 of 16-bit numbers are exact, so that tensor cores can do it.

Memory needs as long as some 15 instructions a number. So what is noted goes from thread to thread
at the end of a chunk alone, scales are multiplied with as their reciprocals, and channels come out
of the tensor cores in the order in which a thread can store them.
"""

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
# What leaves an fp32 no room for digits behind the point; its last byte is the int8 of the number.
ROUNDING = tl.constexpr(1.5 * 2.0**23)
LEAST_NORMAL = tl.constexpr(2.0**-126)
# Tokens of a program that notes, of one that rounds, and of a step of both. What notes values has
# steps of its own, see `_range`, and a chunk is a multiple of them.
CHUNK_TOKENS = 1024
PART_TOKENS = 256
TILE_TOKENS = 64
WARPS = 4
MAKE_WARPS = 16
ROUND_STAGES = 2  # with 3, what is loaded ahead leaves shared memory for fewer programs
# Channels that tensor cores rotate. Of 128 two halves are, and then added and subtracted: half of
# the products, and a matrix of a quarter, which each program makes for itself.
ROTATED = tl.constexpr(64)
# 16-bit numbers that all threads read by 16 bytes each, and how often they do that in a row.
AT_ONCE = tl.constexpr(1024)
IN_A_ROW = tl.constexpr(8)
CHUNKS_AT_ONCE = tl.constexpr(32)
# Rows of what a chunk notes, and of what becomes of it; each has D numbers.
NOTED = tl.constexpr(6)  # sum, least and largest of the keys, then of the values
MADE = tl.constexpr(4)  # mean of the keys and their scale, mean of the values and their scale


def fp8_quantization(call: Fp8Quantization) -> Fp8Attention:
    """Run a checked `Fp8Quantization`."""
    query, scale = with_positive_scale(call.query, call.softmax_scale)
    key = call.key
    value = call.value
    batch, heads, rows, head_dim = query.shape
    columns = key.shape[2]
    device = query.device
    stored = cdiv(columns, STORED_TOGETHER) * STORED_TOGETHER
    chunks = cdiv(columns, CHUNK_TOKENS)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.empty(batch, heads, *shape, dtype=torch.float32, device=device)

    noted = numbers(chunks, NOTED.value, head_dim)
    made = numbers(MADE.value, head_dim)
    result = Fp8Attention(
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
    constants = {
        "HEAD_DIM": head_dim,
        "ROTATE": call.rotate,
        "WIDE_PRODUCTS": device.type == "cpu",
        "TILE": TILE_TOKENS,
        "num_warps": WARPS,
    }
    # Heads are the first axis of the grid: in a model they lie side by side.
    parts = cdiv(rows, PART_TOKENS) + 2 * cdiv(columns, PART_TOKENS)
    launch(
        _note_kernel,
        (batch * heads, chunks, 2),
        key,
        value,
        noted,
        *strides,
        heads,
        columns,
        chunks,
        CHUNK=CHUNK_TOKENS,
        **constants,
    )
    launch(
        _make_kernel,
        (batch * heads,),
        noted,
        made,
        result.value_mean,
        result.value_scale,
        columns,
        chunks,
        HEAD_DIM=head_dim,
        num_warps=MAKE_WARPS,
    )
    launch(
        _round_kernel,
        (batch * heads, parts),
        query,
        key,
        value,
        made,
        result.query,
        result.key,
        result.value,
        result.row_factor,
        result.row_shift,
        *query.stride()[:3],
        *strides,
        *result.query.stride()[:3],
        heads,
        rows,
        columns,
        stored,
        scale,
        PART=PART_TOKENS,
        **constants,
        num_stages=ROUND_STAGES,
    )
    return result


@triton.jit
def _signs(dtype: tl.constexpr, IN_ORDER: tl.constexpr):
    """The Hadamard matrix of 64 in ±1: the parity of the bits that row and column share.

    A thread has the columns 8 j + 2 t + e of a product for a t below 4 (e below 2). If not
    ``IN_ORDER`` they are the channels 16 t + 2 j + e, which are neighbors; `_in_order` takes these.
    """
    row = tl.arange(0, ROTATED)
    column = row
    if not IN_ORDER:
        column = ((row & 6) << 3) + ((row >> 3) << 1) + (row & 1)
    common = row[:, None] & column[None, :]
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    return tl.where((common & 1) == 0, 1.0, -1.0).to(dtype)


@triton.jit
def _in_order(x, HEAD_DIM: tl.constexpr, TILE: tl.constexpr):
    """Rows ``[TILE, D]`` of ``[TILE, 64, 1 or 2]``: columns as `_signs` has them, and halves."""
    x = tl.reshape(x, [TILE, ROTATED // 8, 4, 2, HEAD_DIM // ROTATED])
    return tl.reshape(tl.permute(x, (0, 4, 2, 1, 3)), [TILE, HEAD_DIM])


@triton.jit
def _read_rows(
    ptr,
    token,
    stride,
    signs,
    HEAD_DIM: tl.constexpr,
    ROTATE: tl.constexpr,
    WIDE_PRODUCTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rows of these tokens in fp32; where that was asked for, times a Hadamard matrix of ±1.

    These are rotated rows but for `_unit`, which is multiplied with scales rather than with rows.
    """
    ptr += token.to(tl.int64)[:, None] * stride
    if not ROTATE:
        return tl.load(ptr + tl.arange(0, HEAD_DIM)[None, :]).to(tl.float32)
    ptr += tl.arange(0, ROTATED)[None, :]
    x = tl.load(ptr)
    if HEAD_DIM == 2 * ROTATED:
        y = tl.load(ptr + ROTATED)
        x = dot(x, signs, None, WIDE_PRODUCTS)
        y = dot(y, signs, None, WIDE_PRODUCTS)
        x = tl.join(x + y, x - y)
    else:
        x = dot(x, signs, None, WIDE_PRODUCTS)
    return _in_order(x, HEAD_DIM, TILE)


@triton.jit
def _unit(HEAD_DIM: tl.constexpr, ROTATE: tl.constexpr):
    """The factor that makes the matrix of ±1 orthogonal."""
    return HEAD_DIM**-0.5 if ROTATE else 1.0


@triton.jit
def _is_finite(x):
    return tl.abs(x) < INFINITY


@triton.jit
def _by_threads(x, ROWS: tl.constexpr):
    """Rows ``[n ROWS, D]`` as ``[n, ROWS, D]``; one thread has all n."""
    return tl.reshape(x, [x.shape[0] // ROWS, ROWS, x.shape[1]])


@triton.jit
def _range(ptr, stride, first, last, columns, HEAD_DIM: tl.constexpr, FINITE: tl.constexpr):
    """Sum, least and largest of each channel; where ``FINITE``, of finite numbers alone."""
    ROWS: tl.constexpr = AT_ONCE // HEAD_DIM
    place = tl.arange(0, IN_A_ROW * ROWS)
    dims = tl.arange(0, HEAD_DIM)
    total = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    least = total + INFINITY
    most = total - INFINITY
    for start in range(first, last, IN_A_ROW * ROWS):
        token = start + place
        # Behind the last token it comes again, which changes no range, and counts in no sum.
        counts = (token < columns).to(tl.float32)[:, None]
        row = tl.minimum(token, columns - 1).to(tl.int64)[:, None]
        x = tl.load(ptr + row * stride + dims[None, :]).to(tl.float32)
        low = x
        high = x
        if FINITE:
            low = tl.where(_is_finite(x), x, INFINITY)
            high = tl.where(_is_finite(x), x, -INFINITY)
            x = tl.where(_is_finite(x), x, 0.0)
        total += tl.sum(_by_threads(x * counts, ROWS), 0)
        least = tl.minimum(least, tl.min(_by_threads(low, ROWS), 0))
        most = tl.maximum(most, tl.max(_by_threads(high, ROWS), 0))
    return tl.sum(total, 0), tl.min(least, 0), tl.max(most, 0)


@triton.jit
def _rotated_range(
    ptr,
    stride,
    first,
    last,
    columns,
    HEAD_DIM: tl.constexpr,
    WIDE_PRODUCTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return sum, least and largest of each channel of rotated rows."""
    signs = _signs(ptr.dtype.element_ty, True)
    dims = tl.arange(0, ROTATED)[None, :]
    # Channels are the rows of the products, so that a thread has few of them and many tokens: of
    # each channel those with the same t of 8 j + 2 t + e.
    total = tl.zeros([HEAD_DIM, 4], tl.float32)
    least = total + INFINITY
    most = total - INFINITY
    for start in range(first, last, TILE):
        token = start + tl.arange(0, TILE)
        counts = (token < columns).to(tl.float32)[None, :]
        row = tl.minimum(token, columns - 1).to(tl.int64)[:, None]
        rows = ptr + row * stride + dims
        x = dot(signs, tl.trans(tl.load(rows)), None, WIDE_PRODUCTS)
        if HEAD_DIM == 2 * ROTATED:
            y = dot(signs, tl.trans(tl.load(rows + ROTATED)), None, WIDE_PRODUCTS)
            x = tl.permute(tl.join(x + y, x - y), (2, 0, 1))
            x = tl.reshape(x, [HEAD_DIM, TILE])
        counted = tl.reshape(x * counts, [HEAD_DIM, TILE // 8, 4, 2])
        x = tl.reshape(x, [HEAD_DIM, TILE // 8, 4, 2])
        total += tl.sum(tl.sum(counted, 3), 1)
        least = tl.minimum(least, tl.min(tl.min(x, 3), 1))
        most = tl.maximum(most, tl.max(tl.max(x, 3), 1))
    unit = _unit(HEAD_DIM, True)
    return tl.sum(total, 1) * unit, tl.min(least, 1) * unit, tl.max(most, 1) * unit


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
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTATE: tl.constexpr,
    WIDE_PRODUCTS: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    dims = tl.arange(0, HEAD_DIM)
    first = chunk * CHUNK
    last = tl.minimum(first + CHUNK, columns)
    noted_ptr += (head.to(tl.int64) * chunks + chunk) * NOTED * HEAD_DIM + dims
    if tl.program_id(2) == 0:
        key_ptr += b * key_stride_b + h * key_stride_h
        # What is not finite stays in the sum, which is how the next launch finds it.
        if ROTATE:
            total, least, most = _rotated_range(
                key_ptr,
                key_stride_m,
                first,
                last,
                columns,
                HEAD_DIM,
                WIDE_PRODUCTS,
                TILE,
            )
        else:
            total, least, most = _range(
                key_ptr,
                key_stride_m,
                first,
                last,
                columns,
                HEAD_DIM,
                False,
            )
        tl.store(noted_ptr, total)
        tl.store(noted_ptr + HEAD_DIM, least)
        tl.store(noted_ptr + 2 * HEAD_DIM, most)
    else:
        value_ptr += b * value_stride_b + h * value_stride_h
        total, least, most = _range(
            value_ptr,
            value_stride_m,
            first,
            last,
            columns,
            HEAD_DIM,
            False,
        )
        # A sum is not finite where a number is not; only then it takes the slower way.
        if tl.max((~_is_finite(total)).to(tl.int32), 0) > 0:
            total, least, most = _range(
                value_ptr,
                value_stride_m,
                first,
                last,
                columns,
                HEAD_DIM,
                True,
            )
        tl.store(noted_ptr + 3 * HEAD_DIM, total)
        tl.store(noted_ptr + 4 * HEAD_DIM, least)
        tl.store(noted_ptr + 5 * HEAD_DIM, most)


@triton.jit
def _int8_scale(largest):
    """Return the scale that makes the largest value 127."""
    return tl.where(largest > LEAST, largest / MOST_INT8, NOTHING)


@triton.jit
def _fp8_scale(largest):
    """Return the scale that makes the largest value 448; 1 where all are 0 or none is finite.

    A normal number, whose reciprocal is finite.
    """
    return tl.where(largest > 0, tl.maximum(largest / MOST_FP8, LEAST_NORMAL), 1.0)


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
    noted_ptr += head * chunks * NOTED * HEAD_DIM + dims[None, :]
    key_sum = tl.zeros([CHUNKS_AT_ONCE, HEAD_DIM], tl.float32)
    value_sum = key_sum
    key_least = key_sum + INFINITY
    value_least = key_sum + INFINITY
    key_most = key_sum - INFINITY
    value_most = key_sum - INFINITY
    for first in range(0, chunks, CHUNKS_AT_ONCE):
        chunk = first + tl.arange(0, CHUNKS_AT_ONCE)[:, None]
        counts = chunk < chunks
        at = noted_ptr + tl.minimum(chunk, chunks - 1).to(tl.int64) * NOTED * HEAD_DIM
        key_sum += tl.load(at, mask=counts, other=0.0)
        key_least = tl.minimum(key_least, tl.load(at + HEAD_DIM))
        key_most = tl.maximum(key_most, tl.load(at + 2 * HEAD_DIM))
        value_sum += tl.load(at + 3 * HEAD_DIM, mask=counts, other=0.0)
        value_least = tl.minimum(value_least, tl.load(at + 4 * HEAD_DIM))
        value_most = tl.maximum(value_most, tl.load(at + 5 * HEAD_DIM))
    key_total = tl.sum(key_sum, 0)
    # Rounded as it should be: nothing is left of a channel that is its mean, if it is not rotated.
    count = tl.zeros([HEAD_DIM], tl.float32) + columns
    key_mean = tl.div_rn(key_total, count)
    key_range = tl.maximum(tl.max(key_most, 0) - key_mean, key_mean - tl.min(key_least, 0))
    key_scale = _int8_scale(tl.max(key_range, 0))
    # A sum is not finite where a number is not.
    strange = tl.sum((~_is_finite(key_total)).to(tl.int32), 0) > 0
    key_scale = tl.where(strange, float("nan"), key_scale)
    value_mean = tl.div_rn(tl.sum(value_sum, 0), count)
    value_scale = _fp8_scale(
        tl.maximum(tl.max(value_most, 0) - value_mean, value_mean - tl.min(value_least, 0)),
    )
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
    PART: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTATE: tl.constexpr,
    WIDE_PRODUCTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rounds a part of the queries, the keys or the values of a head."""
    head = tl.program_id(0)
    part = tl.program_id(1)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    head = head.to(tl.int64)
    made_ptr += head * MADE * HEAD_DIM
    row_parts = tl.cdiv(rows, PART)
    column_parts = tl.cdiv(columns, PART)
    dims = tl.arange(0, HEAD_DIM)
    unit = _unit(HEAD_DIM, ROTATE)
    if part < row_parts:
        signs = _signs(query_ptr.dtype.element_ty, False)
        query_ptr += b * query_stride_b + h * query_stride_h
        query8_ptr += b * query8_stride_b + h * query8_stride_h
        first = part * PART
        last = tl.minimum(first + PART, rows)
        mean = tl.load(made_ptr + dims)[None, :]
        key_scale = tl.load(made_ptr + HEAD_DIM)
        for start in range(first, last, TILE):
            token = start + tl.arange(0, TILE)
            exists = token < last
            x = _read_rows(
                query_ptr, tl.minimum(token, last - 1), query_stride_n, signs, HEAD_DIM, ROTATE,
                WIDE_PRODUCTS, TILE,
            )  # fmt: skip
            shift = tl.sum(x * mean, 1) * unit * scale
            row_scale = _int8_scale(tl.max(tl.abs(x), 1) * unit)
            x *= (unit / row_scale)[:, None]
            rounded = x + ROUNDING
            tl.store(
                query8_ptr + token.to(tl.int64)[:, None] * query8_stride_n + dims[None, :],
                rounded.to(tl.int32, bitcast=True).to(tl.int8),
                mask=exists[:, None],
            )
            along = tl.sum(x * (rounded - ROUNDING), 1)
            row_scale *= tl.where(along == 0.0, 1.0, tl.sum(x * x, 1) / along)
            place = head * rows + token
            tl.store(row_factor_ptr + place, row_scale * key_scale * scale, mask=exists)
            tl.store(row_shift_ptr + place, shift, mask=exists)
    elif part < row_parts + column_parts:
        signs = _signs(key_ptr.dtype.element_ty, False)
        key_ptr += b * key_stride_b + h * key_stride_h
        key8_ptr += head * columns * HEAD_DIM
        first = (part - row_parts) * PART
        last = tl.minimum(first + PART, columns)
        mean = tl.load(made_ptr + dims)[None, :]
        factor = 1.0 / tl.load(made_ptr + HEAD_DIM)
        for start in range(first, last, TILE):
            token = start + tl.arange(0, TILE)
            x = _read_rows(
                key_ptr, tl.minimum(token, last - 1), key_stride_m, signs, HEAD_DIM, ROTATE,
                WIDE_PRODUCTS, TILE,
            )  # fmt: skip
            tl.store(
                key8_ptr + token.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :],
                ((x * unit - mean) * factor + ROUNDING).to(tl.int32, bitcast=True).to(tl.int8),
                mask=(token < last)[:, None],
            )
    else:
        value_ptr += b * value_stride_b + h * value_stride_h
        value8_ptr += head * HEAD_DIM * stored
        first = (part - row_parts - column_parts) * PART
        last = tl.minimum(first + PART, stored)
        mean = tl.load(made_ptr + 2 * HEAD_DIM + dims)[None, :]
        factors = (1.0 / tl.load(made_ptr + 3 * HEAD_DIM + dims))[None, :]
        for start in range(first, last, TILE):
            # Rows are read in the order in which they are stored.
            token = start + stored_token(tl.arange(0, TILE))
            value_row = tl.minimum(token, columns - 1).to(tl.int64)[:, None]
            x = tl.load(value_ptr + value_row * value_stride_m + dims[None, :]).to(tl.float32)
            # Zero, but NaN of what is not finite.
            strange = x * 0.0
            x = (x - mean) * factors + strange
            if start + TILE > columns:
                x = tl.where((token < columns)[:, None], x, 0.0)
            places = start + tl.arange(0, TILE)
            tl.store(
                value8_ptr + dims.to(tl.int64)[:, None] * stored + places[None, :],
                tl.trans(to_fp8(x, WIDE_PRODUCTS)),
                mask=(places < last)[None, :],
            )

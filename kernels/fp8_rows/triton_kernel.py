"""`fp8_rows` in Triton.

A program rounds each contiguous row, which it reads a second time from the L1 cache. Turned rows
are activations: they have too many numbers for one program, and are too few for one program each to
be fast. So programs for some numbers each find a row's largest together, by atomic maxima of its
bits, and a second launch rounds. Eight rows move at once where they are contiguous, those that pad
them included: sizes of which the compiler does not know that eight divides them would make it move
one by one, eight apart.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from chipsparse.kernels.fp8_quantization import LARGEST_FP8
from chipsparse.kernels.fp8_rows import SCALE_OF_ZEROS, SMALLEST_SCALE, Fp8RowRounding, Fp8Rows
from chipsparse.kernels.launch import launch
from chipsparse.kernels.token_layout import has_padding
from chipsparse.kernels.triton_blocks import to_fp8_bytes
from chipsparse.kernels.triton_support import cdiv, converts_fp8, next_power_of_2

LEAST = tl.constexpr(SMALLEST_SCALE)
OF_ZEROS = tl.constexpr(SCALE_OF_ZEROS)
INFINITY = tl.constexpr(float("inf"))
# Numbers of a contiguous row at a time: 16 bytes for each thread, twice.
TILE = 4096
# Of a program for turned rows: whole cache lines whichever of the two are contiguous, also of FP8.
ROWS = 128
COLUMNS = 128
WARPS = 8


def fp8_rows(call: Fp8RowRounding) -> Fp8Rows:
    """Run a checked `Fp8RowRounding`."""
    rows = call.rows
    (data, scale) = call.results()
    if not scale.numel():
        return Fp8Rows(data, scale)
    rounding: dict[str, Any] = {
        "UNITS": call.headroom / LARGEST_FP8,
        "CONVERTS": converts_fp8(rows.device),
    }
    if call.turned:
        _round_turned(rows, data, scale, rounding)
    else:
        tile = min(TILE, next_power_of_2(rows.shape[1]))
        launch(
            _round_rows_kernel,
            (len(rows),),
            rows,
            data.view(torch.uint8),
            scale,
            rows.stride(0),
            rows.shape[1],
            TILE=tile,
            **rounding,
            num_warps=max(1, WARPS * tile // TILE),
        )
    return Fp8Rows(data, scale)


def _round_turned(
    rows: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    rounding: dict[str, Any],
) -> None:
    batch, count, width = rows.shape
    largest = rows.new_zeros(batch, count, dtype=torch.int32)
    grid = cdiv(count, ROWS), cdiv(width, COLUMNS), batch
    of_input = rows, *rows.stride()
    tile: dict[str, Any] = {
        "EIGHT_AT_ONCE": has_padding(rows),
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "num_warps": WARPS,
    }
    launch(_largest_kernel, grid, *of_input, largest, count, width, **tile)
    launch(
        _round_turned_kernel,
        grid,
        *of_input,
        largest,
        data.view(torch.uint8),
        scale,
        data.stride(0),
        data.stride(2),
        count,
        width,
        **rounding,
        **tile,
    )


@triton.jit
def _size(x):
    """Sizes of numbers, of NaN infinity: a maximum may pass over NaN."""
    return tl.where(x == x, tl.abs(x), INFINITY)


@triton.jit
def _scale(largest, UNITS: tl.constexpr):
    """Scales of rows by their largest sizes, and which of them are finite."""
    scale = tl.maximum(largest * UNITS, LEAST)
    scale = tl.where(largest == 0, OF_ZEROS, scale)
    return scale, scale < INFINITY


@triton.jit
def _round_rows_kernel(
    rows_ptr,  # [M, K], rows contiguous
    data_ptr,  # [M, K], contiguous; as bytes
    scale_ptr,  # [M]
    stride,
    width,
    TILE: tl.constexpr,
    UNITS: tl.constexpr,
    CONVERTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, TILE)
    rows_ptr += row * stride
    data_ptr += row * width
    largest = tl.zeros([TILE], tl.float32)
    for first in range(0, width, TILE):
        at = first + place
        x = tl.load(rows_ptr + at, mask=at < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, _size(x))
    scale, finite = _scale(tl.max(largest, 0), UNITS)
    tl.store(scale_ptr + row, tl.where(finite, scale, float("nan")))
    units = tl.div_rn(1.0, tl.where(finite, scale, 1.0))
    for first in range(0, width, TILE):
        at = first + place
        x = tl.load(rows_ptr + at, mask=at < width, other=0.0).to(tl.float32)
        x = tl.where(finite, x, 0.0) * units
        tl.store(data_ptr + at, to_fp8_bytes(x, CONVERTS), mask=at < width)


@triton.jit
def _tile(
    rows_ptr,
    stride_b,
    stride_m,
    stride_k,
    count,
    width,
    EIGHT_AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program's batch, rows, columns, and their numbers; zeros where there are none."""
    if EIGHT_AT_ONCE:
        stride_b = stride_b // 8 * 8
        stride_k = stride_k // 8 * 8
        count = (count + 7) // 8 * 8
    b = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    places = rows_ptr + b * stride_b + row.to(tl.int64)[:, None] * stride_m
    places += column.to(tl.int64)[None, :] * stride_k
    inside = (row < count)[:, None] & (column < width)[None, :]
    return b, row, column, tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["count"])
def _largest_kernel(
    rows_ptr,  # [B, M, K]
    stride_b,
    stride_m,
    stride_k,
    largest_ptr,  # [B, M], contiguous, zeros: the bits of a number that is not negative
    count,
    width,
    EIGHT_AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    b, row, _, x = _tile(
        rows_ptr,
        stride_b,
        stride_m,
        stride_k,
        count,
        width,
        EIGHT_AT_ONCE,
        ROWS,
        COLUMNS,
    )
    bits = tl.max(_size(x), 1).to(tl.int32, bitcast=True)
    tl.atomic_max(largest_ptr + b * count + row, bits, mask=row < count, sem="relaxed")


@triton.jit(do_not_specialize=["data_stride_k", "count"])
def _round_turned_kernel(
    rows_ptr,  # [B, M, K]
    stride_b,
    stride_m,
    stride_k,
    largest_ptr,  # [B, M], contiguous
    data_ptr,  # [B, M, K], turned and padded; as bytes
    scale_ptr,  # [B, M], contiguous
    data_stride_b,
    data_stride_k,
    count,
    width,
    UNITS: tl.constexpr,
    CONVERTS: tl.constexpr,
    EIGHT_AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    b, row, column, x = _tile(
        rows_ptr,
        stride_b,
        stride_m,
        stride_k,
        count,
        width,
        EIGHT_AT_ONCE,
        ROWS,
        COLUMNS,
    )
    bits = tl.load(largest_ptr + b * count + row, mask=row < count, other=0)
    scale, finite = _scale(bits.to(tl.float32, bitcast=True), UNITS)
    if tl.program_id(1) == 0:
        stored = tl.where(finite, scale, float("nan"))
        tl.store(scale_ptr + b * count + row, stored, mask=row < count)
    units = tl.div_rn(1.0, tl.where(finite, scale, 1.0))
    x = tl.where(finite[:, None], x, 0.0) * units[:, None]
    data_stride_k = data_stride_k // 8 * 8
    places = data_ptr + b * data_stride_b + row[:, None]
    places += column.to(tl.int64)[None, :] * data_stride_k
    padded = (count + 7) // 8 * 8
    inside = (row < padded)[:, None] & (column < width)[None, :]
    tl.store(places, to_fp8_bytes(x, CONVERTS), mask=inside)

"""`fp8_rows` in Triton: a program for each row, which it reads a second time from the L1 cache."""

# Triton reads the annotations of a kernel in its own way.
# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from chipsparse.kernels.fp8_quantization import FP8, LARGEST_FP8, SMALLEST
from chipsparse.kernels.fp8_rows import Fp8RowRounding, Fp8Rows
from chipsparse.kernels.launch import launch
from chipsparse.kernels.triton_blocks import to_fp8
from chipsparse.kernels.triton_support import next_power_of_2

MOST = tl.constexpr(LARGEST_FP8)
LEAST = tl.constexpr(SMALLEST)
INFINITY = tl.constexpr(float("inf"))
# Numbers of a row at a time: 16 bytes for each thread, twice.
TILE, WARPS = 4096, 8


def fp8_rows(call: Fp8RowRounding) -> Fp8Rows:
    """Run a checked `Fp8RowRounding`."""
    rows = call.rows
    count, width = rows.shape
    data = torch.empty(count, width, dtype=FP8, device=rows.device)
    scale = torch.empty(count, 1, dtype=torch.float32, device=rows.device)
    if count:
        with torch.cuda.device_of(rows):
            launch(
                _round_rows_kernel,
                (count,),
                rows,
                data,
                scale,
                rows.stride(0),
                width,
                TILE=min(TILE, next_power_of_2(width)),
                INTERPRETED=rows.device.type == "cpu",
                num_warps=WARPS,
            )
    return Fp8Rows(data, scale)


@triton.jit
def _round_rows_kernel(
    rows_ptr,  # [M, K], rows contiguous
    data_ptr,  # [M, K], contiguous
    scale_ptr,  # [M]
    stride,
    width,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, TILE)
    rows_ptr += row * stride
    data_ptr += row * width
    largest = tl.zeros([TILE], tl.float32)
    for first in range(0, width, TILE):
        at = first + place
        size = tl.abs(tl.load(rows_ptr + at, mask=at < width, other=0.0).to(tl.float32))
        # A maximum may pass over NaN.
        largest = tl.maximum(largest, tl.where(size == size, size, INFINITY))
    most = tl.max(largest, 0)
    scale = tl.where(most < LEAST, 1.0, most / MOST)
    scale = tl.where(most < INFINITY, scale, float("nan"))
    tl.store(scale_ptr + row, scale)
    factor = 1.0 / scale
    for first in range(0, width, TILE):
        at = first + place
        x = tl.load(rows_ptr + at, mask=at < width, other=0.0).to(tl.float32) * factor
        x = tl.where(x > MOST, MOST, x)
        x = tl.where(x < -MOST, -MOST, x)
        tl.store(data_ptr + at, to_fp8(x, INTERPRETED), mask=at < width)

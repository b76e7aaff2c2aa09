"""`fp8_dequantization` in Triton: every number is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chipsparse.kernels.fp8_dequantization import Fp8Dequantization
from chipsparse.kernels.launch import launch
from chipsparse.kernels.triton_blocks import from_fp8_bits
from chipsparse.kernels.triton_support import cdiv

TILE_ROWS = 64
TILE_COLUMNS = 128
WARPS = 8


def fp8_dequantization(call: Fp8Dequantization) -> torch.Tensor:
    """Run a checked `Fp8Dequantization`."""
    data = call.data
    scale = call.scale
    rows, columns = data.shape
    shape = (columns, rows) if call.turned else (rows, columns)
    stored = torch.empty(shape, dtype=call.dtype, device=data.device)
    if stored.numel():
        launch(
            _dequantize_kernel,
            (cdiv(columns, TILE_COLUMNS), cdiv(rows, TILE_ROWS)),
            data.view(torch.uint8),
            scale,
            stored,
            data.stride(0),
            scale.stride(0) if scale.shape[0] > 1 else 0,
            rows,
            columns,
            TURNED=call.turned,
            ROWS=TILE_ROWS,
            COLUMNS=TILE_COLUMNS,
            num_warps=WARPS,
        )
    return stored.t() if call.turned else stored


@triton.jit(do_not_specialize=["scale_stride"])
def _dequantize_kernel(
    data_ptr,  # [R, K] bytes of e4m3, rows contiguous
    scale_ptr,  # [R]
    result_ptr,  # [R, K], or [K, R] where it is turned
    data_stride,
    scale_stride,
    rows,
    columns,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    wide_row = row.to(tl.int64)
    bits = tl.load(data_ptr + wide_row[:, None] * data_stride + column[None, :], mask=mask, other=0)
    scale = tl.load(scale_ptr + row * scale_stride, mask=row < rows, other=0.0)
    number = tl.where((bits & 0x7F) == 0x7F, float("nan"), from_fp8_bits(bits))
    result = (number * scale[:, None]).to(result_ptr.dtype.element_ty)
    if TURNED:
        places = column.to(tl.int64)[:, None] * rows + row[None, :]
        inside = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(result_ptr + places, result.T, mask=inside)
    else:
        tl.store(result_ptr + wide_row[:, None] * columns + column[None, :], result, mask=mask)

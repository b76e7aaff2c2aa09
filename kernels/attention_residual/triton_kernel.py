"""`attention_residual` in one pass: reads both outputs once, writes the residual once.

FP8 is written as bytes made by integer arithmetic, so that GPUs before Ada can, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chipsparse.kernels.attention_residual import AttentionResidual, Residual
from chipsparse.kernels.attention_residual.reference import SMALLEST_SCALE
from chipsparse.kernels.fp8_quantization import FP8
from chipsparse.kernels.fp8_quantization import LARGEST_FP8 as LARGEST
from chipsparse.kernels.launch import launch
from chipsparse.kernels.triton_blocks import fp8_bits
from chipsparse.kernels.triton_support import cdiv, next_power_of_2

TILE_ELEMENTS = 4096
WARPS = 4
LARGEST_FP8 = tl.constexpr(LARGEST)
LEAST_SCALE = tl.constexpr(SMALLEST_SCALE)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _residual_kernel(
    output_ptr,
    kept_ptr,
    kept_lse_ptr,
    lse_ptr,
    residual_ptr,
    residual_scale_ptr,
    kept_mass_ptr,
    rows,
    heads,
    output_stride_b,
    output_stride_h,
    output_stride_n,
    kept_stride_b,
    kept_stride_h,
    kept_stride_n,
    MERGES: tl.constexpr,
    IN_FP8: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    unit = tl.program_id(1)
    batch, head = (unit // heads).to(tl.int64), (unit % heads).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = row < rows
    per_row = unit.to(tl.int64) * rows + row
    wide = row.to(tl.int64)[:, None]
    place = (
        batch * output_stride_b + head * output_stride_h + wide * output_stride_n + column[None, :]
    )
    kept_place = (
        batch * kept_stride_b + head * kept_stride_h + wide * kept_stride_n + column[None, :]
    )
    mask = inside[:, None] & (column < WIDTH)[None, :]
    output = tl.load(output_ptr + place, mask=mask, other=0.0).to(tl.float32)
    kept = tl.load(kept_ptr + kept_place, mask=mask, other=0.0).to(tl.float32)
    if MERGES:
        kept_lse = tl.load(kept_lse_ptr + per_row, mask=inside, other=0.0)
        mass = tl.exp(kept_lse - tl.load(lse_ptr + per_row, mask=inside, other=0.0))
        tl.store(kept_mass_ptr + per_row, mass, mask=inside)
        kept = mass[:, None] * kept
    residual = output - kept
    if IN_FP8:
        # Not the largest of what may be NaN: that hides it.
        size = tl.where(residual == residual, tl.abs(residual), INFINITY)
        largest = tl.max(size, 1)
        scale = tl.maximum(tl.div_rn(largest, LARGEST_FP8), LEAST_SCALE)
        finite = largest < INFINITY
        tl.store(residual_scale_ptr + per_row, tl.where(finite, scale, float("nan")), mask=inside)
        bits = fp8_bits(tl.div_rn(tl.where(finite[:, None], residual, 0.0), scale[:, None]))
        tl.store(residual_ptr + place, bits, mask=mask)
    else:
        tl.store(residual_ptr + place, residual.to(residual_ptr.dtype.element_ty), mask=mask)


def attention_residual(call: AttentionResidual) -> Residual:
    """Run a checked `AttentionResidual`."""
    output, kept = call.output, call.kept
    batch, heads, tokens, width = output.shape
    dtype = FP8 if call.fp8 else output.dtype
    # Where the output is no plain permutation of its dimensions, the residual is contiguous.
    values = torch.empty_like(output, dtype=dtype)
    if values.stride() != output.stride():
        output = output.contiguous()
        values = torch.empty_like(output, dtype=dtype)
    mass, scale = None, None
    if call.lse is not None and call.delta_rule == "merge":
        mass = torch.empty(batch, heads, tokens, dtype=call.lse.dtype, device=output.device)
    if call.fp8:
        scale = torch.empty(batch, heads, tokens, dtype=torch.float32, device=output.device)
    columns = next_power_of_2(width)
    rows = max(1, TILE_ELEMENTS // columns)
    # The kernel never touches the tensors of what is not asked for.
    if output.numel():
        launch(
            _residual_kernel,
            (cdiv(tokens, rows), batch * heads),
            output,
            kept,
            output if call.kept_lse is None else call.kept_lse.contiguous(),
            output if call.lse is None else call.lse.contiguous(),
            values.view(torch.uint8) if call.fp8 else values,
            values if scale is None else scale,
            values if mass is None else mass,
            tokens,
            heads,
            *output.stride()[:3],
            *kept.stride()[:3],
            MERGES=mass is not None,
            IN_FP8=call.fp8,
            WIDTH=width,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=WARPS,
        )
    return Residual(values, scale, mass)

"""The merge rule's residual in one pass: reads both outputs once, writes the residual once."""

# Triton reads the annotations of a kernel in its own way.
# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from chipsparse.kernels.launch import launch
from chipsparse.kernels.merge_residual import MergeResidual
from chipsparse.kernels.triton_support import cdiv, next_power_of_2

TILE_ELEMENTS = 4096
WARPS = 4


@triton.jit
def _residual_kernel(
    output_ptr,
    kept_ptr,
    kept_lse_ptr,
    lse_ptr,
    residual_ptr,
    kept_mass_ptr,
    rows,
    heads,
    output_stride_b,
    output_stride_h,
    output_stride_n,
    kept_stride_b,
    kept_stride_h,
    kept_stride_n,
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
    kept_lse = tl.load(kept_lse_ptr + per_row, mask=inside, other=0.0)
    mass = tl.exp(kept_lse - tl.load(lse_ptr + per_row, mask=inside, other=0.0))
    tl.store(kept_mass_ptr + per_row, mass, mask=inside)
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
    residual = output - mass[:, None] * kept
    tl.store(residual_ptr + place, residual.to(residual_ptr.dtype.element_ty), mask=mask)


def merge_residual(call: MergeResidual) -> tuple[torch.Tensor, torch.Tensor]:
    """See `MergeResidual`; the call is checked."""
    output, kept, kept_lse, lse = call.output, call.kept, call.kept_lse, call.lse
    batch, heads, tokens, width = output.shape
    # Where the output is no plain permutation of its dimensions, the residual is contiguous.
    residual = torch.empty_like(output)
    if residual.stride() != output.stride():
        output = output.contiguous()
        residual = torch.empty_like(output)
    mass = torch.empty(batch, heads, tokens, dtype=lse.dtype, device=lse.device)
    columns = next_power_of_2(width)
    rows = max(1, TILE_ELEMENTS // columns)
    if output.numel():
        with torch.cuda.device_of(output):
            launch(
                _residual_kernel,
                (cdiv(tokens, rows), batch * heads),
                output,
                kept,
                kept_lse.contiguous(),
                lse.contiguous(),
                residual,
                mass,
                tokens,
                heads,
                *output.stride()[:3],
                *kept.stride()[:3],
                WIDTH=width,
                ROWS=rows,
                COLUMNS=columns,
                num_warps=WARPS,
            )
    return residual, mass

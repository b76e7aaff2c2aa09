"""Definition of `attention_residual`, a few heads at a time."""

from __future__ import annotations

import torch

from chipsparse.kernels.attention_residual import AttentionResidual, Residual
from chipsparse.kernels.checks import TRANSIENT_BYTES, compute_dtype, ranges
from chipsparse.kernels.fp8_quantization import FP8, LARGEST_FP8

TRANSIENT_TENSORS = 3  # parts of the output, the weighed kept part, and their difference
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # of rows of zeros, too


def attention_residual(call: AttentionResidual) -> Residual:
    """Run a checked `AttentionResidual`."""
    output, kept = call.output, call.kept
    mass, scale = None, None
    if call.delta_rule == "merge":
        assert call.kept_lse is not None
        assert call.lse is not None
        mass = torch.exp(call.kept_lse - call.lse)
    if call.fp8:
        scale = torch.empty(output.shape[:3], dtype=torch.float32, device=output.device)
    values = torch.empty_like(output, dtype=FP8 if call.fp8 else None)
    dtype = compute_dtype(output)
    batch, heads, tokens, head_dim = output.shape
    head_bytes = TRANSIENT_TENSORS * dtype.itemsize * batch * tokens * head_dim
    for first, last in ranges(heads, head_bytes, TRANSIENT_BYTES):
        part = slice(first, last)
        residual = kept[:, part].to(dtype)
        if mass is not None:
            residual = mass[:, part].unsqueeze(-1) * residual
        residual = output[:, part].to(dtype) - residual
        if scale is not None:
            scale[:, part] = row_scale(residual)
            residual = residual / scale[:, part].unsqueeze(-1)
            residual = torch.where(residual.isnan(), 0, residual)  # the scale says so
        values[:, part] = residual
    return Residual(values, scale, mass)


def row_scale(rows: torch.Tensor) -> torch.Tensor:
    """Return the scale that makes each row's largest value 448; NaN where one is not finite."""
    scale = (rows.abs().amax(-1) / LARGEST_FP8).clamp_(min=SMALLEST_SCALE)
    return torch.where(scale.isfinite(), scale, torch.nan)

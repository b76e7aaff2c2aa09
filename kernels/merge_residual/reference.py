"""Definition of the merge rule's residual, a few heads at a time."""

from __future__ import annotations

import torch

from chipsparse.kernels.checks import compute_dtype, ranges
from chipsparse.kernels.merge_residual import MergeResidual

# What it may hold at a time of output, weighed kept part, and their difference.
TRANSIENT_BYTES = 256 << 20
TRANSIENT_TENSORS = 3


def merge_residual(call: MergeResidual) -> tuple[torch.Tensor, torch.Tensor]:
    """See `MergeResidual`; the call is checked."""
    output, kept, kept_lse, lse = call.output, call.kept, call.kept_lse, call.lse
    mass = torch.exp(kept_lse - lse)
    residual = torch.empty_like(output)
    dtype = compute_dtype(output)
    batch, heads, tokens, head_dim = output.shape
    head_bytes = TRANSIENT_TENSORS * dtype.itemsize * batch * tokens * head_dim
    for first, last in ranges(heads, head_bytes, TRANSIENT_BYTES):
        part = slice(first, last)
        weighted = mass[:, part].unsqueeze(-1) * kept[:, part].to(dtype)
        residual[:, part] = output[:, part].to(dtype) - weighted
    return residual, mass

"""Definition of the merge rule's residual, a few heads at a time."""

from __future__ import annotations

import torch

from chipsparse.kernels.checks import compute_dtype, ranges

# What it may hold at a time of output, weighed kept part, and their difference.
TRANSIENT_BYTES = 256 << 20
TRANSIENT_TENSORS = 3


def merge_residual(
    output: torch.Tensor, kept: torch.Tensor, kept_lse: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `chipsparse.kernels.merge_residual.merge_residual`."""
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

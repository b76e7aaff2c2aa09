"""What the merge rule keeps of a refresh: the part of the output that dropped columns made."""

from __future__ import annotations

import torch

from chipsparse.kernels.checks import check_dtype, check_floating, check_shape
from chipsparse.kernels.dispatch import Backend, Choice, choose, imported, runs_anywhere
from chipsparse.kernels.merge_residual import reference
from chipsparse.kernels.triton_support import why_not_triton, why_not_unasked

OP = "merge_residual"


def _why_not(output: torch.Tensor, kept: torch.Tensor) -> str | None:
    if (reason := why_not_triton(output)) is not None:
        return reason
    if output.dtype == torch.float64:
        return "computes in float32, got torch.float64"
    if output.stride(-1) != 1 or kept.stride(-1) != 1:
        return "the head dimension of output or kept is not contiguous"
    return None


BACKENDS = (
    Backend(
        "triton",
        imported("chipsparse.kernels.merge_residual.triton_kernel", "merge_residual"),
        _why_not,
        why_not_unasked,
    ),
    Backend("reference", reference.merge_residual, runs_anywhere),
)


def select(output: torch.Tensor, kept: torch.Tensor, *, force: str | None = None) -> Choice:
    """The backend that `merge_residual` would use for these tensors."""
    return choose(OP, BACKENDS, output, kept, force=force)


def merge_residual(
    output: torch.Tensor,
    kept: torch.Tensor,
    kept_lse: torch.Tensor,
    lse: torch.Tensor,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``o - w A`` with ``w = exp(kept_lse - lse)``, the softmax mass of the kept columns.

    See `chipsparse.kernels.column_sparse_attention.column_sparse_attention` for the rule that reads
    both. Not for compiled code: the sessions call it, behind their own ops.

    Args:
        output: o, attention over all columns, ``[B, H, N, D]`` of any floating dtype and strides.
        kept: A, attention over the kept columns alone, likewise.
        kept_lse: its log-sum-exp, ``[B, H, N]`` float32 (float64 for float64 inputs); -inf where
            nothing is kept.
        lse: that of all columns, likewise.
        backend: forces one (``triton``, ``reference``); None takes the first that can run.

    Returns:
        The residual, in dtype and strides of output, and w, contiguous, in dtype of lse.

    Raises:
        ValueError: shapes or dtypes do not fit, or the forced backend cannot run.
    """
    check_floating(OP, output=output, kept=kept)
    check_shape(OP, "kept", kept, tuple(output.shape))
    check_dtype(OP, "kept", kept, output.dtype)
    for name, constants in (("kept_lse", kept_lse), ("lse", lse)):
        check_shape(OP, name, constants, tuple(output.shape[:3]))
        check_floating(OP, **{name: constants})
    choice = select(output, kept, force=backend)
    residual: tuple[torch.Tensor, torch.Tensor] = choice.backend.launch(output, kept, kept_lse, lse)
    return residual

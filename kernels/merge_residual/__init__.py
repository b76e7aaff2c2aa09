"""What the merge rule keeps of a refresh: the part of the output that dropped columns made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chipsparse.kernels.checks import check_dtype, check_floating, check_shape
from chipsparse.kernels.dispatch import Backend, Call, Operation, imported
from chipsparse.kernels.triton_support import not_auto_reason, triton_unsupported_reason

OP = "merge_residual"


@dataclass(slots=True, eq=False)
class MergeResidual(Call[tuple[torch.Tensor, torch.Tensor]]):
    """``o - w A`` with ``w = exp(kept_lse - lse)``, the softmax mass of the kept columns.

    See `chipsparse.kernels.column_sparse_attention.ColumnSparseAttention` for the rule that reads
    both.

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

    output: torch.Tensor
    kept: torch.Tensor
    kept_lse: torch.Tensor
    lse: torch.Tensor

    def facts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and the part of it that was kept."""
        return self.output, self.kept

    def check(self) -> None:
        """Raises ``ValueError`` where shapes or dtypes do not fit."""
        check_floating(OP, output=self.output, kept=self.kept)
        check_shape(OP, "kept", self.kept, tuple(self.output.shape))
        check_dtype(OP, "kept", self.kept, self.output.dtype)
        for name, tensor in (("kept_lse", self.kept_lse), ("lse", self.lse)):
            check_shape(OP, name, tensor, tuple(self.output.shape[:3]))
            check_floating(OP, **{name: tensor})


def _triton_unsupported_reason(output: torch.Tensor, kept: torch.Tensor) -> str | None:
    if (reason := triton_unsupported_reason(output)) is not None:
        return reason
    if output.dtype == torch.float64:
        return "computes in float32, got torch.float64"
    if output.stride(-1) != 1 or kept.stride(-1) != 1:
        return "the head dimension of output or kept is not contiguous"
    return None


merge_residual = Operation(
    OP,
    MergeResidual,
    Backend(
        "triton",
        imported(f"{__name__}.triton_kernel", OP),
        _triton_unsupported_reason,
        not_auto_reason,
    ),
    Backend("reference", imported(f"{__name__}.reference", OP)),
)

"""The residual of a refresh: the part of the output that dropped columns made."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal, NamedTuple

import torch

from chipsparse.kernels.checks import check_floating, check_shape
from chipsparse.kernels.dispatch import Call, Operation, triton_or_reference
from chipsparse.kernels.triton_support import float64_reason

OP = "attention_residual"


class Residual(NamedTuple):
    """The term that `ColumnSparseAttention` adds to the kept columns.

    Attributes:
        values: ``[B, H, N, D]``, in strides of the output; in its dtype, or e4m3.
        scale: (e4m3) of each row, float32 ``[B, H, N]``, contiguous: the residual of row i is
            ``scale[i] values[i]``.
        kept_mass: (merge) w, ``[B, H, N]``, contiguous, in dtype of lse.
    """

    values: torch.Tensor
    scale: torch.Tensor | None
    kept_mass: torch.Tensor | None


@dataclass(slots=True, eq=False)
class AttentionResidual(Call[Residual]):
    """The residual of a delta rule: ``o - w A`` (merge) or ``o - A`` (difference).

    With ``w = exp(kept_lse - lse)``, the softmax mass of the kept columns. See
    `chipsparse.kernels.column_sparse_attention.ColumnSparseAttention` for the rules that read it.

    In e4m3 the largest value of a row becomes 448, so that what is rounded is off by a sixteenth of
    itself at most, or by 2^-18 of the row's largest value where that is more. A row with NaN or
    an infinity comes back as NaN.

    Args:
        output: o, attention over all columns, ``[B, H, N, D]`` of any floating dtype and strides.
        kept: A, attention over the kept columns alone, likewise.
        kept_lse: (merge) its log-sum-exp, ``[B, H, N]`` float32 (float64 for float64 inputs); -inf
            where nothing is kept.
        lse: (merge) that of all columns, likewise.
        delta_rule: the rule that the residual is for.
        fp8: True rounds it to e4m3, with a scale for each row.
    """

    output: torch.Tensor
    kept: torch.Tensor
    kept_lse: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    _: KW_ONLY
    delta_rule: Literal["merge", "difference"] = "merge"
    fp8: bool = False

    def check(self) -> None:
        """Raises ``ValueError`` where shapes, dtypes or the rule do not fit."""
        check_floating(output=self.output, kept=self.kept)
        check_shape("kept", self.kept, tuple(self.output.shape), self.output.dtype)
        if self.delta_rule not in ("merge", "difference"):
            raise ValueError(f"delta_rule must be merge or difference, got {self.delta_rule!r}")
        for name in ("kept_lse", "lse") if self.delta_rule == "merge" else ():
            tensor = getattr(self, name)
            if tensor is None:
                raise ValueError(f"delta_rule 'merge' needs kept_lse, lse; {name} is None")
            check_shape(name, tensor, tuple(self.output.shape[:3]))
            check_floating(**{name: tensor})


def _strides_reason(output: torch.Tensor, kept: torch.Tensor) -> str | None:
    if output.stride(-1) != 1 or kept.stride(-1) != 1:
        return "the head dimension of output or kept is not contiguous"
    return None


attention_residual = Operation(
    OP,
    AttentionResidual,
    lambda call: (call.output, call.kept),
    *triton_or_reference(__name__, OP, float64_reason, _strides_reason),
)

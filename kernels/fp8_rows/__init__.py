"""Inputs of linear layers in FP8 (e4m3), rounded with a scale for each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from chipsparse.kernels.checks import FLOATING
from chipsparse.kernels.dispatch import Call, Operation, triton_or_reference
from chipsparse.kernels.triton_support import (
    HALF_PRECISION,
    no_fp8_reason,
    triton_unsupported_reason,
)

OP = "fp8_rows"


class Fp8Rows(NamedTuple):
    """Rows in e4m3: ``data * scale`` is what was rounded.

    Shapes: data e4m3 ``[M, K]``, contiguous; scale float32 ``[M, 1]``.
    """

    data: torch.Tensor
    scale: torch.Tensor


@dataclass(slots=True, eq=False)
class Fp8RowRounding(Call[Fp8Rows]):
    """Rounds each row such that its largest number becomes 448, the largest of e4m3.

    A row whose numbers are all below 1e-30 becomes zeros, with a scale of 1; one with a number that
    is not finite becomes NaN.

    Args:
        rows: floating point ``[M, K]`` with contiguous rows.
        backend: forces one (``triton``, ``reference``); None takes the first that can run.

    Raises:
        ValueError: shape or dtype does not fit, or the forced backend cannot run.
    """

    rows: torch.Tensor

    def facts(self) -> tuple[Any, ...]:
        """The rows."""
        return (self.rows,)

    def check(self) -> None:
        """Raises ``ValueError`` where shape or dtype does not fit."""
        rows = self.rows
        if rows.dtype not in FLOATING or rows.dim() != 2 or not rows.shape[1]:
            raise ValueError(
                f"{OP}: rows must be floating point [M, K], K of 1 or more, got {rows.dtype} "
                f"{list(rows.shape)}"
            )
        if rows.shape[1] > 1 and rows.stride(1) != 1:
            raise ValueError(
                f"{OP}: rows must be contiguous, got [M, K] with strides {list(rows.stride())}"
            )


def _triton_unsupported_reason(rows: torch.Tensor) -> str | None:
    if (reason := triton_unsupported_reason(rows)) is not None:
        return reason
    if rows.dtype not in HALF_PRECISION:
        return f"needs fp16 or bf16, got {rows.dtype}"
    return no_fp8_reason(rows.device)


fp8_rows = Operation(
    OP,
    Fp8RowRounding,
    *triton_or_reference(__name__, OP, _triton_unsupported_reason),
)

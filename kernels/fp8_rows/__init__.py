"""Rows of numbers in FP8 (e4m3): inputs of linear layers, and activations of an MLP."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch

from chipsparse.kernels.checks import check_floating
from chipsparse.kernels.dispatch import Call, Operation, triton_or_reference
from chipsparse.kernels.fp8_quantization import FP8
from chipsparse.kernels.token_layout import empty_token_contiguous
from chipsparse.kernels.triton_support import float64_reason

OP = "fp8_rows"
# The scale of a row of zeros; numbers that are stored by it later may become 1.75.
SCALE_OF_ZEROS = 2.0**-8
SMALLEST_SCALE = 2.0**-100  # its inverse is a number, too


class Fp8Rows(NamedTuple):
    """Rows in e4m3: ``data * scale`` is what was rounded.

    Shapes: data e4m3, as the rows were; scale float32, contiguous, with 1 in place of a row.
    """

    data: torch.Tensor
    scale: torch.Tensor


@dataclass(slots=True, eq=False)
class Fp8RowRounding(Call[Fp8Rows]):
    """Rounds each row by a scale of its own: its largest number becomes 448 / headroom.

    448 is the largest number of e4m3. A row with a number that is not finite becomes zeros with a
    scale of NaN.

    Args:
        rows: floating point ``[M, K]`` with contiguous rows; where they are turned ``[B, M, K]`` of
            any strides.
        headroom: the factor by which a number that is stored later by the scale of a row may
            exceed the row's largest before it saturates. Each doubling costs one of the fifteen
            exponents at the small end.
        turned: True makes ``data[b, :, k]`` contiguous, as `token_layout` says, instead of rows.
    """

    rows: torch.Tensor
    _: KW_ONLY
    headroom: float = 1.0
    turned: bool = False

    def results(self) -> Fp8Rows:
        """Uninitialized results."""
        rows = self.rows
        if self.turned:
            data = empty_token_contiguous(rows, *rows.shape, dtype=FP8)
        else:
            data = rows.new_empty(rows.shape, dtype=FP8)
        return Fp8Rows(data, rows.new_empty(*rows.shape[:-1], 1, dtype=torch.float32))

    def check(self) -> None:
        """Raises ``ValueError`` where shape, dtype or headroom does not fit."""
        rows = self.rows
        shape = "[B, M, K]" if self.turned else "[M, K]"
        check_floating(rows=rows)
        if rows.dim() != (3 if self.turned else 2) or not rows.shape[-1]:
            raise ValueError(f"rows must be {shape}, K of 1 or more, got {list(rows.shape)}")
        if not self.turned and rows.shape[1] > 1 and rows.stride(1) != 1:
            raise ValueError(
                f"rows must be contiguous, got [M, K] with strides {list(rows.stride())}",
            )
        if not 1 <= self.headroom <= 448:
            raise ValueError(f"headroom must be within [1, 448], got {self.headroom}")


fp8_rows = Operation(
    OP,
    Fp8RowRounding,
    lambda call: (call.rows,),
    *triton_or_reference(__name__, OP, float64_reason),
)

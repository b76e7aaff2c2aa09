"""The columns that each query block keeps: static ones, and those with the highest sums."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from chipsparse.kernels.checks import check_floating, check_shape
from chipsparse.kernels.dispatch import Call, Operation, triton_or_reference
from chipsparse.kernels.triton_support import float64_reason

OP = "column_selection"


@dataclass(slots=True, eq=False)
class ColumnSelection(Call[torch.Tensor]):
    """Chooses the key columns of each query block, as packed bits.

    Static columns are always kept and count within ``keep_count``; the highest column sums fill
    what they leave.

    The count is exact, +inf is the largest sum, and a row with a NaN keeps every column, since its
    sums say nothing. The reference keeps the very highest sums, and the lower column of equal ones.
    The Triton kernel does the same for rows of up to 4096 columns. In longer rows at most 1 of 50
    kept columns may stand for one with a higher sum, and which of equal sums are kept is always the
    same, but not by column. Of fp32 sums it compares the upper 16 bits: nearly equal sums count as
    equal ones.

    Args:
        column_sums: ``[B, H, G, M]`` fp16, bf16 or fp32 scores; they may be negative.
        keep_count: columns kept by score, static ones included; more than M means M.
        static_columns: bool ``[M]``, or None. Where there are more than ``keep_count`` of them, all
            of them are kept and none by score.

    Returns:
        uint8 ``[B, H, G, ceil(M / 8)]``, packed as by `mask_packing.pack_mask`.
    """

    column_sums: torch.Tensor
    _: KW_ONLY
    keep_count: int
    static_columns: torch.Tensor | None = None

    def check(self) -> None:
        """Raises ``ValueError`` for a negative count, and where shapes or dtypes do not fit."""
        sums = self.column_sums
        check_floating(column_sums=sums)
        if sums.dim() != 4:
            raise ValueError(f"column_sums must be [B, H, G, M], got {list(sums.shape)}")
        if self.keep_count < 0:
            raise ValueError(f"keep_count must not be negative, got {self.keep_count}")
        if self.static_columns is not None:
            check_shape("static_columns", self.static_columns, sums.shape[-1:], torch.bool)


column_selection = Operation(
    OP,
    ColumnSelection,
    lambda call: (call.column_sums,),
    *triton_or_reference(__name__, OP, float64_reason),
)

"""The columns that each query block keeps: the highest sums, static columns and random ones."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

import torch

from chipsparse.kernels.checks import check_dtype, check_floating
from chipsparse.kernels.dispatch import Call, Operation, triton_or_reference
from chipsparse.kernels.triton_support import float64_reason

OP = "column_selection"


@dataclass(slots=True, eq=False)
class ColumnSelection(Call[torch.Tensor]):
    """Chooses the key columns of each query block, as packed bits.

    Static columns are always kept and count within ``keep_count``; the highest column sums fill
    what they leave. Then one column that is not kept yet is drawn from each of ``random_count``
    strata, ranges of consecutive columns of about equal width, by a hash of the seed, the position
    of the row and the stratum: the same on every device, and without the global random state. A
    stratum whose columns are all kept gives none. With ``keep_count=0`` only the random columns are
    kept (the control of a benchmark).

    The count is exact, +inf is the largest sum, and a row with a NaN keeps every column, since its
    sums say nothing. The reference keeps the very highest sums, and the lower column of equal ones.
    The Triton kernel does the same for rows of up to 4096 columns. In longer rows at most 1 of 50
    kept columns may stand for one with a higher sum, and which of equal sums are kept is always the
    same, but not by column. Of fp32 sums it compares the upper 16 bits: nearly equal sums count as
    equal ones.

    Args:
        column_sums: ``[B, H, G, M]`` fp16, bf16 or fp32 scores; they may be negative.
        keep_count: columns kept by score, static ones included; more than M means M.
        static_columns: bool, broadcastable to ``[B, H, G, M]``, or None. Where a row has more than
            ``keep_count`` of them, all of them are kept and none by score.
        random_count: number of strata, at most M: that many further columns, or fewer where whole
            strata are kept.
        seed: seed of the random columns, any integer; its lower 64 bits count.
        first_head: position of the first head for that hash, where these are not all of a layer's.
        first_block: the same of the first query block.

    Returns:
        uint8 ``[B, H, G, ceil(M / 8)]``, packed as by `mask_packing.pack_mask`.
    """

    column_sums: torch.Tensor
    _: KW_ONLY
    keep_count: int
    static_columns: torch.Tensor | None = None
    random_count: int = 0
    seed: int = field(default=0, compare=False)
    first_head: int = 0
    first_block: int = 0

    def check(self) -> None:
        """Raises ``ValueError`` for a negative count, and where shapes or dtypes do not fit."""
        sums = self.column_sums
        check_floating(column_sums=sums)
        if sums.dim() != 4:
            raise ValueError(f"column_sums must be [B, H, G, M], got {list(sums.shape)}")
        if self.keep_count < 0 or self.random_count < 0:
            raise ValueError(
                f"counts must not be negative, got keep_count={self.keep_count}, "
                f"random_count={self.random_count}"
            )
        if self.static_columns is not None:
            check_dtype("static_columns", self.static_columns, torch.bool)
            try:
                self.every_static_column()
            except RuntimeError:
                raise ValueError(
                    f"static_columns {list(self.static_columns.shape)} do not broadcast to "
                    f"{list(sums.shape)}"
                ) from None

    def every_static_column(self) -> torch.Tensor | None:
        """The static columns as a view ``[B, H, G, M]``, or None."""
        static = self.static_columns
        return None if static is None else static.expand_as(self.column_sums)


column_selection = Operation(
    OP,
    ColumnSelection,
    lambda call: (call.column_sums,),
    *triton_or_reference(__name__, OP, float64_reason),
)

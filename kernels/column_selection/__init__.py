"""The columns that each query group keeps: the highest sums, static columns and random ones."""

from __future__ import annotations

import torch

from chipsparse.kernels import ops
from chipsparse.kernels.checks import check_dtype, check_floating
from chipsparse.kernels.column_selection import reference
from chipsparse.kernels.dispatch import Backend, Choice, choose, imported, runs_anywhere
from chipsparse.kernels.triton_support import why_not_triton, why_not_unasked


def why_not_keys(column_sums: torch.Tensor) -> str | None:
    """What the Triton kernel needs besides `why_not_triton`."""
    if column_sums.dtype == torch.float64:
        return "needs fp16, bf16 or fp32, got torch.float64"
    return why_not_triton(column_sums)


BACKENDS = (
    Backend(
        "triton",
        imported("chipsparse.kernels.column_selection.triton_kernel", "column_selection"),
        why_not_keys,
        why_not_unasked,
    ),
    Backend("reference", reference.column_selection, runs_anywhere),
)


def select(column_sums: torch.Tensor, *, force: str | None = None) -> Choice:
    """The backend that `column_selection` would use for this tensor."""
    return choose("column_selection", BACKENDS, column_sums, force=force)


def column_selection(
    column_sums: torch.Tensor,
    *,
    keep_count: int,
    static_columns: torch.Tensor | None = None,
    random_count: int = 0,
    seed: int = 0,
    backend: str | None = None,
) -> torch.Tensor:
    """Chooses the key columns of each query group, as packed bits.

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
        backend: forces one (``triton``, ``reference``); None takes the first that can run.

    Returns:
        uint8 ``[B, H, G, ceil(M / 8)]``, packed as by `mask_packing.pack_mask`.

    Raises:
        ValueError: a negative count, shapes or dtypes that do not fit, or the forced backend
            cannot run.
    """
    if torch.compiler.is_dynamo_compiling():
        seed = (seed + 2**63) % 2**64 - 2**63  # the bits that count, as an op takes them
        return ops.column_selection(
            column_sums, static_columns, keep_count, random_count, seed, backend
        )
    op = "column_selection"
    check_floating(op, column_sums=column_sums)
    if column_sums.dim() != 4:
        raise ValueError(f"{op}: column_sums must be [B, H, G, M], got {list(column_sums.shape)}")
    if keep_count < 0 or random_count < 0:
        raise ValueError(
            f"{op}: counts must not be negative, got keep_count={keep_count}, "
            f"random_count={random_count}"
        )
    if static_columns is not None:
        check_dtype(op, "static_columns", static_columns, torch.bool)
        try:
            static_columns = static_columns.expand_as(column_sums)
        except RuntimeError:
            raise ValueError(
                f"{op}: static_columns {list(static_columns.shape)} do not broadcast to "
                f"{list(column_sums.shape)}"
            ) from None
    choice = select(column_sums, force=backend)
    return choice.backend.launch(
        column_sums,
        keep_count=keep_count,
        static_columns=static_columns,
        random_count=random_count,
        seed=seed,
    )

"""Full attention that also sums the attention weight of every key column over each query group."""

from __future__ import annotations

import torch

from chipsparse.kernels.checks import (
    DEFAULT_TRANSIENT_BYTES,
    check_attention_inputs,
    check_group_rows,
    check_shape,
    compute_dtype,
)
from chipsparse.kernels.dense_attention_column_sums import reference
from chipsparse.kernels.dispatch import Backend, Choice, choose, runs_anywhere

BACKENDS = (Backend("reference", reference.dense_attention_column_sums, runs_anywhere),)


def select(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, force: str | None = None
) -> Choice:
    """The backend that `dense_attention_column_sums` would use for these tensors."""
    return choose("dense_attention_column_sums", BACKENDS, query, key, value, force=force)


def dense_attention_column_sums(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lse_previous: torch.Tensor,
    *,
    group_rows: int = 128,
    scale: float | None = None,
    max_transient_bytes: int = DEFAULT_TRANSIENT_BYTES,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax attention and, in the same pass, the attention weight that each group gives a column.

    The weights are normalized with softmax constants that are already there, those of the previous
    dense step, so that one pass is enough (Chipmunk, "Deep Dive on GPU Kernel Optimizations and
    Systems", part III): ``column_sums[b, h, g, j] = Σ_{i in group g} exp(s_ij - lse_previous_i)``.
    The output and its log-sum-exp never depend on ``lse_previous``.

    Args:
        query: ``[B, H, N, D]`` fp16, bf16, fp32 or fp64, of any strides.
        key: ``[B, H, M, D]``, dtype and device of query.
        value: ``[B, H, M, D]``, likewise.
        lse_previous: ``[B, H, N]`` natural log-sum-exp per row. Where it lies more than 80 below
            the row's log-sum-exp now, the row counts as if it lay 80 below, so that sums stay
            finite; NaN gives NaN sums.
        group_rows: R, query rows per group; the last of the G = ceil(N / R) groups may be ragged.
        scale: factor of the scores; None for ``D ** -0.5``.
        max_transient_bytes: bound of the scores and weights held at a time, besides a copy of one
            head's keys and values where they are not fp32; one group of one head is the least.
        backend: forces one (``reference``); None takes the first that can run.

    Returns:
        The output ``[B, H, N, D]`` in query's dtype, the log-sum-exp ``[B, H, N]`` and the column
        sums ``[B, H, G, M]``, both float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the forced backend cannot run.
    """
    op = "dense_attention_column_sums"
    check_attention_inputs(op, query, key, value)
    check_group_rows(op, group_rows)
    check_shape(op, "lse_previous", lse_previous, tuple(query.shape[:3]))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    choice = select(query, key, value, force=backend)
    return choice.backend.launch(
        query,
        key,
        value,
        lse_previous.to(compute_dtype(query)),
        group_rows=group_rows,
        scale=scale,
        max_transient_bytes=max_transient_bytes,
    )

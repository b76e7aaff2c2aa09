"""Full attention that also sums the attention weight of every key column over each query group."""

from __future__ import annotations

import torch

from chipsparse.kernels import ops
from chipsparse.kernels.checks import (
    DEFAULT_TRANSIENT_BYTES,
    check_attention_inputs,
    check_group_rows,
    check_shape,
    compute_dtype,
)
from chipsparse.kernels.dense_attention_column_sums import reference
from chipsparse.kernels.dispatch import Backend, Choice, choose, imported, runs_anywhere
from chipsparse.kernels.triton_support import (
    why_not_attention,
    why_not_gluon_sm90,
    why_not_unasked,
)

BACKENDS = (
    Backend(
        "gluon",
        imported(
            "chipsparse.kernels.dense_attention_column_sums.gluon_sm90",
            "dense_attention_column_sums",
        ),
        why_not_gluon_sm90,
    ),
    Backend(
        "triton",
        imported(
            "chipsparse.kernels.dense_attention_column_sums.triton_kernel",
            "dense_attention_column_sums",
        ),
        why_not_attention,
        why_not_unasked,
    ),
    Backend("reference", reference.dense_attention_column_sums, runs_anywhere),
)


def select(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group_rows: int = 128,
    force: str | None = None,
) -> Choice:
    """The backend that `dense_attention_column_sums` would use for these tensors."""
    return choose(
        "dense_attention_column_sums", BACKENDS, query, key, value, group_rows, force=force
    )


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
            the row's log-sum-exp now, weights are limited, and only finite sums are promised: a
            kernel limits them by the largest score that it has seen, tile by tile. NaN gives NaN
            sums in its group alone.
        group_rows: R, query rows per group; the last of the G = ceil(N / R) groups may be ragged.
        scale: factor of the scores; None for ``D ** -0.5``.
        max_transient_bytes: bound of what is held at a time; one group of one head is the least.
            ``reference`` holds scores and weights, besides a copy of one head's keys and values
            where they are not fp32; ``triton`` holds fp32 sums per block of rows where a group has
            more than 128; ``gluon`` is not bound by it and then holds the sums of every 64 or 128
            rows.
        backend: forces one (``gluon``, ``triton``, ``reference``); None takes the first that can
            run.

    Returns:
        The output ``[B, H, N, D]`` in query's dtype, the log-sum-exp ``[B, H, N]`` in float32
        (float64 for float64 inputs) and the column sums ``[B, H, G, M]`` in query's dtype, but in
        bf16 for fp16 inputs, whose range is too small: columns are only ranked by them.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the forced backend cannot run.
    """
    if torch.compiler.is_dynamo_compiling():
        return ops.dense_attention_column_sums(
            query, key, value, lse_previous, group_rows, scale, max_transient_bytes, backend
        )
    op = "dense_attention_column_sums"
    check_attention_inputs(op, query, key, value)
    check_group_rows(op, group_rows)
    check_shape(op, "lse_previous", lse_previous, tuple(query.shape[:3]))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    choice = select(query, key, value, group_rows=group_rows, force=backend)
    return choice.backend.launch(
        query,
        key,
        value,
        lse_previous.to(compute_dtype(query)),
        group_rows=group_rows,
        scale=scale,
        max_transient_bytes=max_transient_bytes,
    )

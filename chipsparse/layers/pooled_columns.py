"""What the columns that a query block drops stand for, without any cache: their means.

Each run of about `POOLED` consecutive columns, compact in tile order, has one mean key and one mean
value, shared by all query blocks. Dense attention over these means has a log-sum-exp, and the
``merge`` rule joins it with the kept columns as it does with a cached residual of which it knows
the mass. A kept column counts in its mean, too: that takes no lists of its own, and costs 1 % of
the error (benchmarks/notes/few_steps.md).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from chipsparse.kernels.column_sparse_attention import ColumnSparseAttention
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.layers.attention_inputs import AttentionInputs

POOLED = 64  # columns of a mean, at most


def with_means(
    call: ColumnSparseAttention, kernels: FastestKernel | None = None
) -> ColumnSparseAttention:
    """Sparse attention without a rule, joined with attention over the means of its columns.

    As with a residual that has all of its mass: the merge rule then joins the two softmaxes.
    """
    inputs = AttentionInputs(call.query, call.key, call.value, call.scale, call.backend, kernels)
    output, lse = pooled_attention(inputs)
    nothing = torch.zeros_like(lse)
    return replace(call, delta_rule="merge", residual=output, lse_dense=lse, kept_mass=nothing)


def pooled_attention(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the means of all columns, each as heavy as the columns of one in the mean.

    Returns:
        The output ``[B, H, N, D]`` and its log-sum-exp ``[B, H, N]``.
    """
    pooled = replace(inputs, key=means(inputs.key), value=means(inputs.value))
    output, lse = pooled.dense()
    return output, lse + math.log(inputs.key.shape[2] / pooled.key.shape[2])


def means(rows: torch.Tensor) -> torch.Tensor:
    """The means of as few runs of rows ``[B, H, M, D]`` as there can be, equal but for one row."""
    count = -(-rows.shape[2] // POOLED)
    size, longer = divmod(rows.shape[2], count)
    first, rest = rows.split([longer * (size + 1), (count - longer) * size], 2)
    parts = ((first, longer, size + 1), (rest, count - longer, size))
    return torch.cat([part.unflatten(2, (runs, length)).mean(3) for part, runs, length in parts], 2)

"""Self-attention of one layer at one step: what each action computes and records.

The method is Chipmunk's column-sparse attention delta (Silveria, Govande, Fu, "Chipmunk: Deep Dive
on GPU Kernel Optimizations and Systems", part III, 2025); the ``merge`` rule is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chipsparse.cache import AttentionCache
from chipsparse.config import AttentionConfig
from chipsparse.kernels import (
    column_sparse_attention as column_sparse_attention_op,
)
from chipsparse.kernels import (
    dense_attention as dense_attention_op,
)
from chipsparse.kernels import (
    dense_attention_column_sums as dense_attention_column_sums_op,
)
from chipsparse.kernels.column_selection import column_selection
from chipsparse.kernels.column_sparse_attention import column_sparse_attention
from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention_column_sums import dense_attention_column_sums
from chipsparse.kernels.mask_packing import packed_to_indices


@dataclass(frozen=True)
class AttentionBudget:
    """How many columns a refresh keeps for each query group.

    Attributes:
        keep_count: columns kept by score, static ones included.
        random_count: further random columns.
        static_columns: bool ``[G, N]`` of columns that are always kept, or None.
        seed: seed of the random columns.
    """

    keep_count: int
    random_count: int
    static_columns: torch.Tensor | None
    seed: int


def static_columns(
    tokens: int, config: AttentionConfig, *, text_tokens: int, device: torch.device
) -> torch.Tensor | None:
    """Columns kept whatever their score: text tokens (last in the sequence) and the local window.

    Returns:
        bool ``[G, N]``, or None where there are none.
    """
    if config.local_groups is None and text_tokens == 0:
        return None
    column = torch.arange(tokens, device=device)
    group = torch.arange(0, tokens, config.group_rows, device=device)[:, None] // config.group_rows
    static = (column >= tokens - text_tokens).expand(group.shape[0], tokens).clone()
    if config.local_groups is not None:
        static |= (column // config.group_rows - group).abs() <= config.local_groups
    return static


def backend_names(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, backend: str | None
) -> dict[str, str]:
    """The backend that each operation on these tensors runs on."""
    ops = (dense_attention_op, dense_attention_column_sums_op, column_sparse_attention_op)
    return {
        op.__name__.rpartition(".")[2]: op.select(query, key, value, force=backend).backend.name
        for op in ops
    }


def dense_step(
    cache: AttentionCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None,
    backend: str | None,
) -> torch.Tensor:
    """Full attention; records the softmax constants. All tensors are ``[B, H, N, D]``."""
    output, cache.lse = dense_attention(query, key, value, scale=scale, backend=backend)
    return output


def refresh_step(
    cache: AttentionCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    config: AttentionConfig,
    budget: AttentionBudget,
    reselect: bool,
    scale: float | None,
    backend: str | None,
) -> torch.Tensor:
    """Full attention with column sums; chooses the columns and fills the residual cache.

    The column sums are weighed with the softmax constants of the previous dense step
    (``cache.lse``), which must be there.
    """
    assert cache.lse is not None
    if config.delta_rule == "reuse":
        output = dense_step(cache, query, key, value, scale=scale, backend=backend)
        cache.residual = output.clone()
        return output
    output, lse, column_sums = dense_attention_column_sums(
        query, key, value, cache.lse, group_rows=config.group_rows, scale=scale, backend=backend
    )
    cache.lse = lse
    if reselect or cache.columns is None:
        random_only = config.selection == "random"
        cache.columns = column_selection(
            column_sums,
            keep_count=0 if random_only else budget.keep_count,
            random_count=budget.random_count + (budget.keep_count if random_only else 0),
            static_columns=budget.static_columns,
            seed=budget.seed,
            backend=backend,
        )
    indices, counts = packed_to_indices(cache.columns, key.shape[2], backend=backend)
    cache.kept_fraction = counts.float().mean() / key.shape[2]
    if config.delta_rule == "kept_only":
        return output
    kept, kept_lse = column_sparse_attention(
        query,
        key,
        value,
        indices,
        counts,
        group_rows=config.group_rows,
        scale=scale,
        backend=backend,
    )
    if config.delta_rule == "difference":
        cache.residual = output - kept
    else:
        cache.lse_dense = lse
        cache.kept_mass = torch.exp(kept_lse - lse)
        weighted = cache.kept_mass.unsqueeze(-1) * kept.float()
        cache.residual = (output.float() - weighted).to(output.dtype)
    return output


def sparse_step(
    cache: AttentionCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    config: AttentionConfig,
    scale: float | None,
    backend: str | None,
) -> torch.Tensor:
    """Attention over the kept columns only, combined with the residual cache."""
    if config.delta_rule == "reuse":
        assert cache.residual is not None
        return cache.residual.clone()
    assert cache.columns is not None
    indices, counts = packed_to_indices(cache.columns, key.shape[2], backend=backend)
    output, _ = column_sparse_attention(
        query,
        key,
        value,
        indices,
        counts,
        group_rows=config.group_rows,
        scale=scale,
        delta_rule=None if config.delta_rule == "kept_only" else config.delta_rule,
        residual=cache.residual,
        lse_dense=cache.lse_dense,
        kept_mass=cache.kept_mass,
        backend=backend,
    )
    return output

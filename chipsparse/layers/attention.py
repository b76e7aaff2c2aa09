"""Self-attention of one layer at one step: what each action computes and records.

The method is Chipmunk's column-sparse attention delta (Silveria, Govande, Fu, "Chipmunk: Deep Dive
on GPU Kernel Optimizations and Systems", part III, 2025); the ``merge`` rule is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from chipsparse.cache.tensors import AttentionCache
from chipsparse.common.device_number import DeviceNumber
from chipsparse.config import AttentionConfig
from chipsparse.kernels.checks import group_count, ranges
from chipsparse.kernels.column_selection import column_selection
from chipsparse.kernels.column_sparse_attention import (
    ColumnSparseAttention,
    column_sparse_attention,
)
from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.kernels.dense_attention_column_sums import dense_attention_column_sums
from chipsparse.kernels.dense_attention_column_sums.reference import column_sums_dtype
from chipsparse.kernels.dispatch import Choice
from chipsparse.kernels.mask_packing import packed_to_indices
from chipsparse.kernels.merge_residual import merge_residual
from chipsparse.plan import Action

# A layer's lists of columns are kept between steps where they take no more. To make them costs a
# large layer nothing beside its attention; a small one waits for the host to launch it.
LISTS_BYTES = 4 << 20
# Of the entries in a list whose length is not read back: rows of the table stay aligned.
CAPACITY_MULTIPLE = 16

# The operation that computes the result of a step.
MAIN_OPS = {
    Action.DENSE: "dense_attention",
    Action.REFRESH: "dense_attention_column_sums",
    Action.SPARSE: "column_sparse_attention",
}


@dataclass(frozen=True)
class AttentionBudget:
    """How many columns a refresh keeps for each query group.

    Attributes:
        keep_count: columns kept by score, static ones included.
        random_count: further random columns.
        static_columns: bool ``[G or 1, N]`` of columns that are always kept, or None.
        seed: seed of the random columns, below 2**32.
        static_count: the most static columns that a group may have.
        capacity: entries that the lists of columns get; None for as many as the longest needs, for
            which the host waits.
    """

    keep_count: int
    random_count: int
    static_columns: torch.Tensor | None
    seed: int
    static_count: int = 0
    capacity: int | None = None

    @property
    def most_columns(self) -> int:
        """What no list exceeds, unless column sums are NaN: their rows keep every column."""
        return max(self.keep_count, self.static_count) + self.random_count

    def without_waiting(self, tokens: int) -> AttentionBudget:
        """The same with lists for `most_columns` and a little more, so that longer ones show."""
        longer = self.most_columns + 1
        rounded = -(-longer // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
        return replace(self, capacity=min(tokens, rounded))


def static_columns(
    tokens: int,
    config: AttentionConfig,
    *,
    text_tokens: int,
    text_first: bool = False,
    always: torch.Tensor | None = None,
    device: torch.device,
) -> torch.Tensor | None:
    """Columns kept whatever their score: text tokens, the local window, and those of the user.

    Args:
        tokens: length of the sequence, text included.
        config: has the local window.
        text_tokens: text tokens of the sequence.
        text_first: whether they are the first or the last ones.
        always: bool ``[N]``, those of the user, or None.
        device: of the result.

    Returns:
        bool ``[G, N]``, or ``[1, N]`` where all groups have the same, or None where there are none.
    """
    if config.local_blocks is None and text_tokens == 0 and always is None:
        return None
    column = torch.arange(tokens, device=device)
    text = column < text_tokens if text_first else column >= tokens - text_tokens
    if always is not None:
        text = text | always
    if config.local_blocks is None:
        return text[None]
    group = (
        torch.arange(0, tokens, config.block_size_q, device=device)[:, None] // config.block_size_q
    )
    return text | ((column // config.block_size_q - group).abs() <= config.local_blocks)


def static_count(tokens: int, config: AttentionConfig, *, text_tokens: int, always: int = 0) -> int:
    """Upper bound of the `static_columns` of a group, known without asking a device."""
    window = 0 if config.local_blocks is None else 2 * config.local_blocks + 1
    return min(tokens, text_tokens + always + window * config.block_size_q)


def backend_choices(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group_rows: int,
    backend: str | None,
) -> dict[str, Choice]:
    """The backend that each operation on these tensors runs on, and why not on others."""
    # What decides about column sums and packed bits is their dtype and device alone.
    sums = query.new_empty(0, dtype=column_sums_dtype(query))
    packed = query.new_empty(0, dtype=torch.uint8)
    in_groups = (query, key, value, group_rows)
    return {
        "dense_attention": dense_attention.choose(query, key, value, backend=backend),
        "dense_attention_column_sums": dense_attention_column_sums.choose(
            *in_groups, backend=backend
        ),
        "column_selection": column_selection.choose(sums, backend=backend),
        "packed_to_indices": packed_to_indices.choose(packed, backend=backend),
        "column_sparse_attention": column_sparse_attention.choose(*in_groups, backend=backend),
    }


def dense_step(
    cache: AttentionCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None,
    backend: str | None,
    kernels: FastestKernel | None = None,
) -> torch.Tensor:
    """Full attention; records the softmax constants. All tensors are ``[B, H, N, D]``."""
    output, cache.lse = dense_attention(
        query, key, value, scale=scale, kernels=kernels, backend=backend
    )
    return output


def refresh_step(
    cache: AttentionCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    config: AttentionConfig,
    budget: AttentionBudget,
    scale: float | None,
    backend: str | None,
    step: int = 0,
) -> torch.Tensor:
    """Full attention; chooses the columns by their sums and fills the residual cache.

    The column sums are weighed with the softmax constants of the previous dense step
    (``cache.lse``), which must be there. Where the budget has no capacity, the host waits once for
    the length of the longest list (``cache.capacity``); where it has one, ``cache.longest`` tells
    later whether that was enough.

    With a forecast, a refresh after the first also computes what a sparse step would have given at
    this ``step``, with the columns and the residual of the refresh before; what that lacks is the
    drift.
    """
    expected = None
    if config.forecast > 0 and cache.refreshed_at is not None:
        expected = _without_forecast(
            cache, query, key, value, config=config, scale=scale, backend=backend
        )
    output = _choose_columns(
        cache, query, key, value, config=config, budget=budget, scale=scale, backend=backend
    )
    cache.capacity = budget.capacity
    counts = record_residual(
        cache, output, query, key, value, config=config, scale=scale, backend=backend
    )
    roomy = budget.capacity is None or budget.capacity >= key.shape[2]
    cache.longest = None if roomy else DeviceNumber(counts.max())
    if config.forecast > 0:
        if expected is not None and cache.refreshed_at is not None:
            cache.drift = torch.sub(output, expected, out=expected)
            cache.interval = step - cache.refreshed_at
        cache.refreshed_at = step
    return output


def record_residual(
    cache: AttentionCache,
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    config: AttentionConfig,
    scale: float | None,
    backend: str | None,
) -> torch.Tensor:
    """Fills the residual cache of the delta rule from an exact output and the columns chosen.

    ``cache.lse`` and ``cache.columns`` must be those of the output ``[B, H, N, D]``. Returns how
    many columns each query group has in its list, int32 ``[B, H, G]``.
    """
    assert cache.columns is not None
    assert cache.lse is not None
    indices, counts = packed_to_indices(
        cache.columns, key.shape[2], capacity=cache.capacity, backend=backend
    )
    cache.capacity = indices.shape[-1]
    cache.lists = (indices, counts) if indices.nbytes <= LISTS_BYTES else None
    cache.kept_fraction = counts.float().mean() / key.shape[2]
    kept, kept_lse = column_sparse_attention(
        query,
        key,
        value,
        indices,
        counts,
        group_rows=config.block_size_q,
        scale=scale,
        backend=backend,
    )
    if config.delta_rule == "difference":
        cache.residual = output - kept
    else:
        cache.lse_dense = cache.lse
        cache.residual, cache.kept_mass = merge_residual(
            output, kept, kept_lse, cache.lse, backend=backend
        )
    return counts


def _choose_columns(
    cache: AttentionCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    config: AttentionConfig,
    budget: AttentionBudget,
    scale: float | None,
    backend: str | None,
) -> torch.Tensor:
    """Full attention with column sums; records the softmax constants and the columns chosen.

    Goes over as many heads at a time as ``config.column_sums_bytes`` allows for their column sums.
    """
    assert cache.lse is not None
    batch, heads, tokens, _ = query.shape
    groups, columns = group_count(tokens, config.block_size_q), key.shape[2]
    head_bytes = batch * groups * columns * column_sums_dtype(query).itemsize
    chunks = list(ranges(heads, head_bytes, config.column_sums_bytes))

    def attend(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert cache.lse is not None
        output, lse, column_sums = dense_attention_column_sums(
            query[:, first:last],
            key[:, first:last],
            value[:, first:last],
            cache.lse[:, first:last],
            group_rows=config.block_size_q,
            scale=scale,
            backend=backend,
        )
        chosen = column_selection(
            column_sums,
            keep_count=budget.keep_count,
            random_count=budget.random_count,
            static_columns=budget.static_columns,
            # The random columns see the number of a head within its chunk alone.
            seed=budget.seed + (first << 32),
            backend=backend,
        )
        return output, lse, chosen

    if len(chunks) == 1:
        output, cache.lse, cache.columns = attend(0, heads)
        return output
    output, lse = torch.empty_like(query), torch.empty_like(cache.lse)
    packed = query.new_empty((batch, heads, groups, -(-columns // 8)), dtype=torch.uint8)
    for first, last in chunks:
        part = slice(first, last)
        output[:, part], lse[:, part], packed[:, part] = attend(first, last)
    cache.lse, cache.columns = lse, packed
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
    choices: Mapping[str, Choice] | None = None,
    step: int = 0,
) -> torch.Tensor:
    """Attention over the kept columns only, combined with the residual cache.

    The host does not wait for a GPU: the length of the lists is known from the refresh. With the
    `backend_choices` for tensors of this kind it does not look at them again either.

    With a forecast, the error is taken to grow with the steps since the refresh as it did before
    it, times ``config.forecast``, and that is added.
    """
    output = _without_forecast(
        cache,
        query,
        key,
        value,
        config=config,
        scale=scale,
        backend=backend,
        choices=choices,
    )
    if cache.drift is not None and cache.refreshed_at is not None:
        grown = config.forecast * (step - cache.refreshed_at) / cache.interval
        output.add_(cache.drift, alpha=grown)
    return output


def _without_forecast(
    cache: AttentionCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    config: AttentionConfig,
    scale: float | None,
    backend: str | None,
    choices: Mapping[str, Choice] | None = None,
) -> torch.Tensor:
    if cache.lists is None:
        assert cache.columns is not None
        assert cache.capacity is not None
        indices, counts = packed_to_indices(
            cache.columns, key.shape[2], capacity=cache.capacity, backend=backend
        )
    else:
        indices, counts = cache.lists
    call = ColumnSparseAttention(
        query,
        key,
        value,
        indices,
        counts,
        group_rows=config.block_size_q,
        scale=scale,
        delta_rule=config.delta_rule,
        residual=cache.residual,
        lse_dense=cache.lse_dense,
        kept_mass=cache.kept_mass,
        backend=backend,
    )
    run = column_sparse_attention.run
    launch = choices["column_sparse_attention"].backend.launch if choices else run
    output: torch.Tensor
    output, _ = launch(call)
    return output

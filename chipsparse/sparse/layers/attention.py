"""Self-attention of one layer: what it does at a step, and what each action computes and records.

The method is Chipmunk's column-sparse attention delta (Silveria, Govande, Fu, "Chipmunk: Deep Dive
on GPU Kernel Optimizations and Systems", part III, 2025); the ``means`` rule is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from chipsparse.config import SparsityConfig
from chipsparse.kernels.checks import block_count, ranges
from chipsparse.kernels.column_selection import column_selection
from chipsparse.kernels.column_sparse_attention import (
    ColumnSparseAttention,
    column_sparse_attention,
)
from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention_column_sums import dense_attention_column_sums
from chipsparse.kernels.dense_attention_column_sums.reference import column_sums_dtype
from chipsparse.kernels.dispatch import Choice, kind_of
from chipsparse.kernels.fp8_dense_attention import fp8_dense_attention
from chipsparse.kernels.fp8_rows import fp8_rows
from chipsparse.kernels.mask_packing import packed_to_indices
from chipsparse.parallel.head_turns import HeadTurns
from chipsparse.report.generation import LayerRecord
from chipsparse.sparse.cache.tensors import COLUMN_SUMS_BYTES, LISTS_BYTES, AttentionCache
from chipsparse.sparse.layers.column_budget import AttentionBudget
from chipsparse.sparse.layers.full_attention import AttentionInputs, fp8_choices
from chipsparse.sparse.layers.other_text import columns_of, fits, with_rows_before
from chipsparse.sparse.layers.state import Shared, StepState, split_exact_rows
from chipsparse.sparse.plan import Action, SparsityPlan

COLUMNS_PER_MEAN = 128
MEAN_WEIGHT = 40.0  # the best one for 10 to 20 % of the columns
READY_DEVICES = ("cpu",)  # the host need not wait for what it reads there

Unpatched = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float | None], torch.Tensor]
Columns = Callable[[], torch.Tensor]  # gives packed columns `[B, H, G, n]` once they are wanted

MAIN_OPS = {  # that compute the result of a step
    Action.DENSE: "dense_attention",
    Action.REFRESH: "dense_attention_column_sums",
    Action.SPARSE: "column_sparse_attention",
}


@dataclass(frozen=True)
class _Choice:
    """When columns were chosen, for which call, and how many a list has at most."""

    step: int
    branch: str
    plan: SparsityPlan
    most_columns: int


class AttentionLayer:
    """Self-attention of one transformer block: what it does at a step, and from which cache.

    The guidance branches that refresh at a step keep the same columns: guidance multiplies what
    they differ in, and so what each misses alone. Where each is a call of its own, these are the
    columns that the first of them chose.
    """

    def __init__(self, number: int, shared: Shared) -> None:
        self.number = number
        self._shared = shared
        self._refreshed_at: dict[str, int] = {}  # step of the last refresh, by branch
        self._chosen: _Choice | None = None

    def __call__(
        self,
        state: StepState | None,  # of the open call; None where there is none
        query: torch.Tensor,  # `[B, H, N, D]`, as are key, value and the result
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None,  # factor of the scores, None for `D ** -0.5`
        unpatched: Unpatched,  # attention as the model would compute it without chipsparse
        turns: HeadTurns | None = None,  # brings query, key and value; only sizes are known before
    ) -> torch.Tensor:
        """Attention as the open call wants it; rows that the layout wants exact see all columns."""
        shared = self._shared
        if state is None:
            _receive(turns)
            return unpatched(query, key, value, scale)
        inputs = AttentionInputs(query, key, value, scale, shared.backend, shared.kernels)
        in_fp8 = shared.config.attention.in_fp8
        if not state.caching:
            _receive(turns)
            return self._unrecorded(state, inputs, unpatched, in_fp8=in_fp8)
        layout = state.plan.layout
        dense = state.dense.get((self.number, "attention"))
        with shared.recorder.watch(self.number, "attention", dense) as entry:
            if entry.reason is not None:
                _receive(turns)
                return self._unrecorded(state, inputs, unpatched, in_fp8=in_fp8, entry=entry)
            rows, exact = split_exact_rows(query, layout, 2)
            if exact is not None:
                inputs = replace(inputs, query=rows)
            if layout.rows_before:
                _receive(turns)
                turns = None
                inputs = replace(inputs, query=with_rows_before(query, layout))
            choices = self._choices(inputs)
            entry.action = action = self._decide(state)
            if action is not Action.SPARSE or exact is not None:
                _receive(turns)
                turns = None
            if action is Action.REFRESH:  # read before this branch's cache takes a slot
                budget = state.budgets.of(self.number, state.plan, key.device)
                chosen, budget = self._columns_of_another_branch(state, inputs, budget)
            caches = shared.caches
            reads = shared.caches.reads
            kinds = reads["attention", action]
            ahead = reads["attention", state.action]
            with caches.acquire(state.branch, self.number, "attention", kinds, ahead) as cache:
                entry.backend = _backend_name(choices, action, in_fp8)
                if action is Action.DENSE:
                    output = dense_step(cache, inputs, in_fp8=in_fp8)
                elif action is Action.SPARSE:
                    entry.computed = cache.kept_fraction
                    output = sparse_step(cache, inputs, config=shared.config, turns=turns)
                else:
                    if chosen is not None:
                        entry.backend = _backend_name(choices, Action.DENSE, in_fp8)
                    output = self._refresh(state, cache, inputs, budget, chosen)
            if exact is None:
                return output[:, :, layout.rows_before :]
            # Rows that never run sparse are never computed in 8 bits either.
            seen = self._unrecorded(state, replace(inputs, query=exact), unpatched, in_fp8=False)
            # In the order of memory that models want, so that nothing is copied twice. The few rows
            # alone may be in another, in which PyTorch would join all of them many times slower.
            seen = seen.transpose(1, 2).contiguous()
            return torch.cat([seen, output.transpose(1, 2)], dim=1).transpose(1, 2)

    def _choices(self, inputs: AttentionInputs) -> Mapping[str, Choice]:
        config = self._shared.config
        return self._shared.recorder.choices(
            ("attention", *kind_of(*inputs.tensors)),
            lambda: backend_choices(
                inputs,
                block_size_q=config.block_size,
                in_fp8=config.attention.in_fp8,
            ),
        )

    def _unrecorded(
        self,
        state: StepState,
        inputs: AttentionInputs,
        unpatched: Unpatched,
        *,
        in_fp8: bool,
        entry: LayerRecord | None = None,
    ) -> torch.Tensor:
        """Full attention of which nothing is kept: the model's own, in 8 bits, or a faster one."""
        if state.replaces_attention:
            choices = self._choices(inputs)  # which reports them
            # The library's kernels are what the model calls itself.
            if in_fp8 or choices["dense_attention"].backend.name == "gluon":
                if entry is not None:
                    entry.backend = _backend_name(choices, Action.DENSE, in_fp8)
                return inputs.attend(in_fp8=in_fp8)[0]
        return unpatched(*inputs.tensors, inputs.scale)

    def _decide(self, state: StepState) -> Action:
        """Return the layer's action: a fuller one where a block cache passed over it, say."""
        shared = self._shared
        branch = state.branch
        caches = shared.caches
        recorder = shared.recorder
        if not caches.has(branch, self.number, "lse"):
            return recorder.catch_up(self.number, "attention", Action.DENSE)
        if state.action is not Action.SPARSE:
            return state.action
        behind = self._refreshed_at.get(branch, -1) < state.refreshed_at
        if behind or not caches.has(branch, self.number, "columns"):
            return recorder.catch_up(self.number, "attention", Action.REFRESH)
        return Action.SPARSE

    def _columns_of_another_branch(
        self,
        state: StepState,
        inputs: AttentionInputs,
        budget: AttentionBudget,
    ) -> tuple[Columns | None, AttentionBudget]:
        """Return what gives the packed columns that another branch chose now; and the budget."""
        query = inputs.query
        elsewhere = self._shared.columns
        size = self._shared.config.block_size
        if elsewhere is not None and state.action is Action.REFRESH:  # not one that catches up
            blocks = block_count(query.shape[2], size)
            shape = (*query.shape[:2], blocks, -(-inputs.key.shape[2] // 8))
            given = elsewhere.given
            return ((lambda: elsewhere.take(shape, query.device)) if given else None), budget
        chosen = self._chosen
        caches = self._shared.caches
        if chosen is None or chosen.step != state.context.step:
            return None, budget
        alike = chosen.plan == state.plan
        if not alike and not fits(chosen.plan, state.plan, self.number):
            return None, budget
        if chosen.branch == state.branch or not caches.has(chosen.branch, self.number, "columns"):
            return None, budget
        kinds = frozenset({"columns"})
        none = frozenset[str]()
        with caches.acquire(chosen.branch, self.number, "attention", kinds, none) as cache:
            assert cache.columns is not None
            if alike:
                columns = cache.columns.clone()  # stored and freed by itself
                return (lambda: columns), budget
            layout = chosen.plan.layout
            static = budget.static_columns
            columns = columns_of(cache.columns, layout, state.plan.layout, size, static)
        # Room for the columns of the other, with this branch's text in the place of the other's.
        most = chosen.most_columns - layout.text_tokens + budget.static_count
        return (lambda: columns), replace(budget, keep_count=most)

    def _refresh(
        self,
        state: StepState,
        cache: AttentionCache,
        inputs: AttentionInputs,
        budget: AttentionBudget,
        columns: Columns | None,
    ) -> torch.Tensor:
        shared = self._shared
        step = state.context.step
        key = inputs.key
        if key.device.type not in READY_DEVICES:
            budget = budget.without_waiting(key.shape[2])
        elsewhere = shared.columns if state.action is Action.REFRESH else None
        give = None if elsewhere is None else elsewhere.give
        kinds = shared.caches.reads["attention", Action.SPARSE]
        with shared.kept_in_place(state.branch, cache, kinds):
            output = refresh_step(
                cache,
                inputs,
                config=shared.config,
                budget=budget,
                columns=columns,
                give=give,
            )
        if columns is None:
            self._chosen = _Choice(step, state.branch, state.plan, budget.most_columns)
        self._refreshed_at[state.branch] = step
        return output


def _receive(turns: HeadTurns | None) -> None:
    if turns is not None:
        turns.receive()


def backend_choices(
    inputs: AttentionInputs,
    *,
    block_size_q: int,
    in_fp8: bool = False,
) -> dict[str, Choice]:
    """The backend that each operation on these tensors runs on, and why not on others."""
    query = inputs.query
    backend = inputs.backend
    # What decides about column sums and packed bits is their dtype and device alone.
    sums = query.new_empty(0, dtype=column_sums_dtype(query))
    packed = query.new_empty(0, dtype=torch.uint8)
    in_blocks = (*inputs.tensors, block_size_q)
    return {
        **(fp8_choices(inputs, block_size_q=block_size_q) if in_fp8 else {}),
        "dense_attention": dense_attention.choose(*inputs.tensors, backend=backend),
        "dense_attention_column_sums": dense_attention_column_sums.choose(
            *in_blocks,
            backend=backend,
        ),
        "column_selection": column_selection.choose(sums, backend=backend),
        "packed_to_indices": packed_to_indices.choose(packed, backend=backend),
        "column_sparse_attention": column_sparse_attention.choose(*in_blocks, backend=backend),
    }


def _backend_name(choices: Mapping[str, Choice], action: Action, in_fp8: bool) -> str:
    if in_fp8 and action is not Action.SPARSE:
        return f"{choices['fp8_dense_attention'].backend.name} fp8"
    return choices[MAIN_OPS[action]].backend.name


def dense_step(
    cache: AttentionCache,
    inputs: AttentionInputs,
    *,
    in_fp8: bool = False,
) -> torch.Tensor:
    """Full attention ``[B, H, N, D]``; records the log-sum-exp (LSE)."""
    output, cache.lse = inputs.attend(in_fp8=in_fp8)
    return output


def refresh_step(
    cache: AttentionCache,
    inputs: AttentionInputs,
    *,
    config: SparsityConfig,
    budget: AttentionBudget,
    columns: Columns | None = None,
    give: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Full attention; chooses the columns by their sums and fills the residual cache.

    Columns that were chosen elsewhere, packed as in ``cache.columns``, are kept as they are. That
    takes no sums, so the fastest library kernel computes the attention; they are asked for behind
    it, since they may still be on their way from another process. Columns that are chosen here are
    given away at once.

    The column sums are weighed with the LSE of the previous dense step (``cache.lse``). Where the
    budget has no capacity, the host waits once for the length of the longest list
    (``cache.capacity``). Where it has one, lists end there: those of blocks whose column sums are
    NaN, which keep every column.
    """
    if columns is None:
        output = _choose_columns(cache, inputs, config=config, budget=budget)
        if give is not None:
            assert cache.columns is not None
            give(cache.columns)
    else:
        output = dense_step(cache, inputs, in_fp8=config.attention.in_fp8)
        cache.columns = columns()
    cache.capacity = budget.capacity
    record_residual(cache, output, inputs, config=config)
    return output


def record_residual(
    cache: AttentionCache,
    output: torch.Tensor,
    inputs: AttentionInputs,
    *,
    config: SparsityConfig,
) -> None:
    """Fills the residual cache and makes lists of the columns.

    ``cache.columns`` must be those of the output ``[B, H, N, D]``.
    """
    assert cache.columns is not None
    columns = inputs.key.shape[2]
    indices, counts = packed_to_indices(
        cache.columns,
        columns,
        capacity=cache.capacity,
        backend=inputs.backend,
    )
    cache.capacity = indices.shape[-1]
    cache.lists = (indices, counts) if indices.nbytes <= LISTS_BYTES else None
    cache.kept_fraction = counts.float().mean() / columns
    call = ColumnSparseAttention(
        *inputs.tensors,
        indices,
        counts,
        block_size_q=config.block_size,
        scale=inputs.scale,
        backend=inputs.backend,
    )
    residual = output - column_sparse_attention.run(_with_means(call, config))
    if cache.in_fp8:
        rows = residual.transpose(1, 2).contiguous()  # as models have them in memory
        data, scale = fp8_rows(rows.flatten(0, 2), backend=inputs.backend)
        residual = data.view(rows.shape).transpose(1, 2)
        cache.residual_scale = scale.view(rows.shape[:3]).transpose(1, 2).contiguous()
    cache.residual = residual


def _choose_columns(
    cache: AttentionCache,
    inputs: AttentionInputs,
    *,
    config: SparsityConfig,
    budget: AttentionBudget,
) -> torch.Tensor:
    """Full attention with column sums; records the LSE and the columns chosen.

    Goes over as many heads at a time as `COLUMN_SUMS_BYTES` allows for their column sums.
    Guidance branches in one batch keep the same columns, chosen by what they sum to together.
    """
    assert cache.lse is not None
    query = inputs.query
    backend = inputs.backend
    batch, heads, tokens, _ = query.shape
    blocks = block_count(tokens, config.block_size)
    columns = inputs.key.shape[2]
    head_bytes = batch * blocks * columns * column_sums_dtype(query).itemsize
    chunks = list(ranges(heads, head_bytes, COLUMN_SUMS_BYTES))
    rounded = inputs.rounded() if config.attention.in_fp8 else None

    def attend(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert cache.lse is not None
        lse_previous = cache.lse[:, first:last]
        column_sums: torch.Tensor | None
        if rounded is not None:
            output, lse, column_sums = fp8_dense_attention(
                rounded.heads(first, last),
                lse_previous=lse_previous,
                block_size_q=config.block_size,
                backend=backend,
            )
            assert column_sums is not None
        else:
            output, lse, column_sums = dense_attention_column_sums(
                *inputs.of_heads(slice(first, last)).tensors,
                lse_previous,
                block_size_q=config.block_size,
                scale=inputs.scale,
                backend=backend,
            )
        if budget.branches > 1:
            column_sums = column_sums.unflatten(0, (budget.branches, -1)).sum(0)
        chosen = column_selection(
            column_sums,
            keep_count=budget.keep_count,
            static_columns=budget.static_columns,
            backend=backend,
        )
        if budget.branches > 1:
            chosen = chosen.repeat(budget.branches, 1, 1, 1)
        return output, lse, chosen

    if len(chunks) == 1:
        output, cache.lse, cache.columns = attend(0, heads)
        return output
    output = torch.empty_like(query)
    lse = torch.empty_like(cache.lse)
    packed = query.new_empty((batch, heads, blocks, -(-columns // 8)), dtype=torch.uint8)
    for first, last in chunks:
        part = slice(first, last)
        output[:, part], lse[:, part], packed[:, part] = attend(first, last)
    cache.lse = lse
    cache.columns = packed
    return output


def sparse_step(
    cache: AttentionCache,
    inputs: AttentionInputs,
    *,
    config: SparsityConfig,
    turns: HeadTurns | None = None,
) -> torch.Tensor:
    """Attention over the kept columns only, combined with the residual cache.

    The host does not wait for a GPU: the length of the lists is known from the refresh. Where heads
    come in ``turns``, they are computed so, and the result is what those make of it.
    """
    if cache.lists is None:
        assert cache.columns is not None
        assert cache.capacity is not None
        indices, counts = packed_to_indices(
            cache.columns,
            inputs.key.shape[2],
            capacity=cache.capacity,
            backend=inputs.backend,
        )
    else:
        indices, counts = cache.lists
    call = ColumnSparseAttention(
        *inputs.tensors,
        indices,
        counts,
        block_size_q=config.block_size,
        scale=inputs.scale,
        residual=cache.residual,
        residual_scale=cache.residual_scale,
        shares_device=turns is not None,
        backend=inputs.backend,
    )
    if turns is None:
        return column_sparse_attention.run(_with_means(call, config))
    # A head has no means before it is there.
    return turns.attend(
        lambda heads: column_sparse_attention.run(_with_means(call.of_heads(heads), config)),
    )


def _with_means(call: ColumnSparseAttention, config: SparsityConfig) -> ColumnSparseAttention:
    """The new call, given the mean columns of its keys and values where the config wants them.

    Lists with room for every column have none, so that attention which keeps all of them is exact.
    """
    if config.attention.delta_rule == "block_means" and call.indices.shape[3] < call.key.shape[2]:
        call.mean_key, call.mean_value = block_means(call.key), block_means(call.value)
        call.mean_weight = MEAN_WEIGHT
    return call


def block_means(rows: torch.Tensor) -> torch.Tensor:
    """Means ``[B, H, ceil(M / 128), D]`` of consecutive rows ``[B, H, M, D]``, in their dtype."""
    # A layout's order of summing must not show: processes that share heads get the same bits.
    dtype = torch.float32 if rows.dtype.itemsize == 2 else torch.float64
    blocks = rows.shape[2] // COLUMNS_PER_MEAN
    whole = blocks * COLUMNS_PER_MEAN
    means = rows[:, :, :whole].unflatten(2, (blocks, COLUMNS_PER_MEAN)).mean(3, dtype=dtype)
    if whole < rows.shape[2]:
        rest = rows[:, :, whole:].mean(2, keepdim=True, dtype=dtype)
        means = torch.cat([means, rest], dim=2)
    return means.to(rows.dtype)

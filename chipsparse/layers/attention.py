"""Self-attention of one layer: what it does at a step, and what each action computes and records.

The method is Chipmunk's column-sparse attention delta (Silveria, Govande, Fu, "Chipmunk: Deep Dive
on GPU Kernel Optimizations and Systems", part III, 2025); the ``merge`` rule is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from chipsparse.cache.tensors import COLUMN_SUMS_BYTES, LISTS_BYTES, AttentionCache
from chipsparse.common.device_number import DeviceNumber
from chipsparse.config import Precision, SparsityConfig
from chipsparse.kernels.attention_residual import attention_residual
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
from chipsparse.kernels.mask_packing import packed_to_indices
from chipsparse.layers.attention_inputs import AttentionInputs
from chipsparse.layers.column_budget import AttentionBudget
from chipsparse.layers.exact_rows import apart, joined
from chipsparse.layers.fp8_attention import fp8_choices, fp8_full_attention, fp8_tensors
from chipsparse.layers.other_text import budget_of, columns_of, fits, with_rows_before
from chipsparse.layers.state import Shared, StepState
from chipsparse.plan import Action, SparsityPlan
from chipsparse.report.generation import LayerRecord

if TYPE_CHECKING:
    from chipsparse.parallel.head_turns import HeadTurns

# Where the host need not wait for what it reads.
READY_DEVICES = ("cpu",)

Unpatched = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float | None], torch.Tensor]

# The operation that computes the result of a step.
MAIN_OPS = {
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

    Args:
        number: of the transformer block, from 0.
        shared: what it has in common with the other layers of its session.
    """

    def __init__(self, number: int, shared: Shared) -> None:
        self.number = number
        self._shared = shared
        self._refreshed_at: dict[str, int] = {}  # step of the last refresh, by branch
        self._chosen: _Choice | None = None
        self._waits_for_lists = False
        self._overfull = False

    def __call__(
        self,
        state: StepState | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None,
        unpatched: Unpatched,
        turns: HeadTurns | None = None,
    ) -> torch.Tensor:
        """Attention as the open call wants it; rows that the layout wants exact see all columns.

        Args:
            state: of the open call; None where there is none.
            query: ``[B, H, N, D]``, as are key, value and the result.
            key: as query.
            value: as query.
            scale: factor of the scores, None for ``D ** -0.5``.
            unpatched: computes query, key, value and scale as the model would without chipsparse.
            turns: brings query, key and value, of which only the sizes are known before; None where
                they are there.
        """
        shared = self._shared
        if state is None:
            _arrive(turns)
            return unpatched(query, key, value, scale)
        inputs = AttentionInputs(query, key, value, scale, shared.backend, shared.kernels)
        if not state.caching:
            return self._unrecorded(state, inputs, unpatched, turns)
        layout = state.plan.layout
        dense = state.dense.get((self.number, "attention"))
        with shared.recorder.watch(self.number, "attention", dense) as entry:
            if entry.reason is not None:
                return self._unrecorded(state, inputs, unpatched, turns, entry)
            rows, exact = apart(query, layout, 2)
            if exact is not None:
                inputs = replace(inputs, query=rows)
            if layout.rows_before:
                _arrive(turns)
                turns = None
                inputs = replace(inputs, query=with_rows_before(query, layout))
            choices = self._choices(inputs)
            entry.action = self._decide(state)
            if entry.action is not Action.SPARSE or exact is not None:
                _arrive(turns)
                turns = None
            if entry.action is Action.REFRESH:  # read before this branch's cache takes a slot
                budget = state.budgets.of(self.number, state.plan, state.context, key)
                columns, budget = self._columns_of_another_branch(state, inputs, budget)
            caches = shared.caches
            kinds, ahead = (
                caches.reads("attention", action) for action in (entry.action, state.action)
            )
            with caches.acquire(state.branch, self.number, "attention", kinds, ahead) as cache:
                precision = shared.config.attention.precision_of(entry.action)
                entry.backend = _backend_name(choices, entry.action, precision)
                if entry.action is Action.DENSE:
                    output = dense_step(cache, inputs, precision=precision)
                elif entry.action is Action.SPARSE:
                    entry.computed = cache.kept_fraction
                    output = sparse_step(
                        cache,
                        inputs,
                        config=shared.config,
                        choices=choices,
                        turns=turns,
                    )
                else:
                    if columns is not None:
                        entry.backend = _backend_name(choices, Action.DENSE, precision)
                    output = self._refresh(state, cache, inputs, budget, columns)
            if exact is None:
                return output[:, :, layout.rows_before :]
            seen = self._of_exact_rows(state, replace(inputs, query=exact), unpatched)
            # In the order of memory that models want, so that nothing is copied twice. The few rows
            # alone may be in another, in which PyTorch would join all of them many times slower.
            seen = seen.transpose(1, 2).contiguous()
            return joined(output.transpose(1, 2), seen).transpose(1, 2)

    def _choices(self, inputs: AttentionInputs) -> Mapping[str, Choice]:
        """The backends of all operations on tensors of this kind, chosen and reported once."""
        config = self._shared.config
        in_fp8 = config.attention.precision == "fp8"
        return self._shared.recorder.choices(
            ("attention", *kind_of(*inputs.tensors)),
            lambda: backend_choices(inputs, block_size_q=config.block_size, in_fp8=in_fp8),
        )

    def _unrecorded(
        self,
        state: StepState,
        inputs: AttentionInputs,
        unpatched: Unpatched,
        turns: HeadTurns | None,
        entry: LayerRecord | None = None,
    ) -> torch.Tensor:
        """Full attention of which nothing is kept: the model's own, in 8 bits, or a faster one."""
        _arrive(turns)
        if not state.replaces_attention:
            return unpatched(*inputs.tensors, inputs.scale)
        precision = self._shared.config.attention.precision
        choices = self._choices(inputs)  # which reports them
        output = replaced_attention(inputs, choices, precision=precision)
        if output is None:
            return unpatched(*inputs.tensors, inputs.scale)
        if entry is not None:
            entry.backend = _backend_name(choices, Action.DENSE, precision)
        return output

    def _of_exact_rows(
        self, state: StepState, inputs: AttentionInputs, unpatched: Unpatched
    ) -> torch.Tensor:
        """Full attention of the rows that never run sparse, never in 8 bits."""
        output = None
        if state.replaces_attention:
            output = replaced_attention(inputs, self._choices(inputs), precision="auto")
        return unpatched(*inputs.tensors, inputs.scale) if output is None else output

    def _decide(self, state: StepState) -> Action:
        """Return the layer's action: a fuller one where a block cache passed over it, say."""
        shared, branch = self._shared, state.branch

        def recorded(kind: str) -> bool:
            return shared.caches.has(branch, self.number, kind)

        if not recorded("lse"):
            return shared.recorder.catch_up(self.number, "attention", Action.DENSE)
        if state.action is not Action.SPARSE:
            return state.action
        if not recorded("columns") or self._refreshed_at.get(branch, -1) < state.refreshed_at:
            return shared.recorder.catch_up(self.number, "attention", Action.REFRESH)
        if shared.caches[branch, self.number].attention.lists_were_cut():
            self._waits_for_lists = True
            shared.report.fall_back(
                f"attention of layer {self.number} runs in full once more at step "
                f"{state.context.step}: column sums were NaN at its refresh, which made its lists "
                "longer than any choice does"
            )
            return Action.REFRESH
        return Action.SPARSE

    def _columns_of_another_branch(
        self, state: StepState, inputs: AttentionInputs, budget: AttentionBudget
    ) -> tuple[torch.Tensor | None, AttentionBudget]:
        """Return the packed columns that another branch chose at this step, and the budget.

        None where the branch chooses for itself, with its own budget.
        """
        query, elsewhere = inputs.query, self._shared.columns
        size = self._shared.config.block_size
        if elsewhere is not None and state.action is Action.REFRESH:  # not one that catches up
            blocks = block_count(query.shape[2], size)
            shape = (*query.shape[:2], blocks, -(-inputs.key.shape[2] // 8))
            return elsewhere.take(shape, query.device), budget
        chosen, caches = self._chosen, self._shared.caches
        if chosen is None or chosen.step != state.context.step:
            return None, budget
        alike = chosen.plan == state.plan
        if not alike and not fits(chosen.plan, state.plan, self.number):
            return None, budget
        if chosen.branch == state.branch or not caches.has(chosen.branch, self.number, "columns"):
            return None, budget
        kinds, none = frozenset({"columns"}), frozenset[str]()
        with caches.acquire(chosen.branch, self.number, "attention", kinds, none) as cache:
            assert cache.columns is not None
            if alike:
                return cache.columns.clone(), budget  # stored and freed by itself
            layout, static = chosen.plan.layout, budget.static_columns
            columns = columns_of(cache.columns, layout, state.plan.layout, size, static)
        return columns, budget_of(budget, chosen.most_columns, layout.text_tokens)

    def _refresh(
        self,
        state: StepState,
        cache: AttentionCache,
        inputs: AttentionInputs,
        budget: AttentionBudget,
        columns: torch.Tensor | None,
    ) -> torch.Tensor:
        shared, step, key = self._shared, state.context.step, inputs.key
        # Column sums that are NaN make lists longer than that, which is seen when the layer is
        # reached again; it then refreshes once more, and reads the lengths from then on.
        if key.device.type not in READY_DEVICES and not self._waits_for_lists:
            budget = budget.without_waiting(key.shape[2])
        kinds = shared.caches.reads("attention", Action.SPARSE)
        with shared.graphs.kept_in_place(state.branch, cache, kinds):
            output = refresh_step(
                cache,
                inputs,
                config=shared.config,
                budget=budget,
                columns=columns,
            )
        if columns is None:
            self._chosen = _Choice(step, state.branch, state.plan, budget.most_columns)
            if shared.columns is not None and state.action is Action.REFRESH:
                assert cache.columns is not None
                shared.columns.give(cache.columns)
        if budget.capacity is None:
            self._report_overfull_lists(cache.capacity, budget.most_columns, step)
        self._refreshed_at[state.branch] = step
        return output

    def _report_overfull_lists(self, longest: int | None, most_columns: int, step: int) -> None:
        """Reports, once, a list of columns that is longer than any choice makes it."""
        if longest is None or longest <= most_columns or self._overfull:
            return
        self._overfull = True
        self._shared.report.fall_back(
            f"attention of layer {self.number} keeps up to {longest} columns from step {step} on "
            f"instead of {most_columns} at most: column sums were NaN, and their query blocks keep "
            "every column"
        )


def _arrive(turns: HeadTurns | None) -> None:
    if turns is not None:
        turns.arrive()


def backend_choices(
    inputs: AttentionInputs, *, block_size_q: int, in_fp8: bool = False
) -> dict[str, Choice]:
    """The backend that each operation on these tensors runs on, and why not on others.

    Raises:
        ConfigError: full attention is to run in 8 bits, and cannot.
    """
    query, backend = inputs.query, inputs.backend
    # What decides about column sums and packed bits is their dtype and device alone.
    sums = query.new_empty(0, dtype=column_sums_dtype(query))
    packed = query.new_empty(0, dtype=torch.uint8)
    in_blocks = (*inputs.tensors, block_size_q)
    return {
        **(fp8_choices(inputs, block_size_q=block_size_q) if in_fp8 else {}),
        "dense_attention": dense_attention.choose(*inputs.tensors, backend=backend),
        "dense_attention_column_sums": dense_attention_column_sums.choose(
            *in_blocks, backend=backend
        ),
        "column_selection": column_selection.choose(sums, backend=backend),
        "packed_to_indices": packed_to_indices.choose(packed, backend=backend),
        "column_sparse_attention": column_sparse_attention.choose(*in_blocks, backend=backend),
    }


def _backend_name(choices: Mapping[str, Choice], action: Action, precision: Precision) -> str:
    """Return the name of the backend of an action's attention for the report."""
    if precision == "fp8":
        return _fp8_backend_name(choices)
    return choices[MAIN_OPS[action]].backend.name


def _fp8_backend_name(choices: Mapping[str, Choice]) -> str:
    return f"{choices['fp8_dense_attention'].backend.name} fp8"


def replaced_attention(
    inputs: AttentionInputs, choices: Mapping[str, Choice], *, precision: Precision
) -> torch.Tensor | None:
    """Full attention in the place of the model's: in 8 bits, or by our kernel if that is chosen.

    None where it is to be the model's own: the library's kernels are what it calls itself.
    """
    if precision == "fp8":
        return fp8_full_attention(inputs)[0]
    return inputs.dense()[0] if choices["dense_attention"].backend.name == "gluon" else None


def dense_step(
    cache: AttentionCache, inputs: AttentionInputs, *, precision: Precision = "auto"
) -> torch.Tensor:
    """Full attention ``[B, H, N, D]``; records the log-sum-exp (LSE)."""
    output, cache.lse = fp8_full_attention(inputs) if precision == "fp8" else inputs.dense()
    return output


def refresh_step(
    cache: AttentionCache,
    inputs: AttentionInputs,
    *,
    config: SparsityConfig,
    budget: AttentionBudget,
    columns: torch.Tensor | None = None,
) -> torch.Tensor:
    """Full attention; chooses the columns by their sums and fills the residual cache.

    Columns that were chosen before, packed as in ``cache.columns``, are kept as they are; that
    takes no sums, so that the fastest library kernel computes the attention.

    The column sums are weighed with the LSE of the previous dense step (``cache.lse``). Where the
    budget has no capacity, the host waits once for the length of the longest list
    (``cache.capacity``); where it has one, ``cache.longest`` tells later whether that was enough.
    """
    if columns is None:
        output = _choose_columns(cache, inputs, config=config, budget=budget)
    else:
        output = dense_step(cache, inputs, precision=config.attention.precision_of("refresh"))
        cache.columns = columns
    cache.capacity = budget.capacity
    counts = record_residual(cache, output, inputs, config=config)
    roomy = budget.capacity is None or budget.capacity >= inputs.key.shape[2]
    cache.longest = None if roomy else DeviceNumber(counts.max())
    return output


def record_residual(
    cache: AttentionCache, output: torch.Tensor, inputs: AttentionInputs, *, config: SparsityConfig
) -> torch.Tensor:
    """Fills the residual cache of the delta rule and makes lists of the columns.

    ``cache.lse`` and ``cache.columns`` must be those of the output ``[B, H, N, D]``. Returns how
    many columns each query block has in its list, int32 ``[B, H, G]``.
    """
    assert cache.columns is not None
    assert cache.lse is not None
    columns = inputs.key.shape[2]
    indices, counts = packed_to_indices(
        cache.columns, columns, capacity=cache.capacity, backend=inputs.backend
    )
    cache.capacity = indices.shape[-1]
    cache.lists = (indices, counts) if indices.nbytes <= LISTS_BYTES else None
    cache.kept_fraction = counts.float().mean() / columns
    kept, kept_lse = column_sparse_attention(
        *inputs.tensors,
        indices,
        counts,
        block_size_q=config.block_size,
        scale=inputs.scale,
        backend=inputs.backend,
    )
    residual = attention_residual(
        output,
        kept,
        kept_lse,
        cache.lse,
        delta_rule=config.attention.delta_rule,
        fp8=cache.residual_in_fp8,
        backend=inputs.backend,
    )
    cache.residual = residual.values
    if residual.scale is not None:
        cache.residual_scale = residual.scale
    if residual.kept_mass is not None:
        cache.lse_dense, cache.kept_mass = cache.lse, residual.kept_mass
    return counts


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
    query, backend = inputs.query, inputs.backend
    batch, heads, tokens, _ = query.shape
    blocks, columns = block_count(tokens, config.block_size), inputs.key.shape[2]
    head_bytes = batch * blocks * columns * column_sums_dtype(query).itemsize
    chunks = list(ranges(heads, head_bytes, COLUMN_SUMS_BYTES))
    rounded = fp8_tensors(inputs) if config.attention.precision_of("refresh") == "fp8" else None

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
            random_count=budget.random_count,
            static_columns=budget.static_columns,
            seed=budget.seed,
            first_head=budget.first_head + first,
            first_block=budget.first_block,
            backend=backend,
        )
        if budget.branches > 1:
            chosen = chosen.repeat(budget.branches, 1, 1, 1)
        return output, lse, chosen

    if len(chunks) == 1:
        output, cache.lse, cache.columns = attend(0, heads)
        return output
    output, lse = torch.empty_like(query), torch.empty_like(cache.lse)
    packed = query.new_empty((batch, heads, blocks, -(-columns // 8)), dtype=torch.uint8)
    for first, last in chunks:
        part = slice(first, last)
        output[:, part], lse[:, part], packed[:, part] = attend(first, last)
    cache.lse, cache.columns = lse, packed
    return output


def sparse_step(
    cache: AttentionCache,
    inputs: AttentionInputs,
    *,
    config: SparsityConfig,
    choices: Mapping[str, Choice] | None = None,
    turns: HeadTurns | None = None,
) -> torch.Tensor:
    """Attention over the kept columns only, combined with the residual cache.

    The host does not wait for a GPU: the length of the lists is known from the refresh. With the
    `backend_choices` for tensors of this kind it does not look at them again either.

    Where heads come in ``turns``, they are computed so, and the result is what those make of it.
    """
    if cache.lists is None:
        assert cache.columns is not None
        assert cache.capacity is not None
        indices, counts = packed_to_indices(
            cache.columns, inputs.key.shape[2], capacity=cache.capacity, backend=inputs.backend
        )
    else:
        indices, counts = cache.lists
    call = ColumnSparseAttention(
        *inputs.tensors,
        indices,
        counts,
        block_size_q=config.block_size,
        scale=inputs.scale,
        delta_rule=config.attention.delta_rule,
        residual=cache.residual,
        residual_scale=cache.residual_scale,
        lse_dense=cache.lse_dense,
        kept_mass=cache.kept_mass,
        shares_device=turns is not None,
        backend=inputs.backend,
    )
    run = column_sparse_attention.run
    launch = choices["column_sparse_attention"].backend.launch if choices else run
    if turns is not None:
        return turns.each(lambda heads: launch(call.of_heads(heads))[0])
    output, _ = launch(call)
    return output

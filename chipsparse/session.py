"""All mutable state of one patched transformer, and the decision what each layer does now."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from bitarray import frozenbitarray

from chipsparse.cache.host_memory import HostMemory
from chipsparse.cache.kinds import PARTS, Part, read_kinds
from chipsparse.cache.memory_plan import MemoryDemand
from chipsparse.cache.offload import OffloadPool
from chipsparse.cache.store import CacheStore
from chipsparse.common.machine import device_allocated_bytes
from chipsparse.config import SparsityConfig
from chipsparse.graphs.step_graph import StepGraphs, TensorsInPlace
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.kernels.dispatch import kind_of
from chipsparse.layers import attention, mlp
from chipsparse.layers.attention import AttentionBudget
from chipsparse.layers.kept_columns import KeptColumns, read_kept_columns
from chipsparse.layers.missed_refreshes import MissedRefreshes
from chipsparse.layers.mlp import MLPWeights
from chipsparse.layers.static_columns import check_static_bits, static_mask
from chipsparse.layers.token_order import grids_order, inverse_order
from chipsparse.layout import ModelLayout
from chipsparse.measure.slower_parts import remarks_on, slower_parts
from chipsparse.plan import CACHED, NOT_RECORDED, Action, SparsityPlan
from chipsparse.report.generation import GenerationReport, LayerRecord, StepRecord, StepTimer
from chipsparse.report.recorder import CallRecorder
from chipsparse.schedule.held_outputs import HeldOutputs
from chipsparse.schedule.step_cache import StepCache
from chipsparse.step import StepContext

UNKNOWN = "not asked yet"
# Where the host need not wait for what it reads.
READY_DEVICES = ("cpu",)
# Frames, rows and columns of a region of kept columns where tokens have no voxels.
REGION = (4, 4, 8)


class Session:
    """Owns the caches of one transformer: one `LayerCache` per layer and guidance branch.

    Every transformer call runs between `begin` and `end`; whoever opens a call resets the session
    if the call raises. Nothing but host memory, emptied, survives into another generation.

    Args:
        config: what to compute.
        report: where to record it; shared by the experts of one pipeline.
        pool: holds the caches that live in host memory, for this session alone; by default one
            with memory of its own.
        name: the pipeline's name for the transformer.
        graphs: the recorded sparse steps of this session alone; by default those of a GPU.
        static_bits: columns that are always kept, see `static_mask`; None for none but the text's.
    """

    def __init__(
        self,
        config: SparsityConfig,
        report: GenerationReport,
        pool: OffloadPool | None = None,
        name: str = "transformer",
        graphs: StepGraphs | None = None,
        static_bits: frozenbitarray | None = None,
    ) -> None:
        self.config = config
        self.report = report
        self.name = name
        self._pool = OffloadPool(HostMemory(), report.note) if pool is None else pool
        self._caches = CacheStore(self._pool, report.note, report.fall_back)
        # Facts about the device, not about a generation: a second one runs on the same kernels.
        self._kernels = FastestKernel()
        self._recorder = CallRecorder(report)
        self._graphs = StepGraphs() if graphs is None else graphs
        self._missed = MissedRefreshes()
        self._static_bits = static_bits
        self._kinds: dict[tuple[Part, Action], frozenset[str]] = {}
        self.reset()

    def reset(self) -> None:
        """Forgets everything and frees the caches: the next call starts a generation."""
        self._recorder.end(self._pool.take_traffic(), finished=False)  # a call that broke off
        self._recorder.reset()
        self._generation = 0
        self._plan: SparsityPlan | None = None
        self._plans: dict[str, SparsityPlan] = {}
        self._caching = False
        self._all_dense = False
        self._graphs.reset()
        self._caches.reset()
        self._held_bytes = 0, 0  # of the caches when they were last counted: all, and on the host
        self._missed.reset()
        self._recorded: dict[str, Action] = {}
        self._last_step: dict[str, int] = {}
        self._slower: dict[str, Mapping[tuple[int, Part], str]] = {}  # than dense, and why
        self._held = HeldOutputs()
        self._step_cache: StepCache | None = None
        self._order: tuple[torch.Tensor, torch.Tensor] | None = None
        self._static_columns: dict[ModelLayout, torch.Tensor | None] = {}
        self._overfull_layers: set[int] = set()
        self._cut_layers: set[int] = set()
        self._why_not_recorded: str | None = UNKNOWN
        self._context: StepContext | None = None
        self._record: StepRecord | None = None

    @property
    def plan(self) -> SparsityPlan | None:
        """The plan of the generation in progress, for the branch that was called last."""
        return self._plan

    def close(self) -> None:
        """As `reset`, and gives host memory back to the system."""
        self.reset()
        self._pool.close()

    def cache_bytes(self) -> int:
        """Bytes that all caches hold now, on the device and on the host."""
        return self._caches.nbytes()

    # One transformer call.

    def begin(
        self,
        context: StepContext,
        layout: ModelLayout,
        device: torch.device,
        demand: Callable[[], MemoryDemand] = MemoryDemand,
        latents: torch.Tensor | None = None,
    ) -> Action:
        """Opens a transformer call and returns what it does.

        A generation that starts late (image to video, the second expert of Wan 2.2) is right
        without special cases: see `SparsityPlan.taken`.

        Args:
            context: position of the call.
            layout: sizes of the model and the call. Branches may differ in text tokens and batch.
            device: where it runs.
            demand: says what it asks of the memory; called once per branch.
            latents: the transformer's input, of any shape; ``skip_threshold`` needs it.

        Raises:
            BudgetError: where the memory budgets leave no room for the caches of a single layer.
            ValueError: where there are static columns for another number of tokens.
        """
        if self._static_bits is not None:
            check_static_bits(self._static_bits, layout)
        plan = SparsityPlan(self.config, layout, context.steps)
        is_first = not self._goes_on(context, plan)
        if is_first:
            self.reset()
            self._generation = context.generation
            self._caching = not plan.is_dense()
            if self._caching and self.config.tile is not None:
                order = grids_order(layout.grids, self.config.tile).to(device)
                self._order = (order, inverse_order(order))
            if plan.schedule.skips_by_threshold():
                schedule = self.config.schedule
                self._step_cache = StepCache(schedule.skip_threshold or 0.0, schedule.max_skips)
        self._plan = self._plans[context.branch] = plan
        recorded = self._recorded.get(context.branch)
        action = plan.taken(context.step, recorded)
        predicted = None
        if self._step_cache is not None and latents is not None:
            allowed = plan.may_skip_by_threshold(context.step, recorded)
            if self._step_cache.skips(context.step, context.branch, latents, allowed=allowed):
                action = Action.SKIP
            predicted = self._step_cache.predicted
        record = StepRecord(
            context.step,
            context.steps,
            context.branch,
            action,
            transformer=self.name,
            predicted_change=predicted,
        )
        self.report.begin(context.generation, record)
        self._recorder.begin(record, plan, device)
        self._missed.begin(context.branch, context.step, action)
        if is_first:
            self.report.look_ahead(plan, record)
        if recorded is None:
            for remark in plan.remarks():
                self.report.note(remark)
        if self._caching and context.branch not in self._caches:
            wanted = demand()
            self.report.dtype = wanted.dtype
            slower = self._slower[context.branch] = slower_parts(plan, device, wanted.dtype)
            for remark in remarks_on(slower, layout.layers):
                self.report.note(remark)
            wanted = replace(wanted, dense=wanted.dense | slower.keys())
            self._caches.admit(context.branch, plan, device, wanted)
            if is_first:
                self._all_dense = self._is_all_dense(plan, context.branch, wanted)
        self._context, self._record = context, record
        if action is not Action.SKIP:
            record.timer = StepTimer(device, time.perf_counter)
            for part in PARTS:
                self._caches.start(context.branch, self._reads(part, action))
        return action

    def _is_all_dense(self, plan: SparsityPlan, branch: str, demand: MemoryDemand) -> bool:
        """Whether no layer can run sparse, each for a reason of its own, nor a step is skipped."""
        return not plan.schedule.skips_any and not any(
            plan.is_sparse(layer, part)
            and (layer, part) not in demand.dense
            and self._caches.why_recomputed(branch, layer, part) is None
            for part in PARTS
            for layer in range(plan.layout.layers)
        )

    def say_if_all_dense(self) -> None:
        """Says at the first call, once the reasons are reported, that no layer can run sparse."""
        if not self._all_dense:
            return
        self._all_dense = False
        plan, context, _ = self._open_call()
        slower = self._slower.get(context.branch, {})
        reasons = self.report.all_dense(*remarks_on(slower, plan.layout.layers))
        if reasons is not None:
            self.report.run_dense(reasons)

    def _goes_on(self, context: StepContext, plan: SparsityPlan) -> bool:
        """Whether a call belongs to the generation in progress."""
        return (
            context.generation == self._generation
            and self._plans.get(context.branch, plan) == plan
            and all(known.differs_in_prompts_only(plan) for known in self._plans.values())
        )

    def run(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        why_not_recorded: Callable[[], str | None] = lambda: None,
    ) -> Any:
        """The model's own forward in the open call; sparse ones as a CUDA graph where that pays.

        Args:
            forward: the model's own.
            args: its positional arguments.
            kwargs: its keyword arguments.
            why_not_recorded: says why the model does not do the same at every sparse step, or None;
                asked once a generation, and again after `model_changed`.
        """
        if not self._may_be_recorded(why_not_recorded):
            return forward(*args, **kwargs)
        _, context, record = self._open_call()
        with self._graphs.on(self._recorder.device):
            result = self._graphs.run(forward, args, kwargs, record, self.report.note)
        if record.replayed:
            for entry in record.layers:
                if entry.part == "attention" and entry.action is Action.SPARSE:
                    cache = self._caches[context.branch, entry.layer].attention
                    entry.computed = cache.kept_fraction
        return result

    def model_changed(self, what: str) -> None:
        """Forgets the recorded calls, which do what the model did before.

        Args:
            what: name of what changed.
        """
        self._why_not_recorded = UNKNOWN
        if self._graphs.drop_all():
            self.report.note(f"a sparse step recorded as a CUDA graph was dropped: {what} changed")

    def _may_be_recorded(self, why_not_recorded: Callable[[], str | None]) -> bool:
        """Whether the open call does just what other sparse calls of its branch do."""
        plan, context, record = self._open_call()
        if record.action is not Action.SPARSE or not plan.records_steps():
            return False
        device = self._recorder.device
        if device.type != self._graphs.device_type or self.report.layer_times:
            return False
        if not self._caches.stay_on_device(context.branch):
            return False
        if any(self._lists_were_cut(layer) for layer in range(plan.layout.layers)):
            self._graphs.drop(context.branch)  # those layers refresh
            return False
        if self._why_not_recorded is UNKNOWN:
            self._why_not_recorded = why_not_recorded()
            if self._why_not_recorded is not None:
                self.report.note(f"{NOT_RECORDED}: {self._why_not_recorded}")
        return self._why_not_recorded is None

    def end(self, output: torch.Tensor, *, is_last_branch: bool = False) -> None:
        """Closes the call with the transformer's output tensor.

        Args:
            output: of the transformer.
            is_last_branch: whether no other guidance branch is called at this step any more, as far
                as that is known.
        """
        plan, context, record = self._open_call()
        if record.timer is not None:
            record.timer.stop()
        self._recorder.end(self._pool.take_traffic())
        branch = context.branch
        recorded = plan.recorded_after(context.step, record.action, self._recorded.get(branch))
        if recorded is not None:
            self._recorded[branch] = recorded
        self._count_memory(record, output.device)
        self._last_step[branch] = context.step
        if context.steps is not None and context.step == context.steps - 1:
            self._finish(branch)
            for other in list(self._recorded):
                # Guidance may end before the last step, in whole or by one of several branches.
                if is_last_branch or self._last_step[other] < context.step - 1:
                    self._finish(other)
        elif plan.schedule.skips_any and record.action is not Action.SKIP:
            both = plan.schedule.forecasts_any
            held = self._held.hold(branch, context.time, output, both=both)
            if self._step_cache is not None:
                self._step_cache.computed(branch, held, sparse=record.action is Action.SPARSE)
        self._context = self._record = None

    def _count_memory(self, record: StepRecord, device: torch.device) -> None:
        if record.action not in CACHED:  # others add nothing, and counting takes its time
            self._held_bytes = self.cache_bytes(), self._pool.stored_bytes
            self.report.cache_bytes = max(self.report.cache_bytes, self._held_bytes[0])
            self.report.host_bytes = max(self.report.host_bytes, self._held_bytes[1])
        record.cache_bytes, record.host_bytes = self._held_bytes
        allocated = device_allocated_bytes(device)
        if allocated is not None:
            record.allocated_bytes, record.peak_allocated_bytes = allocated

    def _finish(self, branch: str) -> None:
        """Frees what a branch has after its last step: what decodes the latents needs room."""
        if self._caching:
            self._graphs.drop(branch)
            if branch in self._caches:
                self._caches.finish(branch)
            self._held_bytes = self.cache_bytes(), self._pool.stored_bytes
        if self._step_cache is not None:
            self._step_cache.release()
        self._recorded.pop(branch, None)
        self._held.drop(branch)

    def skipped_output(self) -> torch.Tensor:
        """What a skipped call returns: what its branch computed last, or a forecast from that."""
        plan, context, record = self._open_call()
        share = plan.schedule.forecast_share(context.step)
        reach = share * self._held.reach(context.branch, context.time) if share else 0.0
        record.forecast = reach != 0.0
        return self._held.output(context.branch, reach)

    def _open_call(self) -> tuple[SparsityPlan, StepContext, StepRecord]:
        assert self._plan is not None
        assert self._context is not None
        assert self._record is not None
        return self._plan, self._context, self._record

    # What the layers of an open call ask for.

    @property
    def caching(self) -> bool:
        """Whether a call is open in whose generation anything is sparse."""
        return self._context is not None and self._caching

    def leave_dense(self, part: Part, layers: Iterable[int], reason: str) -> None:
        """Notes for the open call that the model computes a part of these layers by itself.

        To report that as a fallback is left to the caller.
        """
        self._recorder.leave_dense(part, layers, reason)

    def leave_modules_dense(self, part: Part, reasons: Mapping[int, str]) -> None:
        """Notes the same of all layers in which that is so until it is said anew."""
        self._recorder.leave_modules_dense(part, reasons)

    def _watched(self, layer: int, part: Part) -> AbstractContextManager[LayerRecord]:
        """Records what a layer does; it is dense where the record has a reason."""
        plan, context, _ = self._open_call()
        slower = self._slower.get(context.branch, {})
        reason = plan.why_dense(layer, part) or slower.get((layer, part))
        if reason is None:
            reason = self._caches.why_recomputed(context.branch, layer, part)
        return self._recorder.watch(layer, part, reason)

    @property
    def is_first_call(self) -> bool:
        """Whether the open call is the first one of its guidance branch in this generation."""
        return self._context is not None and self._context.branch not in self._recorded

    @property
    def token_order(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Order of the video or image tokens and its inverse (int64 ``[N]``); None: unchanged."""
        return self._order if self.caching else None

    def attention(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None,
        unpatched: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Self-attention of one layer.

        Args:
            layer: number of the transformer block, from 0.
            query: ``[B, H, N, D]``, as are key, value and the result.
            key: as query.
            value: as query.
            scale: factor of the scores, None for ``D ** -0.5``.
            unpatched: computes the attention as the model would without chipsparse.
        """
        if not self.caching:
            return unpatched()
        with self._watched(layer, "attention") as entry:
            if entry.reason is not None:
                return unpatched()
            return self._attention(entry, query, key, value, scale)

    def _attention(
        self,
        entry: LayerRecord,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        config, layer = self.config.attention, entry.layer
        _, context, record = self._open_call()
        choices = self._recorder.choices(
            ("attention", *kind_of(query, key, value)),
            lambda: attention.backend_choices(
                query, key, value, group_rows=config.block_size_q, backend=self._backend
            ),
        )
        action = self._attention_action(layer, record.action)
        entry.action = action
        kinds, planned = self._reads("attention", action), self._reads("attention", record.action)
        with self._caches.lend(context.branch, layer, "attention", kinds, planned) as cache:
            entry.backend = choices[attention.MAIN_OPS[action]].backend.name
            if action is Action.DENSE:
                return attention.dense_step(
                    cache,
                    query,
                    key,
                    value,
                    scale=scale,
                    backend=self._backend,
                    kernels=self._kernels,
                )
            if action is Action.SPARSE:
                entry.computed = cache.kept_fraction
                return attention.sparse_step(
                    cache,
                    query,
                    key,
                    value,
                    config=config,
                    scale=scale,
                    backend=self._backend,
                    choices=choices,
                    step=context.step,
                )
            budget = self._attention_budget(layer, key)
            if self._lists_by_budget(layer, key):
                budget = budget.without_waiting(key.shape[2])
            before = self._recorded_memory(cache, "attention")
            output = attention.refresh_step(
                cache,
                query,
                key,
                value,
                config=config,
                budget=budget,
                scale=scale,
                backend=self._backend,
                step=context.step,
            )
            self._keep_in_place(cache, before)
            if budget.capacity is None:
                self._check_capacity(layer, cache.capacity, budget.most_columns)
            self._missed.made(context.branch, layer, "attention", context.step)
            return output

    def _attention_action(self, layer: int, action: Action) -> Action:
        """What a layer does: more than the step for one passed over (by a block cache, say)."""
        _, context, _ = self._open_call()

        def recorded(kind: str) -> bool:
            return self._caches.has(context.branch, layer, kind)

        if not recorded("lse"):
            return self._recorder.catch_up(layer, "attention", Action.DENSE)
        if action is not Action.SPARSE:
            return action
        if not recorded("columns") or self._missed.behind(context.branch, layer, "attention"):
            return self._recorder.catch_up(layer, "attention", Action.REFRESH)
        if self._lists_were_cut(layer):
            self._make_lists_anew(layer)
            return Action.REFRESH
        return action

    def _attention_budget(self, layer: int, key: torch.Tensor) -> AttentionBudget:
        plan, context, _ = self._open_call()
        config, layout = self.config.attention, plan.layout
        if layout not in self._static_columns:
            self._static_columns[layout] = attention.static_columns(
                key.shape[2],
                config,
                text_tokens=layout.text_tokens,
                text_first=layout.text_first,
                always=self._static_mask(layout, key.device),
                device=key.device,
            )
        return AttentionBudget(
            keep_count=plan.attention_keep_count(layer),
            random_count=plan.attention_random_count(),
            static_columns=self._static_columns[layout],
            seed=zlib.crc32(f"{self.config.seed} {context.branch} {context.step} {layer}".encode()),
            static_count=attention.static_count(
                key.shape[2],
                config,
                text_tokens=layout.text_tokens,
                always=0 if self._static_bits is None else self._static_bits.count(),
            ),
        )

    def _static_mask(self, layout: ModelLayout, device: torch.device) -> torch.Tensor | None:
        if self._static_bits is None:
            return None
        order = None if self._order is None else self._order[0]
        return static_mask(self._static_bits, layout, order, device)

    def kept_columns(self, layers: frozenset[int] | None = None) -> list[KeptColumns]:
        """What layers (None: all) with sparse attention keep now; the host waits for each of them.

        Empty before the first refresh and after the last step, which frees the caches.
        """
        found = []
        for branch, layer in list(self._caches):
            asked = layers is None or layer in layers
            if not asked or not self._caches.has(branch, layer, "columns"):
                continue
            layout, order = self._plans[branch].layout, self._order
            kinds, none = frozenset({"columns"}), frozenset[str]()
            with self._caches.lend(branch, layer, "attention", kinds, none) as cache:
                found.append(
                    read_kept_columns(
                        cache.columns,
                        layout,
                        group_rows=self.config.attention.block_size_q,
                        static=self._static_mask(layout, cache.columns.device),
                        order=None if order is None else order[0],
                        voxel=self.config.tile or REGION,
                        where=(self.name, branch, layer),
                    )
                )
        return found

    def _lists_by_budget(self, layer: int, key: torch.Tensor) -> bool:
        """Whether a refresh makes the lists as long as the budget says, with no wait for the GPU.

        Column sums that are NaN make them longer, which is seen when the layer is reached again; it
        then refreshes once more, and reads the lengths from then on.
        """
        return key.device.type not in READY_DEVICES and layer not in self._cut_layers

    def _lists_were_cut(self, layer: int) -> bool:
        """Whether the last refresh kept more columns than it made room for."""
        _, context, _ = self._open_call()
        cache = self._caches[context.branch, layer].attention
        if cache.longest is None:
            return False
        assert cache.capacity is not None
        if float(cache.longest) >= cache.capacity:
            return True
        cache.longest = None
        return False

    def _make_lists_anew(self, layer: int) -> None:
        """Lets a layer's refresh, and those to come, wait for the length of its lists."""
        _, context, _ = self._open_call()
        self._cut_layers.add(layer)
        self.report.fall_back(
            f"attention of layer {layer} runs in full once more at step {context.step}: column "
            "sums were NaN at its refresh, which made its lists longer than any choice does"
        )

    def _check_capacity(self, layer: int, longest: int | None, most_columns: int) -> None:
        """Reports, once per layer, a list of columns that is longer than any choice makes it."""
        if longest is None or longest <= most_columns or layer in self._overfull_layers:
            return
        self._overfull_layers.add(layer)
        _, context, _ = self._open_call()
        self.report.fall_back(
            f"attention of layer {layer} keeps up to {longest} columns from step {context.step} "
            f"on instead of {most_columns} at most: column sums were NaN, and their query groups "
            "keep every column"
        )

    def mlp(
        self,
        layer: int,
        hidden: torch.Tensor,
        weights: MLPWeights,
        *,
        addend: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The feed-forward layer of one block, plus what is to be added to it.

        Args:
            layer: number of the transformer block, from 0.
            hidden: ``[B, N, C]``, as are addend and the result.
            weights: read in place and never kept.
            addend: computes another summand of the result, which changes with every step and is not
                cached; it may be overwritten.
        """

        def summand() -> torch.Tensor | None:
            return None if addend is None else addend()

        def dense() -> torch.Tensor:
            return mlp.dense_step(
                None,
                hidden,
                weights,
                config=self.config.mlp,
                backend=self._backend,
                addend=summand(),
            )

        if not self.caching:
            return dense()
        with self._watched(layer, "mlp") as entry:
            if entry.reason is not None:
                return dense()
            return self._mlp(entry, hidden, weights, summand)

    def _mlp(
        self,
        entry: LayerRecord,
        hidden: torch.Tensor,
        weights: MLPWeights,
        summand: Callable[[], torch.Tensor | None],
    ) -> torch.Tensor:
        config, layer = self.config.mlp, entry.layer
        plan, context, record = self._open_call()
        action = record.action
        empty = not self._caches.has(context.branch, layer, "activation")
        behind = empty or self._missed.behind(context.branch, layer, "mlp")
        if action is Action.SPARSE and behind:
            action = self._recorder.catch_up(layer, "mlp", Action.REFRESH)
        if action is Action.REFRESH:
            self._missed.made(context.branch, layer, "mlp", context.step)
        entry.action = action
        kinds = self._reads("mlp", action)
        with self._caches.lend(context.branch, layer, "mlp", kinds) as cache:
            if action is not Action.SPARSE:
                entry.backend = self._backend or "library"
                before = self._recorded_memory(cache, "mlp")
                output = mlp.dense_step(
                    cache, hidden, weights, config=config, backend=self._backend, addend=summand()
                )
                self._keep_in_place(cache, before)
                return output
            tensors = (hidden, weights.up, weights.gate, weights.down, cache.activation, cache.mean)
            choices = self._recorder.choices(
                ("mlp", *kind_of(*tensors)),
                lambda: mlp.backend_choices(
                    cache, hidden, weights, config=config, backend=self._backend
                ),
            )
            up, down = (choices[op].backend.name for op in ("sparse_mlp_up", "sparse_mlp_down"))
            entry.backend = up if up == down else f"{up}+{down}"
            keep_count = plan.mlp_keep_count(layer)
            entry.computed = keep_count / weights.up.shape[0]
            return mlp.sparse_step(
                cache,
                hidden,
                weights,
                config=config,
                keep_count=keep_count,
                backend=self._backend,
                choices=choices,
                addend=summand(),
            )

    def _recorded_memory(self, cache: Any, part: Part) -> TensorsInPlace | None:
        """What of a layer's cache a recorded call, if there is one, reads and writes."""
        _, context, _ = self._open_call()
        if context.branch not in self._graphs:
            return None
        return TensorsInPlace(cache, self._reads(part, Action.SPARSE))

    def _keep_in_place(self, cache: Any, before: TensorsInPlace | None) -> None:
        """Leaves what a layer recorded anew where a recorded call reads it."""
        _, context, _ = self._open_call()
        if before is not None and not before.take(cache):
            self._graphs.drop(context.branch)

    def _reads(self, part: Part, action: Action) -> frozenset[str]:
        """See `read_kinds`."""
        if (part, action) not in self._kinds:
            self._kinds[part, action] = read_kinds(self.config, part, action)
        return self._kinds[part, action]

    @property
    def _backend(self) -> str | None:
        return None if self.config.backend == "auto" else self.config.backend

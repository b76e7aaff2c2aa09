"""One patched transformer: its generation in progress, its caches, its captured steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from bitarray import frozenbitarray

from chipsparse.common.machine import device_allocated_bytes
from chipsparse.config import PARTS, LayerPart, Part, SparsityConfig
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.layout import Grid, ModelLayout
from chipsparse.parallel.agreement import Agreement
from chipsparse.report.generation import GenerationReport, StepRecord, StepTimer
from chipsparse.report.nothing_sparse import dense_notes
from chipsparse.report.recorder import CallRecorder
from chipsparse.skip.conditions import Conditioning
from chipsparse.skip.held_outputs import HeldOutputs
from chipsparse.skip.position import StepContext
from chipsparse.skip.timetable import list_name
from chipsparse.sparse.cache.host_memory import HostMemory
from chipsparse.sparse.cache.memory_plan import MemoryDemand
from chipsparse.sparse.cache.offload import OffloadPool
from chipsparse.sparse.cache.store import CacheStore
from chipsparse.sparse.cost_model.layer_times import captures, known_rates, part_times, slower_parts
from chipsparse.sparse.cost_model.relative_cost import asked_cost, why_skipping
from chipsparse.sparse.graphs.cuda_capture import CudaCapturer
from chipsparse.sparse.graphs.step_graph import StepGraphs
from chipsparse.sparse.layers.attention import AttentionLayer
from chipsparse.sparse.layers.column_budget import ColumnBudgets, check_static_bits
from chipsparse.sparse.layers.mlp import MLPLayer
from chipsparse.sparse.layers.other_text import aligned
from chipsparse.sparse.layers.state import Shared, StepState
from chipsparse.sparse.layers.tile_order import grids_order, inverse_order
from chipsparse.sparse.plan import CACHED, Action, SparsityPlan, recorded_after

AnyLayer = TypeVar("AnyLayer", AttentionLayer, MLPLayer)


class Layers(dict[int, AnyLayer]):
    """Layers of one kind by number, made when they are first asked for."""

    def __init__(self, kind: type[AnyLayer], shared: Shared) -> None:
        self._kind: type[AnyLayer] = kind
        self._shared = shared

    def __missing__(self, number: int) -> AnyLayer:
        layer = self[number] = self._kind(number, self._shared)
        return layer


@dataclass
class _Branch:
    """The progress of one guidance branch in a generation."""

    plan: SparsityPlan
    recorded: Action | None = None  # see `SparsityPlan.taken`
    last_step: int = -1  # at which it was called
    refreshed_at: int = -1  # step of its last refresh
    dense: Mapping[LayerPart, str] = field(default_factory=dict)  # see `StepState`
    captures: bool = False  # likewise
    conditioning: Conditioning | None = None  # of its last call, where that is known


@dataclass
class _Generation:
    """The generation in progress."""

    budgets: ColumnBudgets
    number: int = 0  # from 1; 0 before the first
    caching: bool = False  # anything is sparse, so that layers record for later
    branches: dict[str, _Branch] = field(default_factory=dict)
    plan: SparsityPlan | None = None  # of the branch that was called last
    # Of the video or image tokens and its inverse, int64 [N]; None: unchanged.
    order: tuple[torch.Tensor, torch.Tensor] | None = None
    held: HeldOutputs = field(default_factory=HeldOutputs)  # that skipped calls are made from
    all_dense: list[str] | None = None  # why no layer can run sparse, until it is said
    held_bytes: tuple[int, int] = (0, 0)  # of the caches when last counted: all, and on the host

    def aligned(self, layout: ModelLayout, config: SparsityConfig) -> ModelLayout:
        """A branch's layout, with query blocks that lie as those of the first branch."""
        first = next((branch.plan.layout for branch in self.branches.values()), layout)
        return aligned(layout, first, config) if self.caching else layout

    def includes(self, context: StepContext, plan: SparsityPlan) -> bool:
        known = self.branches.get(context.branch)
        return (
            context.generation == self.number
            and (known is None or known.plan == plan)
            and all(own.plan.differs_in_prompts_only(plan) for own in self.branches.values())
        )


class Session:
    """Owns the state of one transformer: caches, captured steps, and the layers that use them.

    Every transformer call runs between `begin` and `end`; whoever opens a call resets the session
    if the call raises. Nothing but host memory, emptied, survives into another generation.
    """

    def __init__(
        self,
        config: SparsityConfig,
        report: GenerationReport,  # shared by the experts of one pipeline
        pool: OffloadPool | None = None,  # for this session alone; by default a new one
        name: str = "transformer",  # the pipeline's
        capturer: CudaCapturer | None = None,
        static_bits: frozenbitarray | None = None,  # columns that are always kept
        agreement: Agreement | None = None,  # with other processes that run the same calls
        masked: Collection[Part] = (),  # parts that the model masks in every call: never sparse
    ) -> None:
        self.config = config
        self.masked = frozenset(masked)
        self._costs: dict[tuple[Grid, ...], float | None] = {}  # by the video's or image's size
        self.report = report
        self.name = name
        self._pool = OffloadPool(HostMemory(), report.note) if pool is None else pool
        self._agreement = Agreement() if agreement is None else agreement
        self._caches = CacheStore(config, self._pool, report, self._agreement.capacity)
        self.recorder = CallRecorder(report)
        # Runs the model's own forward in the open call, by a CUDA graph where that pays.
        self.graphs = StepGraphs(self._caches, report, capturer)
        self._static_bits = static_bits
        shared = Shared(
            config,
            self.recorder,
            self._caches,
            self.graphs.kept_in_place,
            # Facts about the device, not about a generation: a second one runs on the same kernels.
            FastestKernel(),
            self._agreement.columns,
        )
        # By number of the transformer block.
        self.attention = Layers(AttentionLayer, shared)
        self.mlp = Layers(MLPLayer, shared)
        self.reset()

    def reset(self, *, stuck: bool = False) -> None:
        """Forgets everything and frees the caches: the next call starts a generation.

        On a GPU that is ``stuck`` caches in host memory are never freed.
        """
        self.recorder.end(self._pool.take_traffic(), finished=False)  # a call that broke off
        if stuck:
            self._pool.leave()
        self.recorder.reset()
        self.graphs.reset()
        self._caches.reset()
        self.attention.clear()
        self.mlp.clear()
        self._generation = _Generation(ColumnBudgets(self._static_bits))
        self.state: StepState | None = None  # the open call, which its layers are handed

    @property
    def plan(self) -> SparsityPlan | None:
        """The plan of the generation in progress, for the branch that was called last."""
        return self._generation.plan

    def sparse_cost(self, layout: ModelLayout) -> float | None:
        """Return the cost of a sparse step, for a video or image of this size: see `Run`."""
        if layout.grids not in self._costs:
            self._costs[layout.grids] = asked_cost(self.config, layout, self.masked)
        return self._costs[layout.grids]

    def close(self) -> None:
        self.reset()
        self._pool.close()

    def cache_bytes(self) -> int:
        return self._caches.nbytes()

    # One transformer call.

    def begin(
        self,
        context: StepContext,
        layout: ModelLayout,  # branches may differ in text tokens and batch
        device: torch.device,
        demand: Callable[[], MemoryDemand] = MemoryDemand,  # called once per branch
        # Why this call, where it is not skipped, can only run as without chipsparse: in the model's
        # own order of tokens, with nothing recorded or read.
        why_not_cached: str | None = None,
        *,
        # Full attention is faster as ours than as the model's, so that layers compute it where
        # nothing is recorded, too. Where nothing is sparse or skipped the model stays as it is.
        has_faster_attention: bool = False,
        # A change since the last call of its branch starts that anew: nothing that it kept is used.
        conditioning: Conditioning | None = None,
    ) -> StepState:
        """Opens a transformer call and returns what its layers are handed.

        A generation that starts late (image to video, the second expert of Wan 2.2) is right
        without special cases: see `SparsityPlan.taken`. Raises `BudgetError` where the memory
        budgets leave no room for the caches of a single layer, and `ValueError` for static columns
        of another number of tokens.
        """
        if self._static_bits is not None:
            check_static_bits(self._static_bits, layout)
        own = self._generation.aligned(layout, self.config)
        plan = SparsityPlan(
            self.config,
            own,
            context.steps,
            context.first,
            context.corrects,
            self.sparse_cost(layout),
            list_name(self.config.schedule.form, context.branch),
        )
        is_first = not self._generation.includes(context, plan)
        restarted = is_first and context.generation == self._generation.number
        if is_first:
            plan = replace(plan, layout=layout)
            self.reset()
            self._generation = self._new_generation(context.generation, plan, device)
        generation = self._generation
        generation.plan = plan
        branch = generation.branches.setdefault(context.branch, _Branch(plan))
        before = branch.conditioning
        branch.conditioning = conditioning
        changed = None if conditioning is None else conditioning.change(before)
        if changed is not None:
            self._drop(context.branch)
        action = plan.taken(context.step, branch.recorded)
        records = generation.caching and plan.sparse_steps > 0
        caching = records and why_not_cached is None and context.placed
        left_alone = records and why_not_cached and action is not Action.SKIP
        if left_alone or not context.placed:
            action = Action.DENSE
        if action is Action.REFRESH:
            branch.refreshed_at = context.step
        record = StepRecord(
            context.step,
            context.steps,
            context.branch,
            action,
            transformer=self.name,
            restarted=restarted or changed is not None,
        )
        self.report.begin(context.generation, record)
        self.recorder.begin(record, plan, device)
        if changed is not None and action is not plan.step_action(context.step):
            self.report.fall_back(
                f"calls run in full where {changed} changes: what was kept before is not used",
            )
        if left_alone:
            self.report.fall_back(f"calls of branch {context.branch} run dense: {why_not_cached}")
        if is_first:
            self.report.look_ahead(plan, record)
            skipping = why_skipping(plan)
            if skipping is not None:
                self.report.note(skipping)
        if branch.recorded is None:
            for note in plan.notes(base=self.report.base, on_cpu=device.type == "cpu"):
                self.report.note(note)
        if caching and context.branch not in self._caches:
            self._admit(context.branch, device, demand(), is_first=is_first)
        differs = generation.caching or plan.schedule.skips_any
        ours = self.config.attention.in_fp8 or (has_faster_attention and differs)
        self.state = StepState(
            plan,
            context,
            record,
            caching,
            branch.refreshed_at,
            branch.dense,
            generation.budgets,
            branch.captures,
            replaces_attention=ours and why_not_cached is None,
        )
        if self._agreement.columns is not None:
            lists_differ = len(plan.schedule.timetable.by_branch) > 1
            self._agreement.columns.open(context.step, action, plan.layout, same=not lists_differ)
        if action is not Action.SKIP:
            record.timer = StepTimer(device)
            self._caches.start(context.branch, action)
        return self.state

    def _new_generation(self, number: int, plan: SparsityPlan, device: torch.device) -> _Generation:
        caching = not plan.is_dense()
        order = None
        tile = self.config.tile
        if caching and tile is not None:
            tokens = grids_order(plan.layout.grids, tile).to(device)
            order = tokens, inverse_order(tokens)
        budgets = ColumnBudgets(self._static_bits, None if order is None else order[0])
        return _Generation(budgets, number, caching, order=order)

    def _admit(
        self,
        name: str,
        device: torch.device,
        demand: MemoryDemand,
        *,
        is_first: bool,
    ) -> None:
        """Makes room for the caches of a branch, and says which layers run dense without any."""
        generation = self._generation
        branch = self._generation.branches[name]
        plan = branch.plan
        self.report.dtype = str(demand.dtype).removeprefix("torch.")
        rates = known_rates(device, demand.dtype)
        branch.captures = demand.captures and captures(plan, demand.dtype, rates)
        demand = replace(demand, captures=branch.captures)
        slower: dict[LayerPart, str] = {}
        if rates is not None:
            times = part_times(
                plan,
                rates=rates,
                dtype=demand.dtype,
                captured=branch.captures,
                dense=demand.dense,
                fp8_mlps=demand.fp8_mlps,
            )
            slower = slower_parts(times, rates)
        notes = dense_notes(slower, plan.layout.layers)
        for note in notes:
            self.report.note(note)
        demand = replace(demand, dense=demand.dense | slower.keys())
        self._caches.admit(name, plan, device, demand)
        branch.dense = {**self._caches.dense(name), **slower, **plan.dense}
        all_dense = len(branch.dense.keys() | demand.dense) == len(PARTS) * plan.layout.layers
        if is_first and all_dense and not plan.schedule.skips_any:
            generation.all_dense = notes

    def say_if_all_dense(self) -> None:
        """Says at the first call, once the reasons are reported, that no layer can run sparse."""
        notes = self._generation.all_dense
        self._generation.all_dense = None
        if notes is not None:
            reasons = self.report.all_dense(*notes)
            if reasons is not None:
                self.report.run_dense(reasons)

    def end(self, output: torch.Tensor, *, is_last_branch: bool = False) -> None:
        """Closes the call; no other branch is known to be called behind the last one."""
        state = self._open_call()
        generation = self._generation
        plan = state.plan
        context = state.context
        record = state.record
        if isinstance(record.timer, StepTimer):
            record.timer.stop()
        self.recorder.end(self._pool.take_traffic())
        branch = generation.branches[context.branch]
        branch.recorded = recorded_after(record.action, branch.recorded)
        self._count_memory(record, output.device)
        branch.last_step = context.step
        if context.steps is not None and context.step == context.steps - 1:
            for name, other in generation.branches.items():
                # Guidance may end before the last step, in whole or by one of several branches.
                over = is_last_branch or other.last_step < context.step - 1
                if other is branch or (over and other.recorded is not None):
                    self._finish(name)
        elif plan.schedule.skips_any and record.action is not Action.SKIP and context.placed:
            both = plan.schedule.forecasts_any
            generation.held.hold(context.branch, context.time, output, both=both)
        self.state = None

    def _count_memory(self, record: StepRecord, device: torch.device) -> None:
        if record.action not in CACHED:  # others add nothing, and counting takes its time
            held = self._generation.held_bytes = self.cache_bytes(), self._pool.stored_bytes
            self.report.cache_bytes = max(self.report.cache_bytes, held[0])
            self.report.host_bytes = max(self.report.host_bytes, held[1])
        record.cache_bytes, record.host_bytes = self._generation.held_bytes
        allocated = device_allocated_bytes(device)
        if allocated is not None:
            record.allocated_bytes, record.peak_allocated_bytes = allocated

    def _finish(self, branch: str) -> None:
        """Frees what a branch has after its last step: what decodes the latents needs room."""
        self._drop(branch)
        self._generation.branches[branch].conditioning = None
        if branch in self._caches:
            self._caches.finish(branch)
        self._generation.held_bytes = self.cache_bytes(), self._pool.stored_bytes

    def _drop(self, branch: str) -> None:
        """Forgets what a branch recorded and computed, so that its next call is as its first."""
        generation = self._generation
        if branch in self._caches:
            self.graphs.drop(branch)
            self._caches.drop(branch)
        generation.branches[branch].recorded = None
        generation.held.drop(branch)

    def skipped_output(self) -> torch.Tensor:
        """Return the output of a skipped call: its branch's last one, or a forecast from it."""
        state = self._open_call()
        held = self._generation.held
        share = state.plan.schedule.forecast(state.context.step)
        reach = share * held.reach(state.branch, state.context.time) if share else 0.0
        state.record.forecast = reach != 0.0
        return held.output(state.branch, reach)

    def _open_call(self) -> StepState:
        assert self.state is not None
        return self.state

    # What the model's adapter asks and says.

    @property
    def caching(self) -> bool:
        """True where a call is open whose layers record or read."""
        return self.state is not None and self.state.caching

    @property
    def wants_attention(self) -> bool:
        """True where the config asks for attention of ours in the open call: sparse, or in FP8."""
        return self.caching or (self.attends and self.config.attention.in_fp8)

    @property
    def attends(self) -> bool:
        """True where attention of the open call is ours: wanted, or faster than the model's."""
        return self.state is not None and (self.state.caching or self.state.replaces_attention)

    @property
    def is_first_call(self) -> bool:
        """True where the open call is the first one of its guidance branch in this generation."""
        if self.state is None:
            return False
        return self._generation.branches[self.state.branch].recorded is None

    @property
    def tile_order(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Order of the video or image tokens and its inverse (int64 ``[N]``); None: unchanged."""
        return self._generation.order if self.caching else None

"""The layers of one patched transformer in a generation: caches and captured steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from bitarray import frozenbitarray

from chipsparse.common.machine import device_allocated_bytes
from chipsparse.config import PARTS, Action, LayerPart, Part, SparsityConfig
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.layout import Grid, ModelLayout
from chipsparse.parallel.agreement import Agreement
from chipsparse.reasons.calls import branch_left_alone, conditions_changed
from chipsparse.reasons.layers import dense_layers
from chipsparse.reasons.reason import Level, Reason, note
from chipsparse.report.generation import GenerationReport
from chipsparse.report.recorder import CallRecorder
from chipsparse.report.records import StepRecord, StepTimer
from chipsparse.skip.position import Place
from chipsparse.skip.session import Decision
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
from chipsparse.sparse.layers.state import OpenCall, Shared
from chipsparse.sparse.layers.token_permutation import grids_permutation, inverse_permutation
from chipsparse.sparse.plan import CACHED, SparsityPlan, recorded_after
from chipsparse.sparse.plan_notes import plan_notes

AnyLayer = TypeVar("AnyLayer", AttentionLayer, MLPLayer)


class Layers(dict[int, AnyLayer]):
    """Layers of one kind by number, made when they are first asked for."""

    def __init__(self, kind: type[AnyLayer], shared: Shared) -> None:
        self._kind: type[AnyLayer] = kind
        self._shared = shared

    def __missing__(self, number: int) -> AnyLayer:
        layer = self[number] = self._kind(number, self._shared)
        return layer


@dataclass(frozen=True)
class Reading:
    """A call as the code around the model reads it."""

    layout: ModelLayout  # its sizes; branches may differ in text tokens and batch
    device: torch.device
    demand: Callable[[], MemoryDemand] = MemoryDemand  # called once per branch
    # Why the call, where it is not skipped, can only run as without chipsparse: in the model's own
    # order of tokens, with nothing recorded or read.
    why_not_cached: str | None = None
    # Full attention is faster as ours than as the model's, so that layers compute it where nothing
    # is recorded, too. Where nothing is sparse or skipped the model stays as it is.
    has_faster_attention: bool = False


@dataclass
class BranchState:
    """The recordings of the layers of one guidance branch in a generation."""

    plan: SparsityPlan
    recorded: Action | None = None  # see `SparsityPlan.taken`
    refreshed_at: int = -1  # step of its last refresh
    dense: Mapping[LayerPart, str] = field(default_factory=dict)  # see `OpenCall`
    captures: bool = False  # likewise

    def action(self, step: int) -> Action:
        """Return the planned action of a step that is computed, raised to a fuller one.

        A sparse step is raised where no refresh recorded its inputs.
        """
        action = self.plan.taken(step, self.recorded)
        return Action.DENSE if action is Action.SKIP else action


@dataclass
class _Generation:
    """The generation in progress."""

    budgets: ColumnBudgets
    caching: bool = False  # anything is sparse, so that layers record for later
    branches: dict[str, BranchState] = field(default_factory=dict)
    plan: SparsityPlan | None = None  # of the branch that was called last
    # Of the video or image tokens and its inverse, int64 [N]; None: unchanged.
    order: tuple[torch.Tensor, torch.Tensor] | None = None
    all_dense: list[Reason] | None = None  # why no layer can run sparse, until it is said
    cached_bytes: tuple[int, int] = (0, 0)  # of the caches when last counted: all, and on the host


class SparseSession:
    """Owns the layers of one transformer, their caches and their captured steps.

    It never decides whether a call is skipped: `SkipSession` does. Every transformer call runs
    between `begin` and `end`. Whoever opens a call resets the session if the call raises. Nothing
    but host memory, emptied, survives into another generation.
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
        self._pool = OffloadPool(HostMemory(), report.add) if pool is None else pool
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
        self.state: OpenCall | None = None  # the open call, which its layers are handed

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
        """Forget everything, and free the host memory that is reused between generations, too."""
        self.reset()
        self._pool.close()

    def cache_bytes(self) -> int:
        """Return the bytes of all caches, on the device and on the host, without slots."""
        return self._caches.nbytes()

    # One transformer call.

    def plan_for(self, place: Place, layout: ModelLayout) -> SparsityPlan:
        """Return the plan of a call at a position, with query blocks as in the first branch.

        Raises:
            ValueError: for static columns of another number of tokens.
        """
        if self._static_bits is not None:
            check_static_bits(self._static_bits, layout)
        cost = self.sparse_cost(layout)
        generation = self._generation
        if generation.caching and generation.branches:
            first = next(iter(generation.branches.values()))
            layout = aligned(layout, first.plan.layout, self.config)
        plan = SparsityPlan(
            self.config,
            layout,
            place.steps,
            place.first,
            place.corrects,
            cost,
            list_name(self.config.schedule.form, place.branch),
        )
        known = generation.branches.get(place.branch)
        # The plan of the branch's last call has computed its actions already.
        return known.plan if known is not None and known.plan == plan else plan

    def begin(self, decision: Decision, plan: SparsityPlan, reading: Reading) -> OpenCall:
        """Open a transformer call and return what its layers are handed.

        A generation that starts late (image to video, the second expert of Wan 2.2) is right
        without special cases: see `SparsityPlan.taken`.

        Args:
            decision: the answer of `SkipSession.begin`. A skipped call runs no layer.
            plan: the one of `plan_for`.
            reading: what the code around the model says of the call.

        Raises:
            BudgetError: where the memory budgets leave no room for the caches of a single layer.
        """
        place = decision.place
        device = reading.device
        if decision.starts:
            plan = replace(plan, layout=reading.layout)
            self.reset()
            self._generation = self._new_generation(plan, device)
        generation = self._generation
        generation.plan = plan
        branch = generation.branches.setdefault(place.branch, BranchState(plan))
        if decision.changed is not None:
            self._drop(place.branch)
        has_sparse_steps = generation.caching and plan.sparse_steps > 0
        can_cache = has_sparse_steps and reading.why_not_cached is None
        is_left_alone = has_sparse_steps and not can_cache and not decision.is_skipped
        if decision.is_skipped:
            action = Action.SKIP
        elif is_left_alone:
            action = Action.DENSE
        else:
            action = branch.action(place.step)
        if action is Action.REFRESH:
            branch.refreshed_at = place.step
        record = self._begin_record(decision, action, plan, device)
        if is_left_alone and reading.why_not_cached is not None:
            self.report.add(branch_left_alone(place.branch, reading.why_not_cached))
        self._say(decision, branch, record, on_cpu=device.type == "cpu")
        if can_cache and place.branch not in self._caches:
            self._admit(place.branch, device, reading.demand(), is_first=decision.starts)
        differs = generation.caching or plan.schedule.skips_any
        replaces = self.config.attention.in_fp8 or (reading.has_faster_attention and differs)
        self.state = OpenCall(
            plan,
            place,
            record,
            can_cache,
            branch.refreshed_at,
            branch.dense,
            generation.budgets,
            branch.captures,
            replaces_attention=replaces and reading.why_not_cached is None,
        )
        if self._agreement.columns is not None:
            self._agreement.columns.open(place.step, action, plan.layout)
        if not decision.is_skipped:
            record.timer = StepTimer(device)
            self._caches.start(place.branch, action)
        return self.state

    def _begin_record(
        self,
        decision: Decision,
        action: Action,
        plan: SparsityPlan,
        device: torch.device,
    ) -> StepRecord:
        place = decision.place
        record = StepRecord(
            place.step,
            place.steps,
            place.branch,
            action,
            transformer=self.name,
            forecast=decision.is_forecast,
            restarted=decision.restarts or decision.changed is not None,
        )
        self.report.begin(place.generation, record)
        self.recorder.begin(record, plan, device)
        return record

    def _say(
        self,
        decision: Decision,
        branch: BranchState,
        record: StepRecord,
        *,
        on_cpu: bool,
    ) -> None:
        """Report what the call shows of the generation, and why it runs fuller than planned."""
        plan = branch.plan
        place = decision.place
        changed = decision.changed
        if changed is not None and record.action is not plan.step_action(place.step):
            self.report.add(conditions_changed(changed))
        if decision.starts:
            self.report.look_ahead(plan, record)
            skipping = why_skipping(plan)
            if skipping is not None:
                self.report.add(note("schedule.skipping", skipping))
        if branch.recorded is None:
            for sentence in plan_notes(plan, base=self.report.base, on_cpu=on_cpu):
                self.report.add(note("schedule.plan", sentence))

    def _new_generation(self, plan: SparsityPlan, device: torch.device) -> _Generation:
        caching = not plan.is_dense()
        order = None
        tile = self.config.tile
        if caching and tile is not None:
            tokens = grids_permutation(plan.layout.grids, tile).to(device)
            order = tokens, inverse_permutation(tokens)
        budgets = ColumnBudgets(self._static_bits, None if order is None else order[0])
        return _Generation(budgets, caching, order=order)

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
        notes = dense_layers("layers.slower", Level.NOTE, slower, plan.layout.layers)
        for reason in notes:
            self.report.add(reason)
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
            reason = self.report.why_all_dense(notes)
            if reason is not None:
                self.report.add(reason)

    def end(self, device: torch.device) -> None:
        """Close the open call, of a model on this device."""
        assert self.state is not None
        record = self.state.record
        if isinstance(record.timer, StepTimer):
            record.timer.stop()
        self.recorder.end(self._pool.take_traffic())
        branch = self._generation.branches[self.state.branch]
        branch.recorded = recorded_after(record.action, branch.recorded)
        self._count_memory(record, device)
        self.state = None

    def finish(self, branches: Iterable[str]) -> None:
        """Free what branches have after their last step: what decodes the latents needs room."""
        for branch in branches:
            self._drop(branch)
            if branch in self._caches:
                self._caches.finish(branch)
            self._generation.cached_bytes = self.cache_bytes(), self._pool.stored_bytes

    def _count_memory(self, record: StepRecord, device: torch.device) -> None:
        if record.action not in CACHED:  # others add nothing, and counting takes its time
            cached = self._generation.cached_bytes = self.cache_bytes(), self._pool.stored_bytes
            self.report.cache_bytes = max(self.report.cache_bytes, cached[0])
            self.report.host_bytes = max(self.report.host_bytes, cached[1])
        record.cache_bytes, record.host_bytes = self._generation.cached_bytes
        allocated = device_allocated_bytes(device)
        if allocated is not None:
            record.allocated_bytes, record.peak_allocated_bytes = allocated

    def _drop(self, branch: str) -> None:
        """Forget what a branch recorded, so that its next call is as its first."""
        if branch in self._caches:
            self.graphs.drop(branch)
            self._caches.drop(branch)
        self._generation.branches[branch].recorded = None

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

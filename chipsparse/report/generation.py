"""The report of a generation: its steps and layers, and whatever was not as the config asks.

A report has reasons, each a sentence with a code. *Fallbacks* are what runs dense, or denser than
asked, although the config wants it sparse; a strict report raises the first one. *Notes* are
whatever else is worth knowing: slower copies, a cache that lives elsewhere than planned. A
generation in which nothing at all is sparse or skipped has a sentence of its own, and the user is
warned.

The same classes are filled during the calls, written by `GenerationReport.to_dict`, and read from
files by pydantic. Times are in seconds, sizes in bytes, shares between 0 and 1; None is not known.
"""

from __future__ import annotations

import dataclasses
import platform
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeAlias, TypeVar

import torch
from pydantic import Field, GetPydanticSchema, PlainSerializer, TypeAdapter

from chipsparse.common.bounded import Count, Index, Number
from chipsparse.common.machine import package_version
from chipsparse.common.user_warnings import warn_user
from chipsparse.common.version import __version__
from chipsparse.config import DenseWarning, FallbackError, Part, QualityWarning, SparsityConfig
from chipsparse.kernels.dispatch import Choice
from chipsparse.reasons.reason import Level, Reason, nothing_sparse
from chipsparse.report.nothing_sparse import wants_sparse, why_nothing
from chipsparse.sparse.plan import CACHED, Action, SparsityPlan


class StepTimer:
    """Wall time of a piece of work: device events on CUDA, the host clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] | None = None
        self._seconds: float | None = None
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record(torch.cuda.current_stream(device))
        self._start = time.perf_counter()

    def stop(self) -> None:
        """Mark the end of the work; do not wait for the device."""
        if self._events is not None:
            self._events[1].record(torch.cuda.current_stream(self._device))
        self._seconds = time.perf_counter() - self._start

    def seconds(self) -> float | None:
        """Return the measured time, None before `stop`; wait for a device that is not finished."""
        if self._events is not None and self._seconds is not None:
            self._events[1].synchronize()
            self._seconds = self._events[0].elapsed_time(self._events[1]) / 1e3
            self._events = None
        return self._seconds


def _seconds(timer: StepTimer | float | None) -> float | None:
    return timer.seconds() if isinstance(timer, StepTimer) else timer


T = TypeVar("T")
# A field that is neither written nor read.
InMemory: TypeAlias = Annotated[
    T,
    GetPydanticSchema(lambda _, handler: handler(Any)),
    Field(exclude=True),
]
# Fields that files have as numbers. A record waits for the device when it is written.
Time: TypeAlias = Annotated[
    StepTimer | float | None,
    GetPydanticSchema(lambda _, handler: handler(Number | None)),
    PlainSerializer(_seconds),
    Field(alias="seconds"),
]
Share: TypeAlias = Annotated[
    torch.Tensor | float,
    GetPydanticSchema(lambda _, handler: handler(Number)),
    PlainSerializer(float),
    Field(alias="kept"),
]


@dataclass
class LayerRecord:
    """A layer's attention or feed-forward layer in one transformer call."""

    layer: Index
    part: Part
    action: Action  # never "skip", which leaves out whole calls
    # Share of the attention columns or neurons that was computed: a number, or a 0-d tensor of the
    # device; 1 unless sparse.
    computed: Share = 1.0
    # The name of a kernel backend, "library" for PyTorch's own operations, or "model" where the
    # model ran as without chipsparse.
    backend: str = "model"
    reason: str | None = None  # why it was dense whatever the step did
    timer: Time = None  # its time with what it waited for, where that is measured
    bytes_to_device: Count = 0  # of its caches, that came from host memory in this call
    bytes_to_host: Count = 0  # of its caches, that went there

    @property
    def kept(self) -> float:
        """The share that was computed; waits for the device where it has not yet finished."""
        return float(self.computed)

    @property
    def seconds(self) -> float | None:
        """Its time in seconds; None where it was not measured or did not come to its end."""
        return _seconds(self.timer)


@dataclass
class StepRecord:
    """One transformer call."""

    step: Index  # denoising step from 0
    steps_total: Index | None  # None where the number of steps is not known
    branch: str  # guidance branch
    action: Action
    timer: Time = None  # None where it was skipped
    bytes_to_device: Count = 0  # of caches, that came from host memory
    bytes_to_host: Count = 0  # of caches, that went there
    cache_bytes: Count = 0  # of its transformer's caches behind it, wherever they live
    host_bytes: Count = 0  # how much of that was in host memory beside the device
    # Bytes that PyTorch had allocated on the device behind it, weights included, and the most until
    # then; None where the device is not CUDA.
    allocated_bytes: Count | None = None
    peak_allocated_bytes: Count | None = None
    transformer: str = ""  # the pipeline's name for the transformer that was called
    # In the order in which they ran; none where nothing in the whole generation is sparse, nor of
    # layers that a block cache passed over.
    layers: list[LayerRecord] = field(default_factory=list, repr=False)
    finished: bool = False  # the call came to its end
    replayed: bool = False  # a captured call of its kind was replayed as a CUDA graph
    forecast: bool = False  # it was skipped, and its output continues the last two computed ones
    corrected: bool = False  # it was skipped, then put right once the next full step was known
    restarted: bool = False  # the branch started anew since its conditions changed
    generation: Index = 0  # its number; a pipeline that denoises in sections has one for each
    # Of its generation and branch; None where chipsparse only looked on.
    plan: InMemory[SparsityPlan | None] = field(default=None, repr=False)

    @property
    def place(self) -> tuple[int, int]:
        """Generation and step: the same for all guidance branches of a denoising step."""
        return self.generation, self.step

    @property
    def seconds(self) -> float:
        """Time of the transformer call in seconds (0 for one that was skipped or broke off)."""
        return _seconds(self.timer) or 0.0

    @property
    def used_caches(self) -> bool:
        """True where it was skipped, or something in it ran sparse."""
        sparse = self.replayed or any(layer.action is Action.SPARSE for layer in self.layers)
        return self.action is Action.SKIP or sparse

    @property
    def attention_kept(self) -> float | None:
        """Mean share of attention columns computed, over layers; None where nothing ran sparse."""
        return mean(self.fractions("attention"))

    @property
    def mlp_kept(self) -> float | None:
        """Mean share of MLP neurons computed, over layers; None where nothing ran sparse."""
        return mean(self.fractions("mlp"))

    def fractions(self, part: Part) -> list[float]:
        """Return the share that each layer computed whose part ran sparse."""
        own = (layer for layer in self.layers if layer.part == part)
        return [layer.kept for layer in own if layer.action is Action.SPARSE]


@dataclass(frozen=True)
class PipelineFacts:
    """The pipeline of a report, as far as it is known."""

    class_name: str | None = None
    location: str | None = None  # the folder or hub name that it was loaded from
    # The class of each patched transformer, by the pipeline's name for it.
    transformers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Device:
    """A device."""

    type: str = ""  # "cuda" or "cpu"
    name: str = ""


@dataclass(frozen=True)
class PlannedSteps:
    """The plan of one transformer, as files have it."""

    schedule: str = ""  # in words
    actions: list[Action] | None = None  # of every step; None: their number is not known
    # The `ModelLayout` of its last call, with tokens and layers.
    layout: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: SparsityPlan) -> PlannedSteps:
        """Return a plan in words and numbers."""
        layout = plan.layout
        sizes = {**dataclasses.asdict(layout), "tokens": layout.tokens, "layers": layout.layers}
        actions = None if plan.steps is None else list(plan.actions())
        return cls(plan.describe(), actions, sizes)


@dataclass
class GenerationReport:
    """The record of the current or last call of the pipeline, with all its sections.

    In an explicit loop (`Handle.generation`) it is that of one generation. Calls from other loops
    have no records: a fallback says that they ran dense.
    """

    strict: InMemory[bool] = False  # a fallback raises `FallbackError`
    layer_times: InMemory[bool] = False  # the time of each layer is measured
    in_call: InMemory[bool] = False  # the next record is made within a call of the pipeline
    config: InMemory[SparsityConfig | None] = None  # what was asked for
    # What was planned for each transformer that was called, by its name.
    plans: InMemory[dict[str, SparsityPlan]] = field(default_factory=dict)
    pipeline: PipelineFacts = field(default_factory=PipelineFacts)
    quality: str | None = None  # the name of the config in its profile, where it has one
    # The config where nobody asked for anything else; None: the defaults.
    base: InMemory[SparsityConfig | None] = None
    generation: Count = 0  # number of the last one, from 1
    steps: list[StepRecord] = field(default_factory=list)  # one per transformer call, in order
    # What its user should know, but for why nothing is sparse; see `fallbacks` and `notes`.
    reasons: list[Reason] = field(default_factory=list)
    # Why no step is sparse or skipped although the config asks for some, and what would help; None
    # where one is, or none is wanted. Known before the first step wherever it can be, else when the
    # pipeline's call ends.
    nothing_sparse: str | None = None
    error: str | None = None  # the exception that ended the generation in a transformer call
    device: Device | None = None
    dtype: str | None = None  # of the hidden states, such as "bfloat16", where anything is sparse
    # The kernel backend that each op ran on, several where layers differ; and the faster ones that
    # did not run, with the reason.
    backends: dict[str, str] = field(default_factory=dict)
    passed_over: dict[str, dict[str, str]] = field(default_factory=dict)
    cache_bytes: Count = 0  # the largest size that the caches had, wherever they live
    host_bytes: Count = 0  # how much of it was in host memory beside the device
    versions: Mapping[str, str | None] = field(default_factory=dict)  # of files alone
    transformers: Mapping[str, PlannedSteps] = field(default_factory=dict)
    _warned: InMemory[set[type[Warning]]] = field(default_factory=set, repr=False)
    _begun: InMemory[bool] = field(default=False, repr=False)

    def begin(self, generation: int, record: StepRecord) -> None:
        """Add a record; the first of a call, or of another loop's generation, clears others."""
        if generation != self.generation:
            if not self._begun:
                self._clear()
            self.generation = generation
            self._begun = self.in_call
        record.generation = generation
        self.steps.append(record)

    def begin_call(self) -> None:
        """Clear the report for a call of which something is to be noted before its first record."""
        self._clear()
        self._begun = True

    def end_call(self, *, finished: bool) -> None:
        """Set `nothing_sparse` after a call of the pipeline, and warn of it."""
        self._begun = False
        if any(record.used_caches for record in self.steps):
            self.nothing_sparse = None
        elif finished and self.steps and self.nothing_sparse is None:
            reason = self._why_nothing_was_sparse()
            if reason is not None:
                self.nothing_sparse = reason.text
                self._warn(reason, DenseWarning)

    def _why_nothing_was_sparse(self) -> Reason | None:
        if not any(record.action is Action.SPARSE for record in self.steps):
            steps = 1 + max(record.step for record in self.steps)
            for plan in self.plans.values():
                reason = why_nothing(replace(plan, steps=steps))
                if reason is not None:
                    return reason
        return self.why_all_dense()

    def _clear(self) -> None:
        empty = GenerationReport()
        for name in (
            "plans",
            "steps",
            "reasons",
            "nothing_sparse",
            "error",
            "device",
            "dtype",
            "backends",
            "passed_over",
            "cache_bytes",
            "host_bytes",
        ):
            setattr(self, name, getattr(empty, name))

    @property
    def fallbacks(self) -> list[str]:
        """A sentence for everything that runs dense, or denser than asked."""
        return [reason.text for reason in self.reasons if reason.level is Level.FALLBACK]

    @property
    def notes(self) -> list[str]:
        """A sentence for everything else worth knowing."""
        return [reason.text for reason in self.reasons if reason.level is not Level.FALLBACK]

    def why_all_dense(self, others: Iterable[Reason] = ()) -> Reason | None:
        """Return that nothing runs sparse for the fallbacks and other reasons; None without any."""
        texts = [*self.fallbacks, *(reason.text for reason in others)]
        return nothing_sparse("layers.all_dense", "; ".join(texts)) if texts else None

    def look_ahead(self, plan: SparsityPlan, record: StepRecord) -> None:
        """Warn at a transformer's first call, or raise if strict, where no step will be sparse."""
        for before in self.steps[:-1]:
            if before.transformer == record.transformer or before.action in CACHED:
                return
        reason = why_nothing(plan, record.step, record.transformer)
        if reason is not None:
            self.add(reason)

    def add(self, reason: Reason) -> None:
        """Note a reason once, and warn as its level has it.

        Raises:
            FallbackError: if the run is strict, and the reason says that something runs denser
                than asked.
        """
        if reason.level is Level.NOTHING:
            self._add_nothing_sparse(reason)
            return
        if reason not in self.reasons:
            self.reasons.append(reason)
        if reason.level is Level.QUALITY:
            self._warn(reason, QualityWarning)
        if reason.level is Level.FALLBACK and self.strict:
            raise FallbackError(reason.text)

    def add_dense_calls(self, calls: Reason, nothing: Reason) -> None:
        """Note calls that run dense, and unless others were sparse that nothing is.

        Raises:
            FallbackError: if the run is strict.
        """
        self.add(calls)
        if not any(record.used_caches for record in self.steps):
            self.add(nothing)

    def add_unknown_call(self, calls: Reason, nothing: Reason) -> None:
        """Note and warn of a call at no known step, which runs dense without a record.

        Raises:
            FallbackError: if the run is strict.
        """
        if self.config is not None and not wants_sparse(self.config):
            return
        if self.in_call and not self._begun:
            self.begin_call()
        self.add_dense_calls(calls, nothing)
        self._warn(calls, DenseWarning)

    def _add_nothing_sparse(self, reason: Reason) -> None:
        if self.config is not None and not wants_sparse(self.config):
            return
        self.nothing_sparse = reason.text
        if self.strict:
            raise FallbackError(reason.text)
        self._warn(reason, DenseWarning)

    def _warn(self, reason: Reason, category: type[Warning]) -> None:
        """Warn once in the life of a report: a user makes one image after another."""
        if category not in self._warned:
            self._warned.add(category)
            warn_user(reason.text, category)

    def correct(self, steps: range) -> None:
        """Note which of the skipped steps in this range were corrected."""
        for record in reversed(self.steps):
            if record.generation != self.generation or record.step < steps.start:
                break
            record.corrected |= record.step in steps and record.action is Action.SKIP

    def fail(self, error: BaseException) -> None:
        """Note the error that ended the generation."""
        self.error = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])

    def run_on(self, choices: Mapping[str, Choice]) -> None:
        """Note the backend of each op, and why the ones before it were rejected."""
        for op, choice in choices.items():
            names = self.backends[op].split(", ") if op in self.backends else []
            self.backends[op] = ", ".join(dict.fromkeys([*names, choice.backend.name]))
            self.passed_over.setdefault(op, {}).update(choice.rejected)

    def backend_reasons(self) -> list[str]:
        """Return why backends were passed over, one line for all ops with the same reasons."""
        ops: dict[str, list[str]] = {}
        for op, reasons in self.passed_over.items():
            text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            if text:
                ops.setdefault(text, []).append(op)
        return [f"{', '.join(names)} not on {text}" for text, names in ops.items()]

    def actions(self) -> Counter[str]:
        """Return the number of denoising steps by action, each counted once, not per branch."""
        return Counter({record.place: record.action.value for record in self.steps}.values())

    def __repr__(self) -> str:
        steps = ", ".join(f"{count} {action}" for action, count in self.actions().most_common())
        return f"<GenerationReport: {steps or 'no steps'}; {len(self.fallbacks)} fallbacks>"

    def summary(self) -> str:
        """Return a few lines for people: the steps, the gain, and why anything ran dense.

        May be called at any time, as may `to_dict`; waits for a device that has not yet finished.
        """
        from chipsparse.report.summary import as_text, facts

        return as_text(facts(self))

    def _repr_html_(self) -> str:
        """Return `summary` as a table for notebooks."""
        from chipsparse.report.summary import as_html, facts

        return as_html(facts(self))

    @property
    def config_taken(self) -> SparsityConfig | None:
        """The config with the schedule that the last generation had; before one, as asked for."""
        return next((plan.config for plan in self.plans.values()), self.config)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it in types of JSON, as files have it, with versions, plans and sums."""
        planned = {name: PlannedSteps.of(plan) for name, plan in self.plans.items()}
        config = self.config_taken
        written: dict[str, Any] = TypeAdapter(GenerationReport).dump_python(
            replace(self, versions=versions(), transformers=planned),
            mode="json",
            by_alias=True,
        )
        asked = None if config is None else config.words()
        written["config"] = TypeAdapter(Any).dump_python(asked, mode="json")
        written["fallbacks"] = self.fallbacks
        written["notes"] = self.notes
        return {"kind": "report", **written, "totals": self._totals()}

    def _totals(self) -> dict[str, Any]:
        by_action: dict[str, float] = {}
        for step in self.steps:
            by_action[step.action.value] = by_action.get(step.action.value, 0.0) + step.seconds
        times: dict[Part, float | None] = {"attention": None, "mlp": None}
        for layer in (layer for step in self.steps for layer in step.layers):
            if layer.seconds is not None:
                times[layer.part] = (times[layer.part] or 0.0) + layer.seconds
        return {
            "steps": dict(self.actions()),
            "calls": len(self.steps),
            "seconds": sum(step.seconds for step in self.steps),
            "seconds_by_action": by_action,
            "attention_seconds": times["attention"],
            "mlp_seconds": times["mlp"],
            "attention_kept": mean(step.attention_kept for step in self.steps),
            "mlp_kept": mean(step.mlp_kept for step in self.steps),
            "bytes_to_device": sum(step.bytes_to_device for step in self.steps),
            "bytes_to_host": sum(step.bytes_to_host for step in self.steps),
        }


def versions() -> dict[str, str | None]:
    """Return the versions that numbers depend on; None for what is not installed."""
    return {
        "chipsparse": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: package_version(name) for name in ("triton", "diffusers")},
    }


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None without any."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None

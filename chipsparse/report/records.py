"""The records of a generation: its calls, their layers, and what its report says of them all.

The same classes are filled during the calls, written by `GenerationReport.to_dict`, and read from
files by pydantic. Times are in seconds, sizes in bytes, shares between 0 and 1; None is not known.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias, TypeVar

import torch
from pydantic import Field, GetPydanticSchema, PlainSerializer

from chipsparse.common.bounded import Count, Index, Number
from chipsparse.config import Action, Part, SparsityConfig
from chipsparse.reasons.reason import Level, Reason
from chipsparse.sparse.plan import SparsityPlan


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
    # Of every step; None: their number is not known, or guidance branches differ in them.
    actions: list[Action] | None = None
    # The `ModelLayout` of its last call, with tokens and layers.
    layout: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: SparsityPlan) -> PlannedSteps:
        """Return a plan in words and numbers."""
        layout = plan.layout
        sizes = {**dataclasses.asdict(layout), "tokens": layout.tokens, "layers": layout.layers}
        is_one_list = plan.steps is not None and len(plan.schedule.timetable.by_branch) == 1
        actions = list(plan.actions()) if is_one_list else None
        return cls(plan.describe(), actions, sizes)


@dataclass
class GenerationRecord:
    """What a report tells of a generation, from the config that was asked for to its calls."""

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

    @property
    def fallbacks(self) -> list[str]:
        """What runs dense, or denser than asked, in sentences."""
        return [reason.text for reason in self.reasons if reason.level is Level.FALLBACK]

    @property
    def notes(self) -> list[str]:
        """Whatever else is worth knowing, in sentences."""
        return [reason.text for reason in self.reasons if reason.level is not Level.FALLBACK]

    def actions(self) -> Counter[str]:
        """Return the number of denoising steps by action, each counted once, not per branch."""
        return Counter({record.place: record.action.value for record in self.steps}.values())


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None without any."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None

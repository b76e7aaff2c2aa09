"""The file of `chipsparse generate --report`: its transformer calls, by denoising step."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from chipsparse.cli.pages.records import (
    Clips,
    Count,
    FileRecord,
    Index,
    Number,
    QualityPoint,
    Record,
    Settings,
    within,
)
from chipsparse.cli.views.units import shortened
from chipsparse.config import Part
from chipsparse.report.nothing_sparse import NOTHING

Action = Literal["dense", "refresh", "sparse", "skip"]
ACTIONS: tuple[Action, ...] = ("dense", "refresh", "sparse", "skip")
LONGEST_LABEL = 40  # of a prompt among others


class LayerCall(Record):
    """A layer's attention or MLP in one transformer call; see `LayerRecord`."""

    layer: Index
    part: Part
    action: Action
    kept: Number


class Call(Record):
    """A transformer call; see `StepRecord` for what the values are."""

    generation: Index = 0
    step: Index
    steps_total: Index | None = None
    action: Action
    finished: bool = False
    seconds: Number | None = None
    layers: Sequence[LayerCall] = ()
    forecast: bool = False
    corrected: bool = False
    bytes_to_device: Count
    bytes_to_host: Count
    cache_bytes: Count | None = None
    host_bytes: Count | None = None
    allocated_bytes: Count | None = None
    peak_allocated_bytes: Count | None = None


@dataclass(frozen=True)
class Cell:
    """What one layer, or all of them, did at one step, or is to do.

    Attributes:
        kept: share that was computed.
    """

    action: Action
    kept: float


@dataclass(frozen=True)
class Step:
    """All calls of a denoising step, one for each guidance branch.

    Attributes:
        number: its place on the charts, from 0; steps of later sections follow.
        name: its number, with that of its section where there are several.
    """

    number: int
    name: str
    calls: Sequence[Call]

    @property
    def action(self) -> Action:
        """What the calls did, the fullest of it."""
        return fullest(call.action for call in self.calls)

    @property
    def action_text(self) -> str:
        """The action, and what else a table says of it."""
        done = self.action if self.finished else f"{self.action}, broke off"
        how = [name for name in ("forecast", "corrected") if self._any(name)]
        return ", ".join(["skipped", *how]) if how else done

    def _any(self, name: str) -> bool:
        return any(getattr(call, name) for call in self.calls)

    @property
    def seconds(self) -> float:
        """Of all calls together; 0 where none was measured."""
        return sum(call.seconds or 0.0 for call in self.calls)

    @property
    def finished(self) -> bool:
        """Whether every call came to its end."""
        return all(call.finished for call in self.calls)

    def cells(self, part: Part) -> dict[int, Cell]:
        """What every layer's part did, its share the mean over calls; nothing of a skipped step."""
        found: dict[int, list[LayerCall]] = {}
        for call in self.calls:
            for each in call.layers:
                if each.part == part:
                    found.setdefault(each.layer, []).append(each)
        return {
            layer: Cell(
                fullest(each.action for each in calls), statistics.fmean(c.kept for c in calls)
            )
            for layer, calls in found.items()
        }

    def computed(self, part: Part) -> float | None:
        """Mean share over all layers: 1 where all was computed, 0 where the step was skipped."""
        if self.action == "skip":
            return 0.0
        shares = [cell.kept for cell in self.cells(part).values()]
        return statistics.fmean(shares) if shares else None

    def largest(self, name: str) -> float | None:
        """The largest value of a field of its calls; None where it was not recorded."""
        values = (getattr(call, name) for call in self.calls)
        return max((value for value in values if value is not None), default=None)


def fullest(actions: Iterable[Action]) -> Action:
    """The action of several that computes most."""
    return min(actions, key=ACTIONS.index)


class Lora(Record):
    """A LoRA and its strength."""

    file: str
    scale: Number


class Request(Record):
    """Prompt and settings, where the command wrote the file."""

    prompt: str = ""
    negative_prompt: str = ""
    profile: str = ""
    quality: str = ""
    scheduler: str = ""
    flow_shift: Number | None = None
    image: str = ""
    strength: Number | None = None
    seed: Count | None = None
    dtype: str = ""
    settings: Settings = Settings()
    loras: Sequence[Lora] = ()
    warnings: Sequence[str] = ()
    command: Sequence[str] = ()


class Comparison(Record):
    """The sparse generation against the dense one; a PSNR of None where both are the same."""

    speedup: Number
    psnr_db: Number | None = None
    ssim: Number | None = None


class Plan(Record):
    """What was planned for a transformer."""

    schedule: str


def _clip_name(files: object) -> object:
    """``out.png`` for the numbered frames ``out-000.png``, ``out-001.png``, ..."""
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        return files  # a report of an older version has the name alone
    first = Path(files[0]) if files else Path()
    if len(files) > 1:
        first = first.with_name(first.stem.rpartition("-")[0] + first.suffix)
    return str(first) if files else ""


class Generation(FileRecord):
    """A generation; `steps` are its transformer calls."""

    kind = "generation"
    marks = frozenset({"schema", "steps", "totals"})
    always = ("config",)

    location: str = within("pipeline", "location", "")
    pipeline: str = within("pipeline", "class", "")
    device: str = within("device", "name", "")
    device_type: str = within("device", "type", "")
    dtype: str = ""
    versions: Mapping[str, str | None] = {}
    transformers: Mapping[str, Plan] = {}
    error: str | None = None
    steps: Sequence[Call] = ()
    fallbacks: Sequence[str] = ()
    notes: Sequence[str] = ()
    nothing_sparse: str | None = None
    backends: Mapping[str, str] = {}
    passed_over: Mapping[str, dict[str, str]] = {}
    cache_bytes: Count = within("totals", "cache_bytes", 0)
    host_bytes: Count = within("totals", "host_bytes", 0)
    request: Request = Request()
    comparison: Comparison | None = None
    denoising_seconds: Mapping[str, Number] = {}
    files: Mapping[str, Annotated[str, BeforeValidator(_clip_name)]] = {}

    @cached_property
    def by_step(self) -> list[Step]:
        """Its denoising steps, section by section."""
        step, found, first = attrgetter("step"), list[Step](), 0
        sections = [[*calls] for _, calls in groupby(self.steps, attrgetter("generation"))]
        for section, calls in enumerate(sections, start=1):
            of = f" of section {section}" if len(sections) > 1 else ""
            for number, same in groupby(sorted(calls, key=step), step):
                found.append(Step(first + number, f"{number}{of}", [*same]))
            first = found[-1].number + 1
        return found

    @cached_property
    def steps_left(self) -> int:
        """How many the last section has still to make."""
        calls = self.by_step[-1].calls if self.steps else ()
        return max((max(0, (each.steps_total or 0) - each.step - 1) for each in calls), default=0)

    @property
    def steps_total(self) -> int:
        """Of the schedules, also those that a generation leaves out which starts from an image."""
        return self.by_step[-1].number + 1 + self.steps_left if self.steps else 0

    @property
    def steps_asked(self) -> int:
        """How many steps there were to be in the sections that were begun."""
        return len(self.by_step) + self.steps_left

    @property
    def steps_done(self) -> int:
        """How many came to their end."""
        return sum(step.finished for step in self.by_step)

    @cached_property
    def layers(self) -> int:
        """Of the model; 0 where none was recorded."""
        return 1 + max((each.layer for call in self.steps for each in call.layers), default=-1)

    def cells(self, part: Part) -> dict[tuple[int, int], Cell]:
        """What each layer's part did at each step."""
        found = {}
        for step in self.by_step:
            cells = step.cells(part)
            if step.action == "skip":
                cells = dict.fromkeys(range(self.layers), Cell("skip", 0.0))
            found.update({(layer, step.number): cell for layer, cell in cells.items()})
        return found

    def over_steps(self, name: str) -> list[float | None]:
        """The largest value of a field at each step; None where it was not recorded."""
        found = {step.number: step.largest(name) for step in self.by_step}
        return [found.get(number) for number in range(self.steps_total)]

    @property
    def actions(self) -> str:
        """How many steps took each action."""
        counts = Counter(step.action for step in self.by_step)
        return ", ".join(f"{counts[name]} {name}" for name in ACTIONS if counts[name])

    @property
    def seconds(self) -> float:
        """Of the denoising; 0 where it was not measured."""
        measured = sum(step.seconds for step in self.by_step)
        return self.denoising_seconds.get("sparse", measured)

    @property
    def dense_step_seconds(self) -> float | None:
        """A step's mean in the dense run; None without one."""
        dense = self.denoising_seconds.get("dense")
        return dense / self.steps_asked if dense is not None and self.steps_asked else None

    @property
    def all_warnings(self) -> Sequence[str]:
        """What the command warned of; a report from Python has the gravest of it."""
        nothing, warnings = self.nothing_sparse, self.request.warnings
        if nothing is None or any(each.startswith(NOTHING) for each in warnings):
            return warnings
        return [nothing, *warnings]

    @property
    def title(self) -> str:
        """The headline."""
        return self.request.prompt or "A generation"

    @property
    def clips(self) -> Clips:
        """What it wrote."""
        wanted = {"sparse": self.files.get("output"), "dense": self.files.get("dense")}
        return Clips({label: name for label, name in wanted.items() if name}, reference="dense")

    def points(self, name: str) -> list[QualityPoint]:
        """For the chart that joins several files, by the file's name."""
        found, request = self.comparison, self.request
        if found is None or found.psnr_db is None:
            return []
        seed = "" if request.seed is None else f"seed {request.seed}"
        named = [name, shortened(request.prompt, LONGEST_LABEL), seed]
        label = ", ".join(text for text in named if text)
        return [QualityPoint(label, found.speedup, found.psnr_db)]

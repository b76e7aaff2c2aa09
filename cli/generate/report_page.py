"""The sections that a page shows of a generation's report: its transformer calls, step by step."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from chipsparse.cli.generate.record import GenerationResult
from chipsparse.cli.views import sections as view
from chipsparse.cli.views import units
from chipsparse.cli.views.budget_map import Cell, budget_map
from chipsparse.cli.views.colours import ACTIONS, INK, SERIES
from chipsparse.cli.views.sections import Chart, Section
from chipsparse.common.byte_sizes import format_bytes
from chipsparse.config import Part as LayerPart
from chipsparse.reasons.reason import NOTHING_SPARSE
from chipsparse.report.generation import GenerationReport
from chipsparse.report.records import LayerRecord, StepRecord, mean

if TYPE_CHECKING:
    from chipsparse.cli.views.canvas import Canvas

PARTS: dict[LayerPart, str] = {"attention": "attention columns", "mlp": "MLP neurons"}
BAR = 0.84  # of a step's width
HELD = {
    "cache_bytes": ("caches, wherever they live", "-"),
    "host_bytes": ("caches in host memory", "--"),
    "allocated_bytes": ("allocated on the GPU behind the step", "-"),
}
NOTHING_RECORDED = (
    "Nothing was sparse, or the generation broke off before anything could be recorded."
)


@dataclass(frozen=True)
class Step:
    """All calls of a denoising step, one for each guidance branch."""

    number: int  # place on the charts, from 0; steps of later sections follow
    name: str  # its number, with that of its section where there are several
    calls: Sequence[StepRecord]

    @property
    def action(self) -> str:
        """The action of the call that computed most."""
        return _fullest(self.calls)

    @property
    def seconds(self) -> float:
        """The time of all calls together; 0 where none was measured."""
        return sum(call.seconds for call in self.calls)

    @property
    def finished(self) -> bool:
        """False where a call of the step broke off."""
        return all(call.finished for call in self.calls)

    def layers(self, part: LayerPart) -> list[LayerRecord]:
        """Return the records of one part in all calls of the step."""
        return [layer for call in self.calls for layer in call.layers if layer.part == part]

    @property
    def row(self) -> list[str]:
        """The cells of the step in the table: action, time and computed shares."""
        is_skipped = self.action == "skip"
        how = [name for name in ("forecast", "corrected") if any(map(attrgetter(name), self.calls))]
        done = self.action if self.finished else f"{self.action}, broke off"
        shares = [
            0.0 if is_skipped else mean(layer.kept for layer in self.layers(part)) for part in PARTS
        ]
        return [
            self.name,
            ", ".join(["skipped", *how]) if how else done,
            units.seconds_text(self.seconds) if self.seconds else "",
            *("" if share is None else units.percent(share) for share in shares),
            format_bytes(sum(call.bytes_to_device for call in self.calls)),
            format_bytes(sum(call.bytes_to_host for call in self.calls)),
        ]


def _fullest(records: Iterable[StepRecord | LayerRecord]) -> str:
    return min((record.action.value for record in records), key=list(ACTIONS).index)


def read_steps(report: GenerationReport) -> list[Step]:
    """Return the denoising steps, section by section."""
    steps = list[Step]()
    first = 0
    sections = [[*calls] for _, calls in groupby(report.steps, attrgetter("generation"))]
    for section, calls in enumerate(sections, start=1):
        suffix = f" of section {section}" if len(sections) > 1 else ""
        in_order = sorted(calls, key=attrgetter("step"))
        for number, same in groupby(in_order, attrgetter("step")):
            steps.append(Step(first + number, f"{number}{suffix}", [*same]))
        first = steps[-1].number + 1
    return steps


def report_sections(result: GenerationResult) -> list[Section]:
    """Return the sections of the page; those without data say how to get some."""
    report = result.report or GenerationReport()
    steps = read_steps(report)
    last = steps[-1].calls if steps else ()
    left = max([0, *((call.steps_total or 0) - call.step - 1 for call in last)])
    total = steps[-1].number + 1 + left if steps else 0
    asked = len(steps) + left
    clips = {"sparse": result.files.get("output"), "dense": result.files.get("dense")}
    names = {label: _clip_name(files) for label, files in clips.items() if files}
    backends = [
        (op, name, "; ".join(map(": ".join, report.passed_over.get(op, {}).items())))
        for op, name in report.backends.items()
    ]
    dense_mean = result.dense.denoising_seconds / asked if result.dense and asked else None
    timed = any(step.seconds for step in steps)
    sections = [
        Section("", _head(result, report, steps, asked=asked)),
        Section(
            "Sample frames",
            [view.Clips(names, reference="dense")],
            "Evenly spaced frames, made smaller for this page. Their numbers stand below.",
        ),
        Section(
            "Steps",
            [
                _time_chart(steps, total, dense_mean),
                view.Table(
                    ["step", "action", "time", "attention", "MLP", "to device", "to host"],
                    [step.row for step in steps],
                    texts=2,
                    folded="All steps as a table",
                ),
            ]
            if timed
            else [],
            "The time of every denoising step, all guidance branches together. Skipped steps take "
            "next to nothing.",
            missing="This generation came to the end of no transformer call.",
        ),
        Section(
            "Budget of each layer and step",
            [_map(steps, total, part) for part in PARTS],
            "A row for each layer, a column for each step. A cell says more under the pointer.",
            missing=NOTHING_RECORDED,
        ),
        Section(
            "Memory over steps",
            [_memory_chart(steps, total)],
            "The size of the caches behind each step and, on a GPU, all that PyTorch had allocated "
            "there.",
            missing=NOTHING_RECORDED,
        ),
        Section(
            "What ran where",
            [
                view.Items(report.fallbacks, "Ran dense, or denser than asked"),
                view.Items(report.notes, "Worth knowing"),
                view.Table(["operation", "ran on", "passed over"], backends, 3, "Backends"),
            ],
            "" if report.fallbacks else "Nothing ran dense, or denser than the profile asks.",
        ),
    ]
    if result.comparison is None:
        how = "They are there with generate --compare --report."
        sections.insert(1, Section("Quality and speed", [], missing=how))
    if result.request.command:
        text = "Files are named without their folders."
        sections.append(Section("Run it again", [view.Code(result.request.command)], text))
    return [replace(section, where="page") for section in sections]


def _head(
    result: GenerationResult,
    report: GenerationReport,
    steps: Sequence[Step],
    *,
    asked: int,
) -> list[view.Part]:
    request = result.request
    done = sum(step.finished for step in steps)
    parts: list[view.Part] = []
    error = report.error or result.error
    if error is not None:
        where = f"after {done} of {asked} steps" if steps else "at its start"
        parts.append(view.Alert(f"This generation failed {where}: {error}", "error"))
    elif done < asked:
        text = f"This generation was not finished: {done} of {asked} steps were."
        parts.append(view.Alert(text, "error"))
    is_said = any(text.startswith(NOTHING_SPARSE) for text in request.warnings)
    if report.nothing_sparse and not is_said:
        parts.append(view.Alert(report.nothing_sparse))
    parts += map(view.Alert, request.warnings)
    dense = result.dense
    comparison = result.comparison
    if comparison is not None:
        detail = "" if dense is None else f"dense {units.seconds_text(dense.denoising_seconds)}"
        parts.append(view.Tile(units.times(comparison.speedup), "as fast as dense", detail))
        ssim = "" if comparison.ssim is None else f"SSIM {comparison.ssim:.4f}"
        parts.append(view.Tile(units.decibels(comparison.psnr_db), "PSNR against dense", ssim))
    seconds = sum(step.seconds for step in steps)
    if result.sparse is not None:
        seconds = result.sparse.denoising_seconds
    if seconds:
        parts.append(view.Tile(units.seconds_text(seconds), "denoising"))
    counts = Counter(step.action for step in steps)
    actions = ", ".join(f"{counts[name]} {name}" for name in ACTIONS if counts[name])
    number = str(done) if done == asked else f"{done} of {asked}"
    parts.append(view.Tile(number, "step" if asked == 1 else "steps", actions))
    if report.cache_bytes:
        on_host = f"{format_bytes(report.host_bytes)} of them in host memory"
        detail = on_host if report.host_bytes else ""
        parts.append(view.Tile(format_bytes(report.cache_bytes), "caches at most", detail))
    schedules = dict.fromkeys(planned.schedule for planned in report.transformers.values())
    facts = [
        ("model", report.pipeline.location or request.model),
        ("pipeline", report.pipeline.class_name or request.pipeline_class),
        ("quality", "" if request.profile else report.quality or ""),
        *result.made_with,
        ("not shown", request.negative_prompt or ""),
        ("seed", "" if request.seed is None else str(request.seed)),
        ("schedule", "; ".join(schedules)),
        ("device", "" if report.device is None else report.device.name),
        ("versions", ", ".join(f"{n} {v}" for n, v in report.versions.items() if v)),
    ]
    return [*parts, view.Facts(facts)]


def _map(steps: Sequence[Step], total: int, part: LayerPart) -> Chart | None:
    """Return the map of one part of all layers; None where nothing of it was recorded."""
    numbers = [layer.layer for step in steps for name in PARTS for layer in step.layers(name)]
    layers = 1 + max(numbers, default=-1)
    cells: dict[tuple[int, int], Cell] = {}
    for step in steps:
        by_layer: dict[int, list[LayerRecord]] = defaultdict(list)
        for layer in step.layers(part):
            by_layer[layer.layer].append(layer)
        for number in range(layers):
            if step.action == "skip":
                cells[number, step.number] = Cell("skip", 0.0)
            elif records := by_layer.get(number):
                kept = statistics.fmean(record.kept for record in records)
                cells[number, step.number] = Cell(_fullest(records), kept)
    if not cells:
        return None
    return budget_map(cells, layers=layers, steps=total, caption=f"Computed {PARTS[part]}")


def _time_chart(steps: Sequence[Step], total: int, dense_mean: float | None) -> Chart:
    """Return the time of each step, with the mean of the dense run's where it is known."""
    unit, size = units.seconds_unit(step.seconds for step in steps)

    def draw(canvas: Canvas) -> None:
        canvas.steps_axis(total, f"time, {unit}")
        for action, colour in ACTIONS.items():
            own = [step for step in steps if step.action == action]
            marks = []
            for step in own:
                if step.seconds:
                    tip = f"step {step.name}, {action}: {units.seconds_text(step.seconds)}"
                    marks.append((step.number, step.seconds / size, tip))
            if own:
                canvas.bars(marks, colour, action, BAR)
        if dense_mean is not None:
            label = f"mean step of the dense run, {units.seconds_text(dense_mean)}"
            canvas.axes.axhline(dense_mean / size, color=INK, linestyle="--", label=label)

    return Chart("time of each denoising step", draw, "Time of each step")


def _memory_chart(steps: Sequence[Step], total: int) -> Chart | None:
    """Return the memory that was held behind each step; None where none was recorded."""
    held: dict[str, list[int | None]] = {name: [None] * total for name in HELD}
    for name, values in held.items():
        for step in steps:
            known = [value for call in step.calls if (value := getattr(call, name)) is not None]
            values[step.number] = max(known, default=None)
    sizes = [value for values in held.values() for value in values if value]
    if not sizes:
        return None
    unit, size = units.bytes_unit(sizes)

    def draw(canvas: Canvas) -> None:
        canvas.steps_axis(total, f"memory, {unit}")
        for (name, values), colour in zip(held.items(), SERIES, strict=False):
            if any(values):
                label, line = HELD[name]
                scaled = [None if value is None else value / size for value in values]
                canvas.stairs(scaled, colour, line, label)
        canvas.axes.set_ylim(bottom=0)

    return Chart("memory held behind each step", draw, "Memory held behind each step")


def _clip_name(files: Sequence[str]) -> str:
    """Return ``out.png`` for the numbered frames ``out-000.png``, ``out-001.png``, ..."""
    first = Path(files[0])
    if len(files) > 1:
        first = first.with_name(first.stem.rpartition("-")[0] + first.suffix)
    return str(first)

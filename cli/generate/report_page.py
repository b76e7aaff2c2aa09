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

from chipsparse.cli.views.budget_map import Cell, budget_map
from chipsparse.cli.views.sections import (
    ACTIONS,
    INK,
    SERIES,
    Alert,
    Chart,
    Clips,
    Code,
    Facts,
    Items,
    Part,
    Section,
    Table,
    Tile,
)
from chipsparse.cli.views.units import (
    bytes_unit,
    decibels,
    percent,
    seconds_text,
    seconds_unit,
    times,
)
from chipsparse.common.byte_sizes import format_bytes
from chipsparse.config import Part as LayerPart
from chipsparse.report.nothing_sparse import NOTHING
from chipsparse.report.record import Call, Layer, ReportRecord

if TYPE_CHECKING:
    from chipsparse.cli.generate.record import GenerationResult
    from chipsparse.cli.views.charts import Canvas

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
    """All calls of a denoising step, one for each guidance branch.

    Attributes:
        number: its place on the charts, from 0; steps of later sections follow.
        name: its number, with that of its section where there are several.
    """

    number: int
    name: str
    calls: Sequence[Call]

    @property
    def action(self) -> str:
        """The action of the call that computed most."""
        return _fullest(call.action for call in self.calls)

    @property
    def action_text(self) -> str:
        """The action, and how it was made."""
        done = self.action if self.finished else f"{self.action}, broke off"
        how = [name for name in ("forecast", "corrected") if any(map(attrgetter(name), self.calls))]
        return ", ".join(["skipped", *how]) if how else done

    @property
    def seconds(self) -> float:
        """The time of all calls together; 0 where none was measured."""
        return sum(call.seconds or 0.0 for call in self.calls)

    @property
    def finished(self) -> bool:
        """True where every call came to its end."""
        return all(call.finished for call in self.calls)

    def most(self, name: str) -> int | None:
        """Return the largest number of this name among the calls; None where none has one."""
        return max(
            (n for call in self.calls if (n := getattr(call, name)) is not None), default=None
        )

    def cells(self, part: LayerPart) -> dict[int, Cell]:
        """Return each layer's action and the mean share over calls; empty for a skipped step."""
        by_layer: dict[int, list[Layer]] = defaultdict(list)
        for call in self.calls:
            for layer in call.layers:
                if layer.part == part:
                    by_layer[layer.layer].append(layer)
        return {
            number: Cell(
                _fullest(layer.action for layer in layers),
                statistics.fmean(layer.kept for layer in layers),
            )
            for number, layers in by_layer.items()
        }


def _fullest(actions: Iterable[str]) -> str:
    return min(actions, key=list(ACTIONS).index)


def read_steps(record: ReportRecord) -> list[Step]:
    """Return the denoising steps, section by section."""
    step, steps, first = attrgetter("step"), list[Step](), 0
    sections = [[*calls] for _, calls in groupby(record.steps, attrgetter("generation"))]
    for section, calls in enumerate(sections, start=1):
        suffix = f" of section {section}" if len(sections) > 1 else ""
        for number, same in groupby(sorted(calls, key=step), step):
            steps.append(Step(first + number, f"{number}{suffix}", [*same]))
        first = steps[-1].number + 1
    return steps


def report_sections(result: GenerationResult) -> list[Section]:
    """Return the sections of the page; those without data say how to get some."""
    record = result.report or ReportRecord()
    steps = read_steps(record)
    ends = [(call.steps_total or 0) - call.step - 1 for call in (steps[-1].calls if steps else ())]
    left = max([0, *ends])  # steps that the last section has still to make
    total = steps[-1].number + 1 + left if steps else 0
    clips = {"sparse": result.files.get("output"), "dense": result.files.get("dense")}
    names = {label: _clip_name(files) for label, files in clips.items() if files}
    passed = {
        op: "; ".join(map(": ".join, reasons.items())) for op, reasons in record.passed_over.items()
    }
    backends = [(op, name, passed.get(op, "")) for op, name in record.backends.items()]
    asked = len(steps) + left
    mean = result.dense.denoising_seconds / asked if result.dense and asked else None
    timed = any(step.seconds for step in steps)
    sections = [
        Section("", _head(result, record, steps, asked=asked)),
        Section(
            "Sample frames",
            [Clips(names, reference="dense")],
            "Evenly spaced frames, made smaller for this page. Their numbers stand below.",
        ),
        Section(
            "Steps",
            [_time_chart(steps, total, mean), _steps_table(steps)] if timed else [],
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
                Items(record.fallbacks, "Ran dense, or denser than asked"),
                Items(record.notes, "Worth knowing"),
                Table(["operation", "ran on", "passed over"], backends, 3, "Backends"),
            ],
            "" if record.fallbacks else "Nothing ran dense, or denser than the profile asks.",
        ),
    ]
    if result.comparison is None:
        how = "They are there with generate --compare --report."
        sections.insert(1, Section("Quality and speed", [], missing=how))
    if result.request.command:
        text = "Files are named without their folders."
        sections.append(Section("Run it again", [Code(result.request.command)], text))
    return [replace(section, where="page") for section in sections]


def _head(
    result: GenerationResult, record: ReportRecord, steps: Sequence[Step], *, asked: int
) -> list[Part]:
    """Return warnings, headline numbers and settings."""
    request, done = result.request, sum(step.finished for step in steps)
    error = record.error or result.error
    alerts = []
    if error is not None:
        where = f"after {done} of {asked} steps" if steps else "at its start"
        alerts.append(Alert(f"This generation failed {where}: {error}", "error"))
    elif done < asked:
        text = f"This generation was not finished: {done} of {asked} steps were."
        alerts.append(Alert(text, "error"))
    warnings = list(request.warnings)
    if record.nothing_sparse and not any(text.startswith(NOTHING) for text in warnings):
        warnings.insert(0, record.nothing_sparse)
    tiles, dense = [], result.dense
    if (comparison := result.comparison) is not None:
        detail = "" if dense is None else f"dense {seconds_text(dense.denoising_seconds)}"
        tiles.append(Tile(times(comparison.speedup), "as fast as dense", detail))
        ssim = "" if comparison.ssim is None else f"SSIM {comparison.ssim:.4f}"
        tiles.append(Tile(decibels(comparison.psnr_db), "PSNR against dense", ssim))
    seconds = sum(step.seconds for step in steps)
    if result.sparse is not None:
        seconds = result.sparse.denoising_seconds
    if seconds:
        tiles.append(Tile(seconds_text(seconds), "denoising"))
    counts = Counter(step.action for step in steps)
    actions = ", ".join(f"{counts[name]} {name}" for name in ACTIONS if counts[name])
    number = str(done) if done == asked else f"{done} of {asked}"
    tiles.append(Tile(number, "step" if asked == 1 else "steps", actions))
    totals = record.totals
    if totals.cache_bytes:
        away = f"{format_bytes(totals.host_bytes)} of them in host memory"
        detail = away if totals.host_bytes else ""
        tiles.append(Tile(format_bytes(totals.cache_bytes), "caches at most", detail))
    schedules = dict.fromkeys(called.schedule for called in record.transformers.values())
    facts = [
        ("model", record.pipeline.location or request.model),
        ("pipeline", record.pipeline.class_name or request.pipeline_class),
        ("quality", "" if request.profile else record.quality or ""),
        *result.made_with,
        ("not shown", request.negative_prompt or ""),
        ("seed", "" if request.seed is None else str(request.seed)),
        ("schedule", "; ".join(schedules)),
        ("device", "" if record.device is None else record.device.name),
        ("versions", ", ".join(f"{n} {v}" for n, v in record.versions.items() if v)),
    ]
    return [*alerts, *map(Alert, warnings), *tiles, Facts(facts)]


def _steps_table(steps: Sequence[Step]) -> Table:
    """Return all steps with their times, mean shares over layers, and copies."""
    rows = []
    for step in steps:
        cells = [step.action_text, seconds_text(step.seconds) if step.seconds else ""]
        for part in PARTS:
            shares = [cell.kept for cell in step.cells(part).values()]
            shares = [0.0] if step.action == "skip" else shares
            cells.append(percent(statistics.fmean(shares)) if shares else "")
        for name in ("bytes_to_device", "bytes_to_host"):
            cells.append(format_bytes(sum(getattr(call, name) for call in step.calls)))
        rows.append([step.name, *cells])
    columns = ["step", "action", "time", "attention", "MLP", "to device", "to host"]
    return Table(columns, rows, 2, "All steps as a table")


def _map(steps: Sequence[Step], total: int, part: LayerPart) -> Chart | None:
    """Return the map of one part of all layers; None where nothing of it was recorded."""
    layers = 1 + max((x.layer for s in steps for c in s.calls for x in c.layers), default=-1)
    cells: dict[tuple[int, int], Cell] = {}
    for step in steps:
        skipped = dict.fromkeys(range(layers), Cell("skip", 0.0))
        own = skipped if step.action == "skip" else step.cells(part)
        cells.update({(layer, step.number): cell for layer, cell in own.items()})
    if not cells:
        return None
    return budget_map(cells, layers=layers, steps=total, caption=f"Computed {PARTS[part]}")


def _time_chart(steps: Sequence[Step], total: int, mean: float | None) -> Chart:
    """Return the time of each step, with the mean of the dense run's where it is known."""
    unit, size = seconds_unit(step.seconds for step in steps)

    def draw(canvas: Canvas) -> None:
        canvas.steps_axis(total, f"time, {unit}")
        for action, colour in ACTIONS.items():
            own = [step for step in steps if step.action == action]
            marks = [
                (s.number, s.seconds / size, f"step {s.name}, {action}: {seconds_text(s.seconds)}")
                for s in own
                if s.seconds
            ]
            if own:
                canvas.bars(marks, colour, action, BAR)
        if mean is not None:
            label = f"mean step of the dense run, {seconds_text(mean)}"
            canvas.axes.axhline(mean / size, color=INK, linestyle="--", label=label)

    return Chart("time of each denoising step", draw, "Time of each step")


def _memory_chart(steps: Sequence[Step], total: int) -> Chart | None:
    """Return the memory that was held behind each step; None where none was recorded."""
    series = {name: {step.number: step.most(name) for step in steps} for name in HELD}
    known = [value for values in series.values() for value in values.values() if value]
    if not known:
        return None
    unit, size = bytes_unit(known)

    def draw(canvas: Canvas) -> None:
        canvas.steps_axis(total, f"memory, {unit}")
        for (name, values), colour in zip(series.items(), SERIES, strict=False):
            if any(values.values()):
                held = [values.get(number) for number in range(total)]
                label, line = HELD[name]
                scaled = [None if value is None else value / size for value in held]
                canvas.stairs(scaled, colour, line, label)
        canvas.axes.set_ylim(bottom=0)

    return Chart("memory held behind each step", draw, "Memory held behind each step")


def _clip_name(files: Sequence[str]) -> str:
    """Return ``out.png`` for the numbered frames ``out-000.png``, ``out-001.png``, ..."""
    first = Path(files[0])
    if len(files) > 1:
        first = first.with_name(first.stem.rpartition("-")[0] + first.suffix)
    return str(first)

"""The sections that a page shows of a generation's report: its transformer calls, step by step."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from chipsparse.cli.views.budget_map import Cell, budget_map
from chipsparse.cli.views.sections import (
    ACTIONS,
    FIRST,
    INK,
    SECOND,
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
LOWER = 230  # pixels of a chart that says less
BAR = 0.84  # of a step's width
HELD = {
    "cache_bytes": "caches, wherever they live",
    "host_bytes": "caches in host memory",
    "allocated_bytes": "allocated on the GPU behind the step",
    "peak_allocated_bytes": "most allocated on the GPU until then",
}
MOVED = {
    "bytes_to_device": ("to the device", "from host memory to the device"),
    "bytes_to_host": ("to host memory", "to host memory"),
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

    def computed(self, part: LayerPart) -> float | None:
        """Return the mean share over all layers; 0 where the step was skipped."""
        if self.action == "skip":
            return 0.0
        shares = [cell.kept for cell in self.cells(part).values()]
        return statistics.fmean(shares) if shares else None


def _fullest(actions: Iterable[str]) -> str:
    return min(actions, key=list(ACTIONS).index)


class ReportPage:
    """The sections that a page shows of a generation's report."""

    def __init__(self, result: GenerationResult) -> None:
        self.result = result
        self.record = result.report or ReportRecord()

    @cached_property
    def steps(self) -> list[Step]:
        """The denoising steps, section by section."""
        step, steps, first = attrgetter("step"), list[Step](), 0
        calls_of = groupby(self.record.steps, attrgetter("generation"))
        sections = [[*calls] for _, calls in calls_of]
        for section, calls in enumerate(sections, start=1):
            suffix = f" of section {section}" if len(sections) > 1 else ""
            for number, same in groupby(sorted(calls, key=step), step):
                steps.append(Step(first + number, f"{number}{suffix}", [*same]))
            first = steps[-1].number + 1
        return steps

    @cached_property
    def steps_left(self) -> int:
        """How many steps the last section has still to make."""
        calls = self.steps[-1].calls if self.steps else ()
        return max((max(0, (call.steps_total or 0) - call.step - 1) for call in calls), default=0)

    @property
    def steps_total(self) -> int:
        """The steps of the schedules, with those that a start from an image leaves out."""
        return self.steps[-1].number + 1 + self.steps_left if self.steps else 0

    @cached_property
    def layers(self) -> int:
        """The number of layers; 0 where none was recorded."""
        return 1 + max(
            (layer.layer for call in self.record.steps for layer in call.layers), default=-1
        )

    @property
    def seconds(self) -> float:
        """The time of the denoising; 0 where it was not measured."""
        sparse = self.result.sparse
        measured = sum(step.seconds for step in self.steps)
        return measured if sparse is None else sparse.denoising_seconds

    @property
    def asked(self) -> int:
        """How many steps there were to be in the sections that were begun."""
        return len(self.steps) + self.steps_left

    def sections(self) -> list[Section]:
        """Return all sections; those without data say how to get some."""
        record, result = self.record, self.result
        clips = {"sparse": result.files.get("output"), "dense": result.files.get("dense")}
        names = {label: _clip_name(files) for label, files in clips.items() if files}
        passed = {
            op: "; ".join(map(": ".join, found.items())) for op, found in record.passed_over.items()
        }
        backends = [(op, name, passed.get(op, "")) for op, name in record.backends.items()]
        time = self.time_chart()
        sections = [
            Section("", self.head()),
            Section(
                "Sample frames",
                [Clips(names, reference="dense")],
                "Evenly spaced frames, made smaller for this page. Their numbers stand below.",
            ),
            Section(
                "Steps",
                [time, self.share_chart(), self.steps_table()] if time else [],
                "The time of every denoising step, all guidance branches together, and its share "
                "of the work. Skipped steps take next to nothing.",
                missing="This generation came to the end of no transformer call.",
            ),
            Section(
                "Budget of each layer and step",
                [self.map(part) for part in PARTS] if self.layers else [],
                "A row for each layer, a column for each step. A cell says more under the pointer.",
                missing=NOTHING_RECORDED,
            ),
            Section(
                "Memory over steps",
                [self.held_chart(), self.moved_chart()],
                "The size of the caches behind each step and, on a GPU, all that PyTorch had "
                "allocated there; below, what moved between host memory and the device.",
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

    def head(self) -> list[Part]:
        """Return warnings, headline numbers and settings."""
        record, result, request = self.record, self.result, self.result.request
        done, asked = sum(step.finished for step in self.steps), self.asked
        error = record.error or result.error
        alerts = []
        if error is not None:
            where = f"after {done} of {asked} steps" if record.steps else "at its start"
            alerts.append(Alert(f"This generation failed {where}: {error}", "error"))
        elif done < asked:
            text = f"This generation was not finished: {done} of {asked} steps were."
            alerts.append(Alert(text, "error"))
        warnings = list(request.warnings)
        if record.nothing_sparse and not any(text.startswith(NOTHING) for text in warnings):
            warnings.insert(0, record.nothing_sparse)
        alerts += [Alert(text) for text in warnings]
        tiles = []
        if (comparison := result.comparison) is not None:
            dense = result.dense
            detail = "" if dense is None else f"dense {seconds_text(dense.denoising_seconds)}"
            tiles.append(Tile(times(comparison.speedup), "as fast as dense", detail))
            ssim = "" if comparison.ssim is None else f"SSIM {comparison.ssim:.4f}"
            tiles.append(Tile(decibels(comparison.psnr_db), "PSNR against dense", ssim))
        if self.seconds:
            tiles.append(Tile(seconds_text(self.seconds), "denoising"))
        counts = Counter(step.action for step in self.steps)
        actions = ", ".join(f"{counts[name]} {name}" for name in ACTIONS if counts[name])
        number = str(done) if done == asked else f"{done} of {asked}"
        tiles.append(Tile(number, "step" if asked == 1 else "steps", actions))
        totals = record.totals
        if totals.cache_bytes:
            away = f"{format_bytes(totals.host_bytes)} of them in host memory"
            detail = away if totals.host_bytes else ""
            tiles.append(Tile(format_bytes(totals.cache_bytes), "caches at most", detail))
        device = (record.device.name, record.device.type) if record.device else (request.device,)
        device = (*device, record.dtype or request.dtype)
        schedules = dict.fromkeys(called.schedule for called in record.transformers.values())
        strength = "" if request.strength is None else f", strength {request.strength:g}"
        facts = [
            ("model", record.pipeline.location or request.model),
            ("pipeline", record.pipeline.class_name or request.pipeline_class),
            ("profile", request.profile or ""),
            ("quality", request.quality or record.quality or ""),
            ("not shown", request.negative_prompt or ""),
            ("size", request.settings.size),
            ("starts from", f"{request.image}{strength}" if request.image else ""),
            ("guidance", request.settings.guidance),
            ("scheduler", request.scheduler or ""),
            ("flow shift", "" if request.flow_shift is None else f"{request.flow_shift:g}"),
            ("LoRA", ", ".join(f"{lora.file} at {lora.scale:g}" for lora in request.loras)),
            ("seed", "" if request.seed is None else str(request.seed)),
            ("schedule", "; ".join(schedules)),
            ("device", ", ".join(filter(None, device))),
            ("versions", ", ".join(f"{n} {v}" for n, v in record.versions.items() if v)),
        ]
        return [*alerts, *tiles, Facts(facts)]

    def steps_table(self) -> Table:
        """Return all steps with their times, shares and copies."""
        rows = []
        for step in self.steps:
            shares = (step.computed(part) for part in PARTS)
            moved = (sum(getattr(call, name) for call in step.calls) for name in MOVED)
            rows.append(
                [
                    step.name,
                    step.action_text,
                    seconds_text(step.seconds) if step.seconds else "",
                    *("" if share is None else percent(share) for share in shares),
                    *(format_bytes(amount) for amount in moved),
                ]
            )
        columns = ["step", "action", "time", "attention", "MLP", "to device", "to host"]
        return Table(columns, rows, 2, "All steps as a table")

    def map(self, part: LayerPart) -> Chart | None:
        """Return the map of one part of all layers; None where nothing of it was recorded."""
        cells: dict[tuple[int, int], Cell] = {}
        for step in self.steps:
            own = step.cells(part)
            if step.action == "skip":
                own = dict.fromkeys(range(self.layers), Cell("skip", 0.0))
            cells.update({(layer, step.number): cell for layer, cell in own.items()})
        if not cells:
            return None
        caption = f"Computed {PARTS[part]}"
        return budget_map(cells, layers=self.layers, steps=self.steps_total, caption=caption)

    def time_chart(self) -> Chart | None:
        """Return the time of each step; None where no time was measured."""
        if not any(step.seconds for step in self.steps):
            return None
        unit, size = seconds_unit(step.seconds for step in self.steps)
        dense = self.result.dense
        mean = dense.denoising_seconds / self.asked if dense is not None else None

        def draw(canvas: Canvas) -> None:
            canvas.steps_axis(self.steps_total, f"time, {unit}")
            for action, colour in ACTIONS.items():
                steps = [step for step in self.steps if step.action == action]
                marks = [
                    (
                        s.number,
                        s.seconds / size,
                        f"step {s.name}, {action}: {seconds_text(s.seconds)}",
                    )
                    for s in steps
                    if s.seconds
                ]
                if steps:
                    canvas.bars(marks, colour, action, BAR)
            if mean is not None:
                label = f"mean step of the dense run, {seconds_text(mean)}"
                canvas.axes.axhline(mean / size, color=INK, linestyle="--", label=label)

        return Chart("time of each denoising step", draw, "Time of each step")

    def share_chart(self) -> Chart | None:
        """Return the share that each step computed; None where nothing was recorded."""
        parts = [part for part in PARTS if any(step.cells(part) for step in self.steps)]
        if not parts:
            return None

        def draw(canvas: Canvas) -> None:
            canvas.steps_axis(self.steps_total, "computed, mean over layers")
            canvas.axes.set_ylim(0, 1.04)
            canvas.percent_axis()
            for part, colour, line in zip(parts, SERIES, ("-", "--"), strict=False):
                shares = {step.number: step.computed(part) for step in self.steps}
                values = [shares.get(number) for number in range(self.steps_total)]
                canvas.stairs(values, colour, line, PARTS[part])

        title = "share of attention columns and MLP neurons computed at each step"
        return Chart(title, draw, "Share that each step computed", LOWER)

    def held_chart(self) -> Chart | None:
        """Return the memory that was held behind each step; None where none was recorded."""
        series: dict[str, list[float | None]] = {}
        for name in HELD:
            largest = {}
            for step in self.steps:
                values = [v for call in step.calls if (v := getattr(call, name)) is not None]
                largest[step.number] = max(values, default=None)
            series[name] = [largest.get(number) for number in range(self.steps_total)]
        known = [value for values in series.values() for value in values if value]
        if not known:
            return None
        unit, size = bytes_unit(known)

        def draw(canvas: Canvas) -> None:
            canvas.steps_axis(self.steps_total, f"memory, {unit}")
            lines = ("-", "--", "-", "--")
            for (name, values), colour, line in zip(series.items(), SERIES, lines, strict=True):
                if any(values):
                    scaled = [None if value is None else value / size for value in values]
                    canvas.stairs(scaled, colour, line, HELD[name])
            canvas.axes.set_ylim(bottom=0)

        return Chart("memory held behind each step", draw, "Memory held behind each step")

    def moved_chart(self) -> Chart | None:
        """Return what moved between host and device; None where nothing did."""
        moved = {
            name: [(s, sum(getattr(call, name) for call in s.calls)) for s in self.steps]
            for name in MOVED
        }
        largest = max((amount for steps in moved.values() for _, amount in steps), default=0)
        if not largest:
            return None
        unit, size = bytes_unit([largest])

        def draw(canvas: Canvas) -> None:
            canvas.steps_axis(self.steps_total, f"moved, {unit}")
            for (name, (where, label)), shift, colour in zip(
                MOVED.items(), (-BAR / 4, BAR / 4), (FIRST, SECOND), strict=True
            ):
                marks = [
                    (
                        s.number + shift,
                        amount / size,
                        f"step {s.name}: {format_bytes(amount)} {where}",
                    )
                    for s, amount in moved[name]
                    if amount
                ]
                canvas.bars(marks, colour, label, BAR / 2)

        return Chart("bytes of caches moved at each step", draw, "Caches moved at each step", LOWER)


def _clip_name(files: Sequence[str]) -> str:
    """Return ``out.png`` for the numbered frames ``out-000.png``, ``out-001.png``, ..."""
    first = Path(files[0])
    if len(files) > 1:
        first = first.with_name(first.stem.rpartition("-")[0] + first.suffix)
    return str(first)

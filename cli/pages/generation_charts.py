"""Charts over the steps of a generation: time, work and memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes

from chipsparse.cli.pages.charts import (
    ACTIONS,
    FIRST,
    INK,
    SECOND,
    SERIES,
    Chart,
    Mark,
    box_key,
    steps_axis,
    tipped,
)
from chipsparse.cli.pages.generation_record import Generation
from chipsparse.cli.wording import seconds_text
from chipsparse.common.byte_sizes import format_bytes
from chipsparse.config import Part

PART_TITLES: dict[Part, str] = {"attention": "attention columns", "mlp": "MLP neurons"}
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


def time_chart(record: Generation) -> Chart | None:
    """What each step took; None where no time was measured."""
    steps = record.by_step
    if not any(step.seconds for step in steps):
        return None
    unit, size = seconds_unit(step.seconds for step in steps)
    mean = record.dense_step_seconds

    def draw(axes: Axes) -> None:
        steps_axis(axes, record.steps_total, f"time, {unit}")
        for action, colour in ACTIONS.items():
            found = [step for step in steps if step.action == action]
            marks = [
                (s.number, s.seconds / size, f"step {s.name}, {action}: {seconds_text(s.seconds)}")
                for s in found
                if s.seconds
            ]
            if found:
                _bars(axes, marks, colour, action, BAR)
        if mean is not None:
            label = f"mean step of the dense run, {seconds_text(mean)}"
            axes.axhline(mean / size, color=INK, linestyle="--", label=label)

    return Chart("time of each denoising step", draw, "Time of each step")


def share_chart(record: Generation) -> Chart | None:
    """The share that each step computed; None where nothing was recorded."""
    steps = record.by_step
    parts = [part for part in PART_TITLES if any(step.cells(part) for step in steps)]
    if not parts:
        return None

    def draw(axes: Axes) -> None:
        steps_axis(axes, record.steps_total, "computed, mean over layers")
        axes.set_ylim(0, 1.04)
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.6g}%")
        for part, colour, line in zip(parts, SERIES, ("-", "--"), strict=False):
            found = {step.number: step.computed(part) for step in steps}
            values = [found.get(number) for number in range(record.steps_total)]
            stairs(axes, values, colour, line, PART_TITLES[part])

    title = "share of attention columns and MLP neurons computed at each step"
    return Chart(title, draw, "Share that each step computed", LOWER)


def stairs(axes: Axes, values: Sequence[float | None], colour: str, line: str, label: str) -> None:
    """One value for each step as a line that is level during the step, with gaps."""
    known, edges = np.array(values, float), np.arange(len(values) + 1) - 0.5
    axes.stairs(known, edges, baseline=None, color=colour, linestyle=line, linewidth=2, label=label)


def held_chart(record: Generation) -> Chart | None:
    """The memory that was held behind each step; None where none was recorded."""
    series = {name: record.over_steps(name) for name in HELD}
    values = [value for each in series.values() for value in each if value]
    if not values:
        return None
    unit, size = bytes_unit(values)

    def draw(axes: Axes) -> None:
        steps_axis(axes, record.steps_total, f"memory, {unit}")
        for (name, held), colour, line in zip(
            series.items(), SERIES, ("-", "--", "-", "--"), strict=True
        ):
            if any(held):
                scaled = [None if value is None else value / size for value in held]
                stairs(axes, scaled, colour, line, HELD[name])
        axes.set_ylim(bottom=0)

    return Chart("memory held behind each step", draw, "Memory held behind each step")


def moved_chart(record: Generation) -> Chart | None:
    """What moved between host and device; None where nothing did."""
    moved = {
        name: [(s, sum(getattr(call, name) for call in s.calls)) for s in record.by_step]
        for name in MOVED
    }
    largest = max((amount for each in moved.values() for _, amount in each), default=0)
    if not largest:
        return None
    unit, size = bytes_unit([largest])

    def draw(axes: Axes) -> None:
        steps_axis(axes, record.steps_total, f"moved, {unit}")
        for (name, (where, label)), shift, colour in zip(
            MOVED.items(), (-BAR / 4, BAR / 4), (FIRST, SECOND), strict=True
        ):
            marks = [
                (s.number + shift, amount / size, f"step {s.name}: {format_bytes(amount)} {where}")
                for s, amount in moved[name]
                if amount
            ]
            _bars(axes, marks, colour, label, BAR / 2)

    return Chart("bytes of caches moved at each step", draw, "Caches moved at each step", LOWER)


def _bars(axes: Axes, marks: Iterable[Mark], colour: str, label: str, width: float) -> None:
    """Bars with their tips, at the middles of their places."""
    box_key(axes, colour, label)
    for place, height, tip in marks:
        (bar,) = axes.bar(place, height, width, color=colour)
        tipped(bar, tip)


def seconds_unit(values: Iterable[float]) -> tuple[str, float]:
    """The name and the size of a unit of time in which the largest is a handy number."""
    largest = max(values, default=0.0)
    return ("ms", 1e-3) if largest < 1 else ("s", 1.0) if largest < 600 else ("min", 60.0)


def bytes_unit(values: Iterable[float]) -> tuple[str, float]:
    """Likewise of memory."""
    large = max(values, default=0.0) >= 1 << 30
    return ("GiB", float(1 << 30)) if large else ("MiB", float(1 << 20))

"""Draws the curves of `attention_curve` from its records alone, with Pillow.

``python -m benchmarks.curve_figure records.json figure.png``
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from benchmarks.canvas import COLOURS, GRID, INK, Canvas, Points, blank, draw_from_records, finished
from benchmarks.records import Record

WIDTH, HEIGHT = 1200, 500
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 76, 24, 50, 78
TITLE_SIZE, TEXT_SIZE, NOTE_SIZE = 17, 14, 12
IDEAL = "#8a8a8a"


@dataclass(frozen=True)
class Series:
    """One line of a panel."""

    label: str
    points: Points
    colour: str
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One diagram with two logarithmic axes.

    Attributes:
        title: above it.
        x_label: below it.
        series: the lines.
        x_ticks: values and their labels.
        legend_right: whether the legend stands in the upper right corner, else upper left.
    """

    title: str
    x_label: str
    series: list[Series]
    x_ticks: list[tuple[float, str]]
    legend_right: bool


def draw(records: Sequence[Record]) -> Image.Image:
    """The figure: speed-up over the keep fraction, time over the tokens.

    Raises:
        ValueError: no record belongs to a curve.
    """
    panels = [panel for panel in (keep_panel(records), tokens_panel(records)) if panel.series]
    if not panels:
        raise ValueError("no records of attention_curve")
    image = blank(WIDTH, HEIGHT)
    width = WIDTH // len(panels)
    for i, panel in enumerate(panels):
        _Axes(image, panel, left=i * width, width=width).draw()
    canvas = Canvas(image)
    curve = next(record for record in records if record.get("curve"))
    note = (
        f"{curve['device']}, torch {curve['torch']}, {curve['dtype']}, head size "
        f"{curve['head_dim']}, groups of {curve['group_rows']} rows, backend {curve['backend']}"
    )
    canvas.text(WIDTH / 2, HEIGHT - 8, note, size=NOTE_SIZE, anchor="ms", fill=IDEAL)
    return finished(image)


def keep_panel(records: Sequence[Record]) -> Panel:
    """Speed-up over dense against the share of kept columns, one line per case."""
    of_case: dict[str, list[Record]] = {}
    for record in _curve(records, "keep"):
        of_case.setdefault(f"{record['tokens']:,} tokens", []).append(record)
    series = [
        Series(label, _points(of_case[label], "keep_fraction", "speedup"), colour)
        for label, colour in zip(of_case, COLOURS, strict=False)
    ]
    ideal = {record["keep_fraction"]: record["ideal"] for record in _curve(records, "keep")}
    if ideal:
        series.append(Series("possible, 1 / kept share", sorted(ideal.items()), IDEAL, True))
    # Lists have whole lengths: shares of several cases that round alike are one tick.
    ticks = {f"{100 * keep:.0f}": keep for keep in sorted(ideal)}
    return Panel(
        "Speed-up over the fastest dense attention",
        "kept columns, %",
        series,
        [(value, label) for label, value in ticks.items()],
        legend_right=True,
    )


def tokens_panel(records: Sequence[Record]) -> Panel:
    """Milliseconds per head of both against the tokens, since long cases have fewer heads."""
    chosen = [_per_head(record) for record in _curve(records, "tokens")]
    if not chosen:
        return Panel("", "", [], [], legend_right=False)
    baseline = ", ".join(sorted({record["baseline"] for record in chosen}))
    keep = ", ".join(sorted({f"{record['keep_fraction']:.0%}" for record in chosen}))
    return Panel(
        "Milliseconds per head",
        "tokens",
        [
            Series(baseline, _points(chosen, "tokens", "baseline_ms"), COLOURS[1]),
            Series(f"sparse, {keep} kept", _points(chosen, "tokens", "latency_ms"), COLOURS[0]),
        ],
        [(tokens, _thousands(tokens)) for tokens in sorted({r["tokens"] for r in chosen})],
        legend_right=False,
    )


def _curve(records: Sequence[Record], curve: str) -> list[Record]:
    return [record for record in records if record.get("curve") == curve]


def _points(records: Sequence[Record], x: str, y: str) -> Points:
    return sorted((record[x], record[y]) for record in records)


def _per_head(record: Record) -> Record:
    heads = record["batch"] * record["heads"]
    times = {name: record[name] / heads for name in ("latency_ms", "baseline_ms")}
    return record | times


def _thousands(tokens: int) -> str:
    return f"{tokens / 1000:.0f}k" if tokens >= 1000 else str(tokens)


class _Axes:
    """A panel's place in the figure, and its drawing."""

    def __init__(self, image: Image.Image, panel: Panel, *, left: int, width: int) -> None:
        self._canvas, self._panel = Canvas(image), panel
        self._left, self._right = left + MARGIN_LEFT, left + width - MARGIN_RIGHT
        self._top, self._bottom = MARGIN_TOP, HEIGHT - MARGIN_BOTTOM
        points = [point for series in panel.series for point in series.points]
        self._x_range = _padded([x for x, _ in points], 0.04)
        self._y_range = _padded([y for _, y in points], 0.06)

    def draw(self) -> None:
        centre = (self._left + self._right) / 2
        canvas, panel = self._canvas, self._panel
        canvas.text(centre, self._top - 20, panel.title, size=TITLE_SIZE, anchor="ms")
        canvas.text(centre, self._bottom + 44, panel.x_label, size=TEXT_SIZE, anchor="ms")
        self._ticks()
        for series in panel.series:
            placed = [(self._x(x), self._y(y)) for x, y in series.points]
            canvas.line(placed, series.colour, 2, dashed=series.dashed)
            for x, y in [] if series.dashed else placed:
                canvas.dot(x, y, series.colour)
        self._legend()

    def _x(self, value: float) -> float:
        return self._left + _share(value, self._x_range) * (self._right - self._left)

    def _y(self, value: float) -> float:
        return self._bottom - _share(value, self._y_range) * (self._bottom - self._top)

    def _ticks(self) -> None:
        canvas = self._canvas
        free_from = -math.inf
        for value, label in self._panel.x_ticks:
            x, half = self._x(value), canvas.text_width(label, TEXT_SIZE) / 2
            canvas.line([(x, self._top), (x, self._bottom)], GRID, 1)
            if x - half >= free_from:  # a label that would touch the one before is left out
                canvas.text(x, self._bottom + 20, label, size=TEXT_SIZE, anchor="ms")
                free_from = x + half + 6
        for value in _y_ticks(self._y_range):
            y = self._y(value)
            canvas.line([(self._left, y), (self._right, y)], GRID, 1)
            canvas.text(self._left - 8, y, f"{value:g}", size=TEXT_SIZE, anchor="rm")
        corner = (self._left, self._bottom)
        canvas.line([(self._left, self._top), corner, (self._right, self._bottom)], INK, 1)

    def _legend(self) -> None:
        canvas, series = self._canvas, self._panel.series
        width = 44 + max(canvas.text_width(each.label, TEXT_SIZE) for each in series)
        left = self._right - width if self._panel.legend_right else self._left + 2
        top = self._top
        canvas.box(left, top, left + width, top + 22 * len(series) + 4, "white")
        for i, each in enumerate(series):
            y = top + 14 + 22 * i
            canvas.line([(left + 6, y), (left + 32, y)], each.colour, 2, dashed=each.dashed)
            if not each.dashed:
                canvas.dot(left + 19, y, each.colour)
            canvas.text(left + 40, y, each.label, size=TEXT_SIZE, anchor="lm")


def _padded(values: list[float], share: float) -> tuple[float, float]:
    """Logarithms of the range, widened; a single value still gets a range."""
    low, high = math.log10(min(values)), math.log10(max(values))
    padding = share * (high - low) or 0.5
    return low - padding, high + padding


def _share(value: float, bounds: tuple[float, float]) -> float:
    return (math.log10(value) - bounds[0]) / (bounds[1] - bounds[0])


def _y_ticks(bounds: tuple[float, float]) -> list[float]:
    """1, 2 and 5 of each decade, or decades alone where those are many."""
    decades = range(math.floor(bounds[0]), math.ceil(bounds[1]) + 1)
    steps = (1, 2, 5) if bounds[1] - bounds[0] < 3 else (1,)
    values = [step * 10.0**decade for decade in decades for step in steps]
    return [value for value in values if bounds[0] <= math.log10(value) <= bounds[1]]


if __name__ == "__main__":
    draw_from_records("curve_figure", __doc__, draw)

"""Diagrams with two axes and a legend, drawn on a `canvas`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from PIL import Image

from benchmarks.canvas import GRID, INK, Canvas, Points

MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 76, 24, 50, 78
TITLE_SIZE, TEXT_SIZE, NOTE_SIZE = 17, 14, 12


@dataclass(frozen=True)
class Series:
    """One line of a panel.

    Attributes:
        label: what the legend says.
        points: in the units of the axes.
        colour: of line and points.
        dashed: draws the line with gaps and without points.
    """

    label: str
    points: Points
    colour: str
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One diagram; its axes are logarithmic.

    Attributes:
        title: above it.
        x_label: below it.
        series: the lines.
        x_ticks: values and their labels.
        legend_right: whether the legend stands in the upper right corner, else upper left.
        linear_y: whether the vertical axis is linear.
        legend: whether there is one.
    """

    title: str
    x_label: str
    series: list[Series]
    x_ticks: list[tuple[float, str]]
    legend_right: bool = True
    linear_y: bool = False
    legend: bool = True


class Axes:
    """A panel's place in the figure, and its drawing."""

    def __init__(
        self,
        image: Image.Image,
        panel: Panel,
        *,
        left: int,
        width: int,
        height: int,
        top: int = 0,
    ) -> None:
        self._canvas, self._panel = Canvas(image), panel
        self._left, self._right = left + MARGIN_LEFT, left + width - MARGIN_RIGHT
        self._top, self._bottom = top + MARGIN_TOP, top + height - MARGIN_BOTTOM
        points = [point for series in panel.series for point in series.points]
        self._x_range = _padded([math.log10(x) for x, _ in points], 0.04)
        self._y_range = _padded([self._height(y) for _, y in points], 0.06)

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
        if panel.legend:
            self._legend()

    def _height(self, value: float) -> float:
        return value if self._panel.linear_y else math.log10(value)

    def _x(self, value: float) -> float:
        return self._left + _share(math.log10(value), self._x_range) * (self._right - self._left)

    def _y(self, value: float) -> float:
        return self._bottom - _share(self._height(value), self._y_range) * (
            self._bottom - self._top
        )

    def _ticks(self) -> None:
        canvas = self._canvas
        free_from = -math.inf
        for value, label in self._panel.x_ticks:
            x, half = self._x(value), canvas.text_width(label, TEXT_SIZE) / 2
            canvas.line([(x, self._top), (x, self._bottom)], GRID, 1)
            if x - half >= free_from:  # a label that would touch the one before is left out
                canvas.text(x, self._bottom + 20, label, size=TEXT_SIZE, anchor="ms")
                free_from = x + half + 6
        ticks = _linear_ticks if self._panel.linear_y else _y_ticks
        for value in ticks(self._y_range):
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
    """The range, widened; a single value still gets a range."""
    low, high = min(values), max(values)
    padding = share * (high - low) or 0.5
    return low - padding, high + padding


def _share(value: float, bounds: tuple[float, float]) -> float:
    return (value - bounds[0]) / (bounds[1] - bounds[0])


def _y_ticks(bounds: tuple[float, float]) -> list[float]:
    """1, 2 and 5 of each decade, or decades alone where those are many."""
    decades = range(math.floor(bounds[0]), math.ceil(bounds[1]) + 1)
    steps = (1, 2, 5) if bounds[1] - bounds[0] < 3 else (1,)
    values = [step * 10.0**decade for decade in decades for step in steps]
    return [value for value in values if bounds[0] <= math.log10(value) <= bounds[1]]


def _linear_ticks(bounds: tuple[float, float]) -> list[float]:
    """Multiples of 5."""
    return [5.0 * n for n in range(math.ceil(bounds[0] / 5), math.floor(bounds[1] / 5) + 1)]

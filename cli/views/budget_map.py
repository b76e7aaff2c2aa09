"""A heat-map of layers and steps: what each computed, or is to compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from chipsparse.cli.views.sections import ACTIONS, SHADES, Chart
from chipsparse.cli.views.units import percent

if TYPE_CHECKING:
    from chipsparse.cli.views.charts import Canvas

ALIKE = 0.005  # shares that are no further apart have one colour
ROW_PIXELS, LEAST_PIXELS, MOST_PIXELS = 9, 64, 560
FRAME_PIXELS = 72  # what the axes take above and below
LABELS = {"dense": "dense: all", "refresh": "refresh: all, recorded", "skip": "skipped"}


@dataclass(frozen=True)
class Cell:
    """The action of a layer at a step, and the share that it computed."""

    action: str
    kept: float


Cells = Mapping[tuple[int, int], Cell]  # by layer and step; what is missing stays empty


@dataclass(frozen=True)
class Stretch:
    """Neighbouring steps of a layer that are alike."""

    first: int
    last: int
    colour: str
    text: str


def budget_map(cells: Cells, *, layers: int, steps: int, caption: str) -> Chart:
    """Return a chart with a row for each layer and a column for each step."""
    least, most = _bounds(cells)

    def draw(canvas: Canvas) -> None:
        canvas.steps_axis(steps, "layer (transformer block), from 0")
        canvas.axes.grid(False)
        canvas.axes.set_ylim(max(1, layers) - 0.5, -0.5)
        canvas.integers_upwards()
        for run, first, last in merged(cells, layers, steps):
            text = f"{_span('layer', first, last)}, {_span('step', run.first, run.last)}"
            width, height = run.last - run.first + 1, last - first + 1
            tip = f"{text}: {run.text}"
            canvas.box(run.first - 0.5, first - 0.5, width, height, run.colour, tip)
        for colour, label in _legend(cells, least, most):
            canvas.key(colour, label)

    height = min(MOST_PIXELS, max(LEAST_PIXELS, ROW_PIXELS * layers)) + FRAME_PIXELS
    return Chart(caption, draw, caption, height)


def merged(cells: Cells, layers: int, steps: int) -> list[tuple[Stretch, int, int]]:
    """Return boxes over neighbours that are alike: steps, first and last layer of each.

    So a large model makes no huge page.
    """
    bounds = _bounds(cells)
    boxes: list[tuple[Stretch, int, int]] = []
    growing: dict[Stretch, int] = {}  # stretches with the first of the layers that have them
    for layer in range(layers + 1):
        runs = _runs(cells, layer, steps, bounds)  # none behind the last layer
        for run in [run for run in growing if run not in runs]:
            boxes.append((run, growing.pop(run), layer - 1))
        growing = {run: growing.get(run, layer) for run in runs}
    return boxes


def _runs(cells: Cells, layer: int, steps: int, bounds: tuple[float, float]) -> list[Stretch]:
    def look(step: int) -> tuple[str, str] | None:
        cell = cells.get((layer, step))
        if cell is None:
            return None
        sparse = cell.action == "sparse"
        return colour_of(cell, *bounds), (
            f"sparse, {percent(cell.kept)} computed" if sparse else cell.action
        )

    runs = []
    for seen, group in groupby(range(steps), look):
        if seen is not None:
            places = [*group]
            runs.append(Stretch(places[0], places[-1], *seen))
    return runs


def _bounds(cells: Cells) -> tuple[float, float]:
    """Return the least and the largest share of sparse cells."""
    sparse = [cell.kept for cell in cells.values() if cell.action == "sparse"]
    return min(sparse, default=0.0), max(sparse, default=1.0)


def colour_of(cell: Cell, least: float, most: float) -> str:
    """Return the colour of a cell's action, or of its share between two others."""
    if cell.action != "sparse":
        return ACTIONS[cell.action]
    place = 1.0 if most - least <= ALIKE else (cell.kept - least) / (most - least)
    return SHADES[min(len(SHADES) - 1, int(place * len(SHADES)))]


def _span(name: str, first: int, last: int) -> str:
    return f"{name} {first}" if first == last else f"{name}s {first} to {last}"


def _legend(cells: Cells, least: float, most: float) -> list[tuple[str, str]]:
    present = {cell.action for cell in cells.values()}
    keys = [(ACTIONS[name], label) for name, label in LABELS.items() if name in present]
    if "sparse" in present and most - least <= ALIKE:
        keys.append((SHADES[-1], f"sparse: {percent((least + most) / 2)}"))
    elif "sparse" in present:
        ends = (SHADES[0], least), (SHADES[-1], most)
        keys += [(shade, f"sparse: {percent(share)}") for shade, share in ends]
    return keys

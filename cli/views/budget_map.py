"""A heat-map of layers and steps: what each computed, or is to compute."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from chipsparse.cli.views.colours import ACTIONS, SHADES
from chipsparse.cli.views.sections import Chart
from chipsparse.cli.views.units import percent

if TYPE_CHECKING:
    from chipsparse.cli.views.canvas import Canvas

ALIKE = 0.005  # shares that are no further apart have one colour
ROW_PIXELS = 9
LEAST_PIXELS = 64
MOST_PIXELS = 560
FRAME_PIXELS = 72  # what the axes take above and below
LABELS = {"dense": "dense: all", "refresh": "refresh: all, recorded", "skip": "skipped"}


class Cell(NamedTuple):
    """The action of a layer at a step, and the share that it computed."""

    action: str
    kept: float

    @property
    def text(self) -> str:
        """The action, for a sparse one with its share."""
        return f"sparse, {percent(self.kept)} computed" if self.action == "sparse" else self.action


class Box(NamedTuple):
    """Neighbouring steps of neighbouring layers that are alike; first and last of each."""

    layers: tuple[int, int]
    steps: tuple[int, int]
    cell: Cell


Cells = Mapping[tuple[int, int], Cell]  # by layer and step; what is missing stays empty


def budget_map(cells: Cells, *, layers: int, steps: int, caption: str) -> Chart:
    """Return a chart with a row for each layer and a column for each step."""
    shares = [cell.kept for cell in cells.values() if cell.action == "sparse"]
    least = min(shares, default=0.0)
    most = max(shares, default=1.0)

    def draw(canvas: Canvas) -> None:
        canvas.steps_axis(steps, "layer (transformer block), from 0")
        canvas.whole_numbers(canvas.axes.yaxis)
        canvas.axes.grid(False)
        canvas.axes.set_ylim(max(1, layers) - 0.5, -0.5)
        for box in merged(cells, layers, steps):
            (top, bottom) = box.layers
            (left, right) = box.steps
            tip = f"{_span('layer', top, bottom)}, {_span('step', left, right)}: {box.cell.text}"
            colour = colour_of(box.cell, least, most)
            canvas.box(left - 0.5, top - 0.5, right - left + 1, bottom - top + 1, colour, tip)
        present = {cell.action for cell in cells.values()}
        for action, label in LABELS.items():
            if action in present:
                canvas.key(ACTIONS[action], label)
        if shares:
            ends = [most] if most - least <= ALIKE else [least, most]
            for share in ends:
                colour = colour_of(Cell("sparse", share), least, most)
                canvas.key(colour, f"sparse: {percent(share)}")

    height = min(MOST_PIXELS, max(LEAST_PIXELS, ROW_PIXELS * layers)) + FRAME_PIXELS
    return Chart(caption, draw, caption, height)


def merged(cells: Cells, layers: int, steps: int) -> list[Box]:
    """Return boxes over neighbours that read alike, so that a large model makes no huge page."""

    def row(layer: int) -> list[str | None]:
        of_steps = [cells.get((layer, step)) for step in range(steps)]
        return [None if cell is None else cell.text for cell in of_steps]

    boxes = []
    for texts, alike in groupby(range(layers), row):
        rows = list(alike)
        for text, neighbours in groupby(range(steps), texts.__getitem__):
            columns = list(neighbours)
            if text is not None:
                cell = cells[rows[0], columns[0]]
                boxes.append(Box((rows[0], rows[-1]), (columns[0], columns[-1]), cell))
    return boxes


def colour_of(cell: Cell, least: float, most: float) -> str:
    """Return the colour of a cell's action, or of its share between two others."""
    if cell.action != "sparse":
        return ACTIONS[cell.action]
    place = 1.0 if most - least <= ALIKE else (cell.kept - least) / (most - least)
    return SHADES[min(len(SHADES) - 1, int(place * len(SHADES)))]


def _span(name: str, first: int, last: int) -> str:
    return f"{name} {first}" if first == last else f"{name}s {first} to {last}"

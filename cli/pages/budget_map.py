"""Heat-maps of layers and steps: what each computed, or is to compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from chipsparse.cli.pages.charts import ACTIONS, BACK, SHADES, Chart, box_key, steps_axis, tipped
from chipsparse.cli.pages.generation_record import Cell
from chipsparse.cli.views.units import percent

ALIKE = 0.005  # shares that are no further apart have one colour
ROW_PIXELS, LEAST_PIXELS, MOST_PIXELS = 9, 64, 560
FRAME_PIXELS = 72  # what the axes take above and below
LABELS = {"dense": "dense: all", "refresh": "refresh: all, recorded", "skip": "skipped"}

Cells = Mapping[tuple[int, int], Cell]


@dataclass(frozen=True)
class Stretch:
    """Neighbouring steps of a layer that are alike, and what they did."""

    first: int
    last: int
    colour: str
    text: str


def budget_map(cells: Cells, *, layers: int, steps: int, caption: str) -> Chart:
    """A chart with a row for each layer and a column for each step.

    Args:
        cells: by layer and step; what is missing stays empty.
    """
    least, most = _bounds(cells)

    def draw(axes: Axes) -> None:
        steps_axis(axes, steps, "layer (transformer block), from 0")
        axes.grid(False)
        axes.set_ylim(max(1, layers) - 0.5, -0.5)
        axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
        for run, first, last in merged(cells, layers, steps):
            corner, size = (run.first - 0.5, first - 0.5), (run.last - run.first + 1)
            text = f"{_span('layer', first, last)}, {_span('step', run.first, run.last)}"
            box = Rectangle(corner, size, last - first + 1, facecolor=run.colour, edgecolor=BACK)
            tipped(axes.add_patch(box), f"{text}: {run.text}")
        for colour, label in _legend(cells, least, most):
            box_key(axes, colour, label)

    height = min(MOST_PIXELS, max(LEAST_PIXELS, ROW_PIXELS * layers)) + FRAME_PIXELS
    return Chart(caption, draw, caption, height)


def merged(cells: Cells, layers: int, steps: int) -> list[tuple[Stretch, int, int]]:
    """Boxes over all neighbours that are alike, so that a large model makes no huge page.

    Returns:
        Steps, first and last layer of each.
    """
    bounds = _bounds(cells)
    boxes: list[tuple[Stretch, int, int]] = []
    growing: dict[Stretch, int] = {}  # runs with the first of the layers that have them
    for layer in range(layers + 1):
        runs = _runs(cells, layer, steps, bounds)  # none behind the last layer
        for run in [each for each in growing if each not in runs]:
            boxes.append((run, growing.pop(run), layer - 1))
        growing = {run: growing.get(run, layer) for run in runs}
    return boxes


def _runs(cells: Cells, layer: int, steps: int, bounds: tuple[float, float]) -> list[Stretch]:
    def look(step: int) -> tuple[str, str] | None:
        cell = cells.get((layer, step))
        return None if cell is None else (paint(cell, *bounds), _text(cell))

    runs = []
    for seen, group in groupby(range(steps), look):
        if seen is not None:
            places = [*group]
            runs.append(Stretch(places[0], places[-1], *seen))
    return runs


def _bounds(cells: Cells) -> tuple[float, float]:
    """The least and the largest share of sparse cells."""
    sparse = [cell.kept for cell in cells.values() if cell.action == "sparse"]
    return min(sparse, default=0.0), max(sparse, default=1.0)


def paint(cell: Cell, least: float, most: float) -> str:
    """The colour of a cell: of its action, or of its share between two others."""
    if cell.action != "sparse":
        return ACTIONS[cell.action]
    place = 1.0 if most - least <= ALIKE else (cell.kept - least) / (most - least)
    return SHADES[min(len(SHADES) - 1, int(place * len(SHADES)))]


def _span(name: str, first: int, last: int) -> str:
    return f"{name} {first}" if first == last else f"{name}s {first} to {last}"


def _text(cell: Cell) -> str:
    return f"sparse, {percent(cell.kept)} computed" if cell.action == "sparse" else cell.action


def _legend(cells: Cells, least: float, most: float) -> list[tuple[str, str]]:
    present = {cell.action for cell in cells.values()}
    found = [(ACTIONS[name], label) for name, label in LABELS.items() if name in present]
    if "sparse" in present and most - least <= ALIKE:
        found.append((SHADES[-1], f"sparse: {percent((least + most) / 2)}"))
    elif "sparse" in present:
        ends = (SHADES[0], least), (SHADES[-1], most)
        found += [(shade, f"sparse: {percent(share)}") for shade, share in ends]
    return found

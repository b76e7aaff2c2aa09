"""Heat-maps of layers and steps: what each computed, or is to compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from chipsparse.cli.pages.axes import Axis, steps_axis
from chipsparse.cli.pages.chart import Box, Chart, Key, figure
from chipsparse.cli.pages.elements import Element
from chipsparse.cli.pages.units import percent

SHADES = 10
ALIKE = 0.005  # shares that are no further apart have one colour
ROW_PIXELS, LEAST_PIXELS, MOST_PIXELS = 9, 64, 560
FRAME_PIXELS = 72  # what the axes take above and below


@dataclass(frozen=True)
class Cell:
    """One layer at one step.

    Attributes:
        action: "dense", "refresh", "sparse" or "skip".
        kept: share that was computed.
    """

    action: str
    kept: float


def budget_map(
    cells: Mapping[tuple[int, int], Cell], *, layers: int, steps: int, caption: str
) -> Element:
    """A figure with a row for each layer and a column for each step.

    Args:
        cells: by layer and step; what is missing stays empty.
        layers: how many rows.
        steps: how many columns.
        caption: its heading.
    """
    sparse = [cell.kept for cell in cells.values() if cell.action == "sparse"]
    most = max(sparse, default=1.0) or 1.0
    least = min(sparse, default=0.0)
    height = min(MOST_PIXELS, max(LEAST_PIXELS, ROW_PIXELS * layers))
    layer_axis = Axis(
        "layer (transformer block), from 0",
        -0.5,
        max(1, layers) - 0.5,
        whole=True,
        down=True,
        grid=False,
    )
    chart = Chart(
        caption,
        steps_axis(steps),
        layer_axis,
        _boxes(cells, layers, steps, least, most),
        height=height + FRAME_PIXELS,
    )
    return figure(chart, caption=caption, keys=_keys(cells, least, most))


@dataclass(frozen=True)
class Run:
    """Neighbouring steps of a layer that are alike.

    Attributes:
        first: step.
        last: step.
        class_: their colour.
        text: what they did.
    """

    first: int
    last: int
    class_: str
    text: str


def _boxes(
    cells: Mapping[tuple[int, int], Cell], layers: int, steps: int, least: float, most: float
) -> list[Box]:
    """Boxes over all neighbours that are alike, so that a large model makes no huge page."""
    boxes: list[Box] = []
    growing: dict[Run, int] = {}  # runs with the first of the layers that have them
    for layer in range(layers + 1):
        runs = _runs(cells, layer, steps, least, most)  # none behind the last layer
        for run in [each for each in growing if each not in runs]:
            boxes.append(_box(run, growing.pop(run), layer - 1))
        growing = {run: growing.get(run, layer) for run in runs}
    return boxes


def _runs(
    cells: Mapping[tuple[int, int], Cell], layer: int, steps: int, least: float, most: float
) -> list[Run]:
    def look(step: int) -> tuple[str, str] | None:
        cell = cells.get((layer, step))
        return None if cell is None else (shade(cell, least, most), _text(cell))

    runs = []
    for seen, group in groupby(range(steps), look):
        if seen is not None:
            places = [*group]
            runs.append(Run(places[0], places[-1], *seen))
    return runs


def _box(run: Run, first: int, last: int) -> Box:
    text = f"{_span('layer', first, last)}, {_span('step', run.first, run.last)}: {run.text}"
    across, up = (run.first - 0.5, run.last + 0.5), (first - 0.5, last + 0.5)
    return Box(across, up, run.class_, text)


def _span(name: str, first: int, last: int) -> str:
    return f"{name} {first}" if first == last else f"{name}s {first} to {last}"


def shade(cell: Cell, least: float, most: float) -> str:
    """The class of a cell's colour: of its action, or of its share between two others."""
    if cell.action != "sparse":
        return f"action-{cell.action}"
    place = 1.0 if most - least <= ALIKE else (cell.kept - least) / (most - least)
    return f"shade-{min(SHADES - 1, int(place * SHADES))}"


def _text(cell: Cell) -> str:
    return f"sparse, {percent(cell.kept)} computed" if cell.action == "sparse" else cell.action


def _keys(cells: Mapping[tuple[int, int], Cell], least: float, most: float) -> list[Key]:
    present = {cell.action for cell in cells.values()}
    keys = [
        Key(f"action-{action}", label)
        for action, label in (
            ("dense", "dense: all"),
            ("refresh", "refresh: all, recorded"),
            ("skip", "skipped"),
        )
        if action in present
    ]
    if "sparse" in present and most - least <= ALIKE:
        keys.append(Key(f"shade-{SHADES - 1}", f"sparse: {percent((least + most) / 2)}"))
    elif "sparse" in present:
        keys.append(Key("shade-0", f"sparse: {percent(least)}"))
        keys.append(Key(f"shade-{SHADES - 1}", f"sparse: {percent(most)}"))
    return keys

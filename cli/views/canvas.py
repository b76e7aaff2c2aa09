"""The axes of a chart, and what charts draw on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from chipsparse.cli.views.colours import BACK, INK

WIDE = 840  # pixels of a chart for wide screens
LETTER = 7.5  # the usual width of a letter in pixels
AROUND = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
TIP = "tip: "  # begins the id of what shows a text under the pointer

Mark = tuple[float, float, str]  # a point and the text that belongs to it


class Canvas:
    """The axes that a chart draws on, with what several charts draw."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes

    def whole_axis(self, across: str, count: int, upwards: str) -> None:
        """Lay whole numbers across, each with a place as wide as the others."""
        self.axes.set_xlim(-0.5, max(1, count) - 0.5)
        self.axes.set(xlabel=across, ylabel=upwards)
        self.whole_numbers(self.axes.xaxis)
        self.axes.grid(axis="y")

    def steps_axis(self, count: int, upwards: str) -> None:
        """Lay the denoising steps across, with a title for what goes upwards."""
        self.whole_axis("denoising step, from 0", count, upwards)

    def plane(self, across: str, upwards: str) -> None:
        """Title both axes of a chart of points, with a grid and room at the sides."""
        self.axes.set(xlabel=across, ylabel=upwards)
        self.axes.margins(x=0.06)
        self.axes.grid()

    def whole_numbers(self, axis: Axis) -> None:
        """Put ticks at whole numbers alone."""
        axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))

    def dots(
        self,
        marks: Iterable[Mark],
        colour: str,
        *,
        label: str | None = None,
        square: bool = False,
        radius: float = 4.0,
        alpha: float | None = None,
    ) -> None:
        """Draw points with tips; squares differ from dots by more than the colour."""
        marker = "s" if square else "o"
        style: dict[str, Any] = {"color": colour, "markersize": 2 * radius, "alpha": alpha}
        for x, y, tip in marks:
            (dot,) = self.axes.plot(x, y, marker, label=label, **style)
            dot.set_gid(TIP + tip)
            label = None

    def bars(self, marks: Iterable[Mark], colour: str, label: str, width: float) -> None:
        """Draw bars with tips at the middles of their places."""
        self.key(colour, label)
        for place, height, tip in marks:
            (bar,) = self.axes.bar(place, height, width, color=colour)
            bar.set_gid(TIP + tip)

    def box(self, x: float, y: float, width: float, height: float, colour: str, tip: str) -> None:
        """Draw a filled rectangle with a tip; its position is in data units."""
        box = Rectangle((x, y), width, height, facecolor=colour, edgecolor=BACK)
        self.axes.add_patch(box).set_gid(TIP + tip)

    def key(self, colour: str, label: str) -> None:
        """Have the legend say what boxes of a colour are."""
        self.axes.add_patch(Rectangle((0, 0), 0, 0, facecolor=colour, label=label))

    def stairs(
        self,
        values: Sequence[float | None],
        colour: str,
        line: str = "-",
        label: str = "",
    ) -> None:
        """Draw one value for each step, level during the step, with gaps for None."""
        heights = np.array(values, float)
        edges = np.arange(len(values) + 1) - 0.5
        style: dict[str, Any] = {"color": colour, "linestyle": line, "linewidth": 2}
        self.axes.stairs(heights, edges, baseline=None, label=label, **style)

    def level(self, value: float, label: str) -> None:
        """Mark a value across the whole chart."""
        self.axes.axhline(value, color=INK, linewidth=1.2, linestyle=":")
        at: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        self.axes.annotate(label, (0, value), (6, 4), **at)

    def labels(self, marks: Sequence[Mark]) -> None:
        """Write short texts beside points, where they cover no point and no text if possible."""
        self.axes.autoscale_view()
        places = [(*self.axes.transData.transform((x, y)), text) for x, y, text in marks]
        taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y, _ in places]
        taken.append(Bbox.from_bounds(self.axes.figure.bbox.x1, 0, WIDE, WIDE))  # off the page

        def covered(box: Bbox) -> float:
            shared = (Bbox.intersection(box, other) for other in taken)
            return sum(common.width * common.height for common in shared if common is not None)

        for x, y, text in places:
            wide = LETTER * len(text)
            middles = [(x + dx * (9 + wide / 2), y + dy * 13) for dx, dy in AROUND]
            boxes = [Bbox.from_bounds(a - wide / 2, b - 6, wide, 12) for a, b in middles]
            areas = [covered(box) for box in boxes]
            best = areas.index(min(areas))
            taken.append(boxes[best])
            left, up = self.axes.transData.inverted().transform(middles[best])
            self.axes.text(left, up, text, ha="center", va="center")

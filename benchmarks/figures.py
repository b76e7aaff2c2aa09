"""What figures have in common: their look, and the commands that draw them from records."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.records import Record, read

# Okabe and Ito's colours, which most colour-blind readers tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#b4b4b4")
NOTE = "#666666"
DPI = 100  # a figure of 12 inches is 1200 pixels wide
STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.h_pad": 0.12,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.dpi": DPI,
    "font.size": 10,
    "grid.color": "#e4e4e4",
    "savefig.dpi": DPI,
}


def figure_of(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    with matplotlib.rc_context(STYLE):
        return Figure((width, height))


def axes_of(figure: Figure, *place: int) -> Axes:
    """Axes at a place of `Figure.add_subplot`, in the look of all figures."""
    with matplotlib.rc_context(STYLE):
        return figure.add_subplot(*place)


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure in 24 colours: a third of the bytes, which the repository keeps for good."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    with Image.open(drawn) as image:
        few = image.convert("RGB").quantize(24, Image.Quantize.FASTOCTREE)
    if path.suffix == ".webp":
        few.convert("RGB").save(path, lossless=True, quality=100, method=6)
    else:
        few.save(path)


def draw_from_records(
    module: str, help_text: str | None, draw: Callable[[Sequence[Record]], Figure]
) -> None:
    """The command of a figure's module: reads a file of records, writes the figure."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=help_text)
    parser.add_argument("records", type=Path)
    parser.add_argument("figure", type=Path)
    args = parser.parse_args()
    save_figure(draw(read(args.records)), args.figure)

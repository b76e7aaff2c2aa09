"""Figures drawn with Pillow: larger than they will be, since it does not smooth lines."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from benchmarks.records import Record

OVERSAMPLING = 3
INK, GRID = "#222222", "#e4e4e4"
# Okabe and Ito's colours, which most colour-blind readers tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")

Points = list[tuple[float, float]]


def draw_from_records(
    module: str, help_text: str | None, draw: Callable[[Sequence[Record]], Image.Image]
) -> None:
    """The command of a figure's module: reads a file of records, writes the figure.

    Args:
        module: its name in ``benchmarks``.
        help_text: what it says of itself.
        draw: makes the figure.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=help_text)
    parser.add_argument("records", type=Path)
    parser.add_argument("figure", type=Path)
    args = parser.parse_args()
    save(draw(json.loads(args.records.read_text(encoding="utf-8"))), args.figure)


def blank(width: int, height: int) -> Image.Image:
    """What a `Canvas` draws on, for a figure of so many pixels."""
    return Image.new("RGB", (width * OVERSAMPLING, height * OVERSAMPLING), "white")


def finished(image: Image.Image) -> Image.Image:
    """The figure in its own size."""
    size = image.width // OVERSAMPLING, image.height // OVERSAMPLING
    return image.resize(size, Image.Resampling.LANCZOS)


def save(figure: Image.Image, path: Path) -> None:
    """Writes a PNG with a palette, a third of the size: smoothed lines have few colours."""
    few = figure.quantize(
        256, method=Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE
    )
    few.save(path, "PNG", optimize=True)


class Canvas:
    """Draws in figure coordinates on the larger image."""

    def __init__(self, image: Image.Image) -> None:
        self._draw = ImageDraw.Draw(image)

    def text(
        self, x: float, y: float, text: str, *, size: int, anchor: str, fill: str = INK
    ) -> None:
        font = ImageFont.load_default(size * OVERSAMPLING)
        at = (x * OVERSAMPLING, y * OVERSAMPLING)
        self._draw.text(at, text, fill=fill, font=font, anchor=anchor)

    def text_width(self, text: str, size: int) -> float:
        return ImageFont.load_default(size * OVERSAMPLING).getlength(text) / OVERSAMPLING

    def line(self, points: Points, colour: str, width: float, *, dashed: bool = False) -> None:
        scaled = [(x * OVERSAMPLING, y * OVERSAMPLING) for x, y in points]
        thickness = round(width * OVERSAMPLING)
        if not dashed:
            self._draw.line(scaled, fill=colour, width=thickness, joint="curve")
            return
        for start, end in _dashes(scaled, 7 * OVERSAMPLING):
            self._draw.line([start, end], fill=colour, width=thickness)

    def dot(self, x: float, y: float, colour: str, radius: float = 4) -> None:
        x, y, radius = x * OVERSAMPLING, y * OVERSAMPLING, radius * OVERSAMPLING
        self._draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)

    def box(self, left: float, top: float, right: float, bottom: float, fill: str) -> None:
        corners = [value * OVERSAMPLING for value in (left, top, right, bottom)]
        self._draw.rectangle(corners, fill=fill)


def _dashes(points: Points, length: float) -> Iterator[tuple[tuple[float, float], ...]]:
    """Cuts a line into strokes with gaps as long, going on around its corners."""
    walked = 0.0
    for (x0, y0), (x1, y1) in pairwise(points):
        distance = math.hypot(x1 - x0, y1 - y0)
        done = 0.0
        while done < distance:
            step = min(length - walked % length, distance - done)
            # a step that floating point rounds to nothing would never end
            step = max(step, 1e-6)
            if int(walked / length) % 2 == 0:
                ends = [(done + part) / distance for part in (0.0, step)]
                yield tuple((x0 + (x1 - x0) * t, y0 + (y1 - y0) * t) for t in ends)
            done += step
            walked += step

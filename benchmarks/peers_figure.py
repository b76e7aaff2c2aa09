"""Draws quality over speed from the records of `peers`, one curve per method.

``python -m benchmarks.peers_figure records.json figure.png``
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from PIL import Image

from benchmarks.axes import NOTE_SIZE, TEXT_SIZE, Axes, Panel, Series
from benchmarks.canvas import INK, Canvas, blank, draw_from_records, finished
from benchmarks.peers_table import STACKED, summaries
from benchmarks.records import Record

PANEL_WIDTH, PANEL_HEIGHT, LEGEND_WIDTH, NOTE_HEIGHT = 600, 440, 330, 24
# The first four are chipsparse and its control, in strong colours; the others are diffusers'.
COLOURS = {
    "chipsparse": "#0072b2",
    "chipsparse, skips alone": "#56b4e9",
    "chipsparse, skip_threshold alone": "#1b1b8f",
    "chipsparse, attention alone": "#009e73",
    "static window": "#888888",
    "FirstBlockCache": "#d55e00",
    "MagCache": "#cc79a7",
    "TaylorSeer": "#a6761d",
    "TaylorSeer, lite": "#e69f00",
    "PAB": "#e7298a",
    "FasterCache": "#66a61e",
    "SeaCache": "#8b1a1a",
}
AXES = {"speedup": "speed-up by processor time", "saved": "speed-up if all work were equally fast"}
TICKS = (0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 10)


def draw(records: Sequence[Record]) -> Image.Image:
    """The figure: a row of panels per model, PSNR over time and over work.

    Raises:
        ValueError: no record belongs to a curve.
    """
    found = [
        each | {"saved": 1 / each["work"]}
        for each in summaries(records)
        if each["refused"] is None and math.isfinite(each["psnr_median"])
    ]
    models = list(dict.fromkeys(each["model"] for each in found))
    if not models:
        raise ValueError("no records of peers")
    width = PANEL_WIDTH * len(AXES) + LEGEND_WIDTH
    image = blank(width, PANEL_HEIGHT * len(models) + NOTE_HEIGHT)
    for row, model in enumerate(models):
        of_model = [each for each in found if each["model"] == model]
        for column, axis in enumerate(AXES):
            Axes(
                image,
                _panel(of_model, model, axis),
                left=column * PANEL_WIDTH,
                top=row * PANEL_HEIGHT,
                width=PANEL_WIDTH,
                height=PANEL_HEIGHT,
            ).draw()
    canvas = Canvas(image)
    _legend(canvas, found)
    some = next(record for record in records if "refused" in record)
    note = (
        f"{some['device']}, torch {some['torch']}, diffusers {some['diffusers']}; medians over "
        "prompts; what equals dense bit for bit is left out"
    )
    at = PANEL_HEIGHT * len(models) + 6
    canvas.text(width / 2, at, note, size=NOTE_SIZE, anchor="ms", fill="#666666")
    return finished(image)


def _panel(found: Sequence[Record], model: str, axis: str) -> Panel:
    series = [
        Series(method, points, colour)
        for method, colour in COLOURS.items()
        if (points := _points(found, method, axis))
    ]
    series += [
        Series(STACKED + method, points, colour, hollow=True)
        for method, colour in COLOURS.items()
        if (points := _points(found, STACKED + method, axis))
    ]
    places = [x for each in series for x, _ in each.points]
    ticks = [(x, f"{x:g}x") for x in TICKS if min(places) <= x <= max(places)]
    return Panel(
        f"{model}: PSNR against dense, dB", AXES[axis], series, ticks, linear_y=True, legend=False
    )


def _points(found: Sequence[Record], method: str, axis: str) -> list[tuple[float, float]]:
    return sorted((each[axis], each["psnr_median"]) for each in found if each["method"] == method)


def _legend(canvas: Canvas, found: Sequence[Record]) -> None:
    methods = {each["method"] for each in found}
    left, y = PANEL_WIDTH * len(AXES), 60
    for method, colour in COLOURS.items():
        if method in methods:
            canvas.line([(left, y), (left + 26, y)], colour, 2)
            canvas.dot(left + 13, y, colour)
            canvas.text(left + 36, y, method, size=TEXT_SIZE, anchor="lm")
            y += 24
    y += 12
    canvas.text(left, y, "rings: the cache of that colour", size=TEXT_SIZE, anchor="lm", fill=INK)
    canvas.text(left, y + 20, "on top of chipsparse", size=TEXT_SIZE, anchor="lm", fill=INK)


if __name__ == "__main__":
    draw_from_records("peers_figure", __doc__, draw)

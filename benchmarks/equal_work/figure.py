"""Draws quality over work, or over time, from records.

A model, a size and a number of steps together have a panel of their own.

``python -m benchmarks.equal_work.figure FIGURE FILE...``
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from PIL import Image

from benchmarks.axes import NOTE_SIZE, TEXT_SIZE, Axes, Panel, Series
from benchmarks.canvas import Canvas, Points, blank, finished, save
from benchmarks.equal_work.curves import OURS, SKIPS, Axis, compared, known_methods, qualities
from benchmarks.equal_work.records import joined, read
from benchmarks.equal_work.tables import on_gpu
from benchmarks.records import Record

PANEL_WIDTH, PANEL_HEIGHT, LEGEND_WIDTH, NOTE_HEIGHT = 560, 440, 220, 24
COLOURS = {
    OURS: "#0072b2",
    SKIPS: "#56b4e9",
    "fewer steps": "#888888",
    "FirstBlockCache": "#d55e00",
    "MagCache": "#cc79a7",
    "TaylorSeer": "#e69f00",
    "PAB": "#e7298a",
    "FasterCache": "#66a61e",
    "SeaCache": "#8b1a1a",
}
SHARES = tuple(percent / 100 for percent in range(20, 61, 2))
TICKS = (0.2, 0.25, 0.33, 0.4, 0.5, 0.6)
LABELS: dict[Axis, str] = {
    "work": "share of the dense generation's work",
    "time": "share of its GPU time",
}


def draw(records: Sequence[Record]) -> Image.Image:
    """The figure: mean PSNR over prompts, each method in the variant that is best at each share.

    Raises:
        ValueError: no record is of a clip that is compared.
    """
    groups: dict[str, list[Record]] = {}
    for clip in compared(records):
        name = f"{clip['model']}, {'x'.join(map(str, clip['size']))}, {clip['steps']} steps"
        groups.setdefault(name, []).append(clip)
    panels = [
        panel
        for name, clips in groups.items()
        for axis in (("work", "time") if on_gpu(clips) else ("work",))
        if (panel := _panel(name, clips, axis)).series
    ]
    if not panels:
        raise ValueError("no records of equal work")
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    width = columns * PANEL_WIDTH + LEGEND_WIDTH
    image = blank(width, rows * PANEL_HEIGHT + NOTE_HEIGHT)
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        place = {"left": column * PANEL_WIDTH, "top": row * PANEL_HEIGHT}
        Axes(image, panel, **place, width=PANEL_WIDTH, height=PANEL_HEIGHT).draw()
    canvas = Canvas(image)
    _legend(canvas, columns * PANEL_WIDTH, {s.label for panel in panels for s in panel.series})
    devices = ", ".join(dict.fromkeys(clip["device"] for c in groups.values() for clip in c))
    at = rows * PANEL_HEIGHT + 6
    canvas.text(width / 2, at, devices, size=NOTE_SIZE, anchor="ms", fill="#666666")
    return finished(image)


def _panel(name: str, clips: Sequence[Record], axis: Axis) -> Panel:
    found = {share: qualities(clips, axis, share) for share in SHARES}
    points: dict[str, Points] = {
        method: [(share, at[method].mean) for share, at in found.items() if method in at]
        for method in known_methods(clips)
    }
    series = [Series(m, points[m], colour) for m, colour in COLOURS.items() if points.get(m)]
    ticks = [(share, f"{share:.0%}") for share in TICKS]
    title = f"{name}: mean PSNR against dense, dB"
    return Panel(title, LABELS[axis], series, ticks, linear_y=True, legend=False)


def _legend(canvas: Canvas, left: float, methods: Iterable[str]) -> None:
    for number, method in enumerate(method for method in COLOURS if method in methods):
        y = 60 + 24 * number
        canvas.line([(left, y), (left + 26, y)], COLOURS[method], 2)
        canvas.dot(left + 13, y, COLOURS[method])
        canvas.text(left + 36, y, method, size=TEXT_SIZE, anchor="lm")


def main() -> None:
    """Reads the records and writes the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figure", type=Path)
    parser.add_argument("records", type=Path, nargs="+")
    args = parser.parse_args()
    save(draw(joined(read(*args.records))), args.figure)


if __name__ == "__main__":
    main()

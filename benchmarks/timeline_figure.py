"""Draws when the layers of one sparse step computed, and when their caches came and went.

``python -m benchmarks.timeline_figure records.json figure.png``
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from PIL import Image

from benchmarks.canvas import COLOURS, GRID, INK, Canvas, blank, finished, save
from benchmarks.records import Record

WIDTH, LANE, LEFT, RIGHT, TOP, BOTTOM = 1200, 56, 96, 24, 48, 64
TITLE_SIZE, TEXT_SIZE, NOTE_SIZE = 17, 14, 12
LANES = {"copy_in": "copy in", "compute": "compute", "copy_out": "copy out"}
MOST_LAYERS = 12  # more would be too narrow to tell apart
TICKS = 8
LEAST_LABEL = 16  # pixels that a layer's number needs


def draw(record: Record) -> Image.Image:
    """The first layers of the record's last step, one lane for each direction and one for work.

    Raises:
        ValueError: the record has no times; they are taken on a GPU only.
    """
    lanes = {name: record["timeline"].get(name) or [] for name in LANES}
    if not lanes["compute"]:
        raise ValueError("no timeline in this record: it is measured on a GPU")
    layers = record["layers"]
    shown = min(MOST_LAYERS, layers)
    end = max(last for layer, _, last in lanes["compute"] if layer < shown)
    image = blank(WIDTH, TOP + LANE * len(LANES) + BOTTOM)
    canvas = Canvas(image)

    def x(ms: float) -> float:
        return LEFT + min(1.0, ms / end) * (WIDTH - LEFT - RIGHT)

    bottom = TOP + LANE * len(LANES)
    step = round_step(end / TICKS)
    for tick in range(int(end / step) + 1):
        ms = step * tick
        canvas.line([(x(ms), TOP), (x(ms), bottom)], GRID, 1)
        canvas.text(x(ms), bottom + 18, f"{ms:g}", size=NOTE_SIZE, anchor="ms")
    canvas.text((LEFT + WIDTH - RIGHT) / 2, bottom + 38, "ms", size=NOTE_SIZE, anchor="ms")
    for number, (name, label) in enumerate(LANES.items()):
        middle = TOP + LANE * number + LANE / 2
        canvas.text(LEFT - 10, middle, label, size=TEXT_SIZE, anchor="rm")
        spans = lanes[name]
        # Copies are numbered one by one; every layer has as many.
        each = 1 if name == "compute" else max(1, len(spans) // layers)
        for index, first, last in spans:
            layer = index // each
            if layer >= shown or first >= end:
                continue
            colour = COLOURS[layer % 2]
            canvas.box(x(first), middle - 17, max(x(last), x(first) + 1), middle + 17, colour)
        for layer in range(shown):
            own = [span for span in spans if span[0] // each == layer]
            if own and x(own[-1][2]) - x(own[0][1]) >= LEAST_LABEL:
                centre = (x(own[0][1]) + x(own[-1][2])) / 2
                canvas.text(centre, middle, str(layer), size=NOTE_SIZE, anchor="mm", fill="white")
    title = (
        f"{record['case']}: the first {shown} of {layers} layers of a sparse step, "
        f"{record['mlp']} MLP"
    )
    canvas.text(WIDTH / 2, TOP - 20, title, size=TITLE_SIZE, anchor="ms")
    note = f"{record['device']}, torch {record['torch']}, {record['dtype']}"
    canvas.text(WIDTH / 2, bottom + 56, note, size=NOTE_SIZE, anchor="ms", fill=INK)
    return finished(image)


def round_step(least: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    decade = 10.0 ** math.floor(math.log10(least))
    return next(step * decade for step in (1, 2, 5, 10) if step * decade >= least * 0.999)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.timeline_figure", description=__doc__
    )
    parser.add_argument("records", type=Path)
    parser.add_argument("figure", type=Path)
    args = parser.parse_args()
    records = json.loads(args.records.read_text(encoding="utf-8"))
    timed = [record for record in records if (record.get("timeline") or {}).get("compute")]
    if not timed:
        raise SystemExit(f"{args.records} has no timeline")
    save(draw(timed[0]), args.figure)


if __name__ == "__main__":
    main()

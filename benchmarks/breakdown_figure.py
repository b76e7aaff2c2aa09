"""The bars of where a sparse step's time goes, from records of whole transformers.

``python -m benchmarks.breakdown_figure records.json figure.png``
"""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from benchmarks.canvas import INK, Canvas, blank, draw_from_records, finished
from benchmarks.records import Record
from benchmarks.step_breakdown import PARTS

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#dddddd")
WIDTH, BAR, LEFT, RIGHT, TOP, BOTTOM = 1200, 64, 200, 40, 84, 56


def draw(records: Sequence[Record]) -> Image.Image:
    """One bar per record with a ``breakdown_ms``: the parts' shares of a sparse step."""
    # Both schedules of a case have the same sparse step.
    records = list({r["case"]: r for r in records if r.get("breakdown_ms")}.values())
    image = blank(WIDTH, TOP + BAR * len(records) + BOTTOM)
    canvas = Canvas(image)
    title = "One sparse step of a transformer (one guidance branch), by part"
    canvas.text(WIDTH / 2, 28, title, size=17, anchor="ms")
    x = LEFT
    for part, colour in zip(PARTS, COLOURS, strict=True):
        canvas.box(x, 44, x + 14, 58, colour)
        canvas.text(x + 20, 56, part, size=13, anchor="ls")
        x += int(canvas.text_width(part, 13)) + 56
    span = WIDTH - LEFT - RIGHT
    for row, record in enumerate(records):
        parts = record["breakdown_ms"]
        whole = sum(parts[part] for part in PARTS) or 1.0
        middle = TOP + BAR * row + BAR / 2
        canvas.text(LEFT - 12, middle - 10, record["case"], size=13, anchor="rm")
        label = f"{parts['all']:.0f} ms, {record['step_speedup']:.1f}x dense"
        canvas.text(LEFT - 12, middle + 10, label, size=12, anchor="rm", fill="#555555")
        left = float(LEFT)
        for part, colour in zip(PARTS, COLOURS, strict=True):
            right = left + span * parts[part] / whole
            canvas.box(left, middle - 20, right, middle + 20, colour)
            share = f"{parts[part] / whole:.0%}"
            if right - left > canvas.text_width(share, 12) + 6:
                fill = INK if part in ("idle", "elementwise") else "white"
                canvas.text((left + right) / 2, middle, share, size=12, anchor="mm", fill=fill)
            left = right
    if records:
        some = records[0]
        note = f"{some['device']}, torch {some['torch']}, {some['dtype']}, compiled blocks"
        canvas.text(WIDTH / 2, TOP + BAR * len(records) + 32, note, size=12, anchor="ms")
    return finished(image)


if __name__ == "__main__":
    draw_from_records("breakdown_figure", __doc__, draw)

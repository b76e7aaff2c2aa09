"""Draws the curves of `attention_curve` from its records alone, with Pillow.

``python -m benchmarks.curve_figure records.json figure.png``
"""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from benchmarks.axes import NOTE_SIZE, Axes, Panel, Series
from benchmarks.canvas import COLOURS, Canvas, Points, blank, draw_from_records, finished
from benchmarks.records import Record

WIDTH, HEIGHT = 1200, 500
IDEAL = "#8a8a8a"


def draw(records: Sequence[Record]) -> Image.Image:
    """The figure: speed-up over the keep fraction, time over the tokens.

    Raises:
        ValueError: no record belongs to a curve.
    """
    panels = [panel for panel in (keep_panel(records), tokens_panel(records)) if panel.series]
    if not panels:
        raise ValueError("no records of attention_curve")
    image = blank(WIDTH, HEIGHT)
    width = WIDTH // len(panels)
    for i, panel in enumerate(panels):
        Axes(image, panel, left=i * width, width=width, height=HEIGHT).draw()
    canvas = Canvas(image)
    curve = next(record for record in records if record.get("curve"))
    note = (
        f"{curve['device']}, torch {curve['torch']}, {curve['dtype']}, head size "
        f"{curve['head_dim']}, groups of {curve['group_rows']} rows, backend {curve['backend']}"
    )
    canvas.text(WIDTH / 2, HEIGHT - 8, note, size=NOTE_SIZE, anchor="ms", fill=IDEAL)
    return finished(image)


def keep_panel(records: Sequence[Record]) -> Panel:
    """Speed-up over dense against the share of kept columns, one line per case."""
    of_case: dict[str, list[Record]] = {}
    for record in _curve(records, "keep"):
        of_case.setdefault(f"{record['tokens']:,} tokens", []).append(record)
    series = [
        Series(label, _points(of_case[label], "keep_fraction", "speedup"), colour)
        for label, colour in zip(of_case, COLOURS, strict=False)
    ]
    ideal = {record["keep_fraction"]: record["ideal"] for record in _curve(records, "keep")}
    if ideal:
        series.append(Series("possible, 1 / kept share", sorted(ideal.items()), IDEAL, True))
    # Lists have whole lengths: shares of several cases that round alike are one tick.
    ticks = {f"{100 * keep:.0f}": keep for keep in sorted(ideal)}
    return Panel(
        "Speed-up over the fastest dense attention",
        "kept columns, %",
        series,
        [(value, label) for label, value in ticks.items()],
        legend_right=True,
    )


def tokens_panel(records: Sequence[Record]) -> Panel:
    """Milliseconds per head of both against the tokens, since long cases have fewer heads."""
    chosen = [_per_head(record) for record in _curve(records, "tokens")]
    if not chosen:
        return Panel("", "", [], [], legend_right=False)
    baseline = ", ".join(sorted({record["baseline"] for record in chosen}))
    keep = ", ".join(sorted({f"{record['keep_fraction']:.0%}" for record in chosen}))
    return Panel(
        "Milliseconds per head",
        "tokens",
        [
            Series(baseline, _points(chosen, "tokens", "baseline_ms"), COLOURS[1]),
            Series(f"sparse, {keep} kept", _points(chosen, "tokens", "latency_ms"), COLOURS[0]),
        ],
        [(tokens, _thousands(tokens)) for tokens in sorted({r["tokens"] for r in chosen})],
        legend_right=False,
    )


def _curve(records: Sequence[Record], curve: str) -> list[Record]:
    return [record for record in records if record.get("curve") == curve]


def _points(records: Sequence[Record], x: str, y: str) -> Points:
    return sorted((record[x], record[y]) for record in records)


def _per_head(record: Record) -> Record:
    heads = record["batch"] * record["heads"]
    times = {name: record[name] / heads for name in ("latency_ms", "baseline_ms")}
    return record | times


def _thousands(tokens: int) -> str:
    return f"{tokens / 1000:.0f}k" if tokens >= 1000 else str(tokens)


if __name__ == "__main__":
    draw_from_records("curve_figure", __doc__, draw)

"""Draws the curves of `attention_curve` from its records alone.

``python -m benchmarks.curve_figure records.json figure.webp``
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks.figures import COLOURS, NOTE, axes_of, draw_from_records, figure_of
from benchmarks.records import Record

IDEAL = "#8a8a8a"


def draw(records: Sequence[Record]) -> Figure:
    """The figure: speed-up over the keep fraction, time over the tokens.

    Raises:
        ValueError: no record belongs to a curve.
    """
    panels = [(panel, found) for name, panel in PANELS.items() if (found := _curve(records, name))]
    if not panels:
        raise ValueError("no records of attention_curve")
    figure = figure_of(12, 5)
    for place, (panel, found) in enumerate(panels, 1):
        axes = axes_of(figure, 1, len(panels), place)
        axes.set(xscale="log", yscale="log")
        panel(axes, found)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid()
        axes.legend()
    some = panels[0][1][0]
    note = (
        f"{some['device']}, torch {some['torch']}, {some['dtype']}, head size "
        f"{some['head_dim']}, blocks of {some['block_size']} rows, backend {some['backend']}"
    )
    figure.supxlabel(note, color=NOTE, fontsize=9)
    return figure


def keep_panel(axes: Axes, records: Sequence[Record]) -> None:
    """Speed-up over dense against the share of kept columns, one line per case."""
    of_case: dict[str, list[Record]] = {}
    for record in records:
        of_case.setdefault(f"{record['tokens']:,} tokens", []).append(record)
    for (label, found), colour in zip(of_case.items(), COLOURS, strict=False):
        _line(axes, found, "density", "speedup", label, colour)
    ideal = sorted({record["density"]: record["ideal"] for record in records}.items())
    axes.plot(*zip(*ideal, strict=True), "--", color=IDEAL, label="possible, 1 / kept share")
    # Lists have whole lengths: shares of several cases that round alike are one tick.
    ticks = {f"{100 * keep:.0f}": keep for keep, _ in ideal}
    axes.set_xticks([*ticks.values()], [*ticks])
    axes.set(title="Speed-up over the fastest dense attention", xlabel="kept columns, %")


def tokens_panel(axes: Axes, records: Sequence[Record]) -> None:
    """Milliseconds per head of both against the tokens, since long cases have fewer heads."""
    records = [_per_head(record) for record in records]
    baseline = ", ".join(sorted({record["baseline"] for record in records}))
    keep = ", ".join(sorted({f"{record['density']:.0%}" for record in records}))
    _line(axes, records, "tokens", "baseline_ms", baseline, COLOURS[1])
    _line(axes, records, "tokens", "latency_ms", f"sparse, {keep} kept", COLOURS[0])
    tokens = sorted({record["tokens"] for record in records})
    axes.set_xticks(tokens, [_thousands(each) for each in tokens])
    axes.set(title="Milliseconds per head", xlabel="tokens")


PANELS = {"keep": keep_panel, "tokens": tokens_panel}


def _curve(records: Sequence[Record], curve: str) -> list[Record]:
    return [record for record in records if record.get("curve") == curve]


def _line(axes: Axes, records: Sequence[Record], x: str, y: str, label: str, colour: str) -> None:
    points = sorted((record[x], record[y]) for record in records)
    axes.plot(*zip(*points, strict=True), "o-", color=colour, label=label)


def _per_head(record: Record) -> Record:
    heads = record["batch"] * record["heads"]
    times = {name: record[name] / heads for name in ("latency_ms", "baseline_ms")}
    return record | times


def _thousands(tokens: int) -> str:
    return f"{tokens / 1000:.0f}k" if tokens >= 1000 else str(tokens)


if __name__ == "__main__":
    draw_from_records("curve_figure", __doc__, draw)

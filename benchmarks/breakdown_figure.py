"""The bars of where a sparse step's time goes, from records of whole transformers.

``python -m benchmarks.breakdown_figure records.json figure.webp``
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.figures import COLOURS, NOTE, axes_of, draw_from_records, figure_of
from benchmarks.records import Record
from benchmarks.step_breakdown import PARTS

LEAST_LABEL = 0.025  # of a bar: what a share needs to be written on it


def draw(records: Sequence[Record]) -> Figure:
    """One bar per record with a ``breakdown_ms``: the parts' shares of a sparse step."""
    # Both schedules of a case have the same sparse step.
    records = list({r["case"]: r for r in records if r.get("breakdown_ms")}.values())
    figure = figure_of(12, 1.3 + 0.65 * len(records))
    axes = axes_of(figure)
    labels = [
        f"{r['case']}\n{r['breakdown_ms']['all']:.0f} ms, {r['step_speedup']:.1f}x dense"
        for r in records
    ]
    wholes = [sum(r["breakdown_ms"][part] for part in PARTS) or 1.0 for r in records]
    lefts = [0.0] * len(records)
    for part, colour in zip(PARTS, COLOURS, strict=True):
        shares = [r["breakdown_ms"][part] / w for r, w in zip(records, wholes, strict=True)]
        bars = axes.barh(labels, shares, 0.62, lefts, color=colour, label=part)
        texts = [f"{share:.0%}" if share > LEAST_LABEL else "" for share in shares]
        ink = "black" if part in ("idle", "elementwise") else "white"
        axes.bar_label(bars, texts, label_type="center", color=ink)
        lefts = [left + share for left, share in zip(lefts, shares, strict=True)]
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    title = "One sparse step of a transformer (one guidance branch), by part"
    figure.legend(
        title=title,
        title_fontsize=12,
        loc="outside upper center",
        ncols=len(PARTS),
        frameon=False,
    )
    if records:
        some = records[0]
        note = f"{some['device']}, torch {some['torch']}, {some['dtype']}, compiled blocks"
        figure.supxlabel(note, color=NOTE, fontsize=9)
    return figure


if __name__ == "__main__":
    draw_from_records("breakdown_figure", __doc__, draw)

"""The bars of where a sparse step's time goes, from records of whole transformers.

``python -m benchmarks.breakdown_figure records.json figure.webp``; bars of one model stand
together, each named by the ``when`` of its record.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.figures import COLOURS, NOTE, axes_of, draw_from_records, figure_of
from benchmarks.records import Record
from benchmarks.step_breakdown import PARTS

LEAST_LABEL = 0.025  # of a bar: what a share needs to be written on it
HEIGHT = 0.5  # of a bar and its label, in inches


def draw(records: Sequence[Record]) -> Figure:
    """One bar per record with a ``breakdown_ms``, as long as its part of the model's longest.

    Numbers in it are shares of its own step.
    """
    # Both schedules of a case have the same sparse step.
    bars = {(r["case"], r.get("when", "")): r for r in records if r.get("breakdown_ms")}
    cases = list(dict.fromkeys(case for case, _ in bars))
    records = sorted(bars.values(), key=lambda r: cases.index(r["case"]))
    figure = figure_of(12, 1.3 + HEIGHT * len(records))
    axes = axes_of(figure)
    labels = [
        f"{', '.join(filter(None, (r['case'], r.get('when'))))}\n"
        f"{r['breakdown_ms']['all']:.0f} ms, {r['step_speedup']:.1f}x stock"
        for r in records
    ]
    wholes = [sum(r["breakdown_ms"][part] for part in PARTS) or 1.0 for r in records]
    longest: dict[str, float] = {}
    for record, whole in zip(records, wholes, strict=True):
        longest[record["case"]] = max(whole, longest.get(record["case"], 0.0))
    lefts = [0.0] * len(records)
    for part, colour in zip(PARTS, COLOURS, strict=True):
        times = [r["breakdown_ms"][part] for r in records]
        widths = [time / longest[r["case"]] for time, r in zip(times, records, strict=True)]
        drawn = axes.barh(labels, widths, 0.62, lefts, color=colour, label=part)
        shares = [time / whole for time, whole in zip(times, wholes, strict=True)]
        texts = [f"{share:.0%}" if share > LEAST_LABEL else "" for share in shares]
        ink = "black" if part in ("idle", "elementwise") else "white"
        axes.bar_label(drawn, texts, label_type="center", color=ink)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    title = "One sparse step of a transformer (one guidance branch), by part"
    if len(cases) < len(records):
        title += "; bars of one model to scale"
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

"""Draws when the layers of one sparse step computed, and when their caches came and went.

``python -m benchmarks.timeline_figure records.json figure.webp``
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.figures import COLOURS, NOTE, axes_of, draw_from_records, figure_of
from benchmarks.records import Record

LANES = {"copy_in": "copy in", "compute": "compute", "copy_out": "copy out"}
MOST_LAYERS = 12  # more would be too narrow to tell apart
LEAST_LABEL = 0.013  # of the width: what a layer's number needs


def draw(records: Sequence[Record]) -> Figure:
    """The first record with times: the first layers of its last step, a lane for each direction.

    Raises:
        ValueError: no record has times; they are taken on a GPU only.
    """
    timed = [each for each in records if (each.get("timeline") or {}).get("compute")]
    if not timed:
        raise ValueError("no timeline in these records: it is measured on a GPU")
    record = timed[0]
    layers, shown = record["layers"], min(MOST_LAYERS, record["layers"])
    end = max(last for layer, _, last in record["timeline"]["compute"] if layer < shown)
    figure = figure_of(12, 2.8)
    axes = axes_of(figure)
    for lane, name in enumerate(LANES):
        spans = record["timeline"].get(name) or []
        # Copies are numbered one by one; every layer has as many.
        each = 1 if name == "compute" else max(1, len(spans) // layers)
        for layer in range(shown):
            own = [s for s in spans if s[0] // each == layer and s[1] < end]
            widths = [(first, min(last, end) - first) for _, first, last in own]
            axes.broken_barh(widths, (lane - 0.3, 0.6), color=COLOURS[layer % 2])
            if own and own[-1][2] - own[0][1] >= LEAST_LABEL * end:
                middle = (own[0][1] + own[-1][2]) / 2
                axes.text(middle, lane, str(layer), color="white", ha="center", va="center")
    axes.set_yticks(range(len(LANES)), LANES.values())
    axes.set(xlim=(0, end), ylim=(len(LANES) - 0.5, -0.5), xlabel="ms")
    axes.set_title(
        f"{record['case']}: the first {shown} of {layers} layers of a sparse step, "
        f"{record['mlp']} MLP"
    )
    axes.grid(axis="x")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    note = f"{record['device']}, torch {record['torch']}, {record['dtype']}"
    figure.supxlabel(note, color=NOTE, fontsize=9)
    return figure


if __name__ == "__main__":
    draw_from_records("timeline_figure", __doc__, draw)

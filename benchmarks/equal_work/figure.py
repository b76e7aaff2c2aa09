"""Draws quality over work, or over time, from records.

A model, a size and a number of steps together have a panel of their own.

``python -m benchmarks.equal_work.figure FIGURE FILE...``
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator, PercentFormatter

from benchmarks.equal_work.curves import OURS, SKIPS, compared, joined, known_methods, qualities
from benchmarks.equal_work.curves import Axis as Measure
from benchmarks.equal_work.tables import by_workload, on_gpu
from benchmarks.figures import NOTE, axes_of, figure_of, save_figure
from benchmarks.records import Record, read

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
LABELS: dict[Measure, str] = {
    "work": "share of the dense generation's work",
    "time": "share of its GPU time",
}


def draw(records: Sequence[Record]) -> Figure:
    """The figure: mean PSNR over prompts, each method in the variant that is best at each share.

    Raises:
        ValueError: no record is of a clip that is compared.
    """
    found = compared(records)
    panels = [
        (name, clips, measure)
        for name, clips in by_workload(found).items()
        for measure in LABELS
        if measure == "work" or on_gpu(clips)
    ]
    if not panels:
        raise ValueError("no records of equal work")
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = figure_of(4.2 * columns + 2.0, 2.6 * rows + 0.3)
    drawn: dict[Any, Any] = {}
    for place, (name, clips, measure) in enumerate(panels, 1):
        axes = axes_of(figure, rows, columns, place)
        _draw_panel(axes, clips, measure)
        axes.set_title(f"{name}: PSNR, dB", fontsize=9)
        handles, methods = axes.get_legend_handles_labels()
        drawn.update(zip(methods, handles, strict=True))
    methods = [method for method in COLOURS if method in drawn]
    handles = [drawn[method] for method in methods]
    figure.legend(handles, methods, loc="outside right upper", frameon=False)
    devices = ", ".join(dict.fromkeys(clip["device"] for clip in found))
    figure.supxlabel(devices, color=NOTE, fontsize=9)
    return figure


def _draw_panel(axes: Axes, clips: Sequence[Record], measure: Measure) -> None:
    found = {share: qualities(clips, measure, share) for share in SHARES}
    known = known_methods(clips)
    for method, colour in COLOURS.items():
        points = [(share, at[method].mean) for share, at in found.items() if method in at]
        if method in known and points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=method, markersize=4)
    axes.set_xlabel(LABELS[measure])
    axes.xaxis.set_major_locator(MultipleLocator(0.05))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid()


def main() -> None:
    """Reads the records and writes the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figure", type=Path)
    parser.add_argument("records", type=Path, nargs="+")
    args = parser.parse_args()
    save_figure(draw(joined(read(*args.records))), args.figure)


if __name__ == "__main__":
    main()

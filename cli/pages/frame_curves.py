"""Curves over the frames of clips: how close each is to its reference, how much it flickers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from chipsparse.cli.compare.paired_runs import SIDES
from chipsparse.cli.pages.charts import SERIES, Chart, whole_axis
from chipsparse.cli.pages.comparison_record import ConfigsComparison, FilesComparison
from chipsparse.cli.views.names import name_of

PIXEL_SCALE = 255.0
METRICS = {
    "psnr_db": ("PSNR of each frame", "PSNR, dB", 1.0),
    "ssim": ("SSIM of each frame", "SSIM", 1.0),
    "lpips": ("LPIPS of each frame", "LPIPS", 1.0),
    "flicker_a": ("Flicker of A", "flicker of A, of 255", PIXEL_SCALE),
    "flicker_b": ("Flicker of B", "flicker of B, of 255", PIXEL_SCALE),
    "flicker": ("Flicker of each frame", "flicker, of 255", PIXEL_SCALE),
}

Frames = Sequence[Mapping[str, float | None]]  # of one clip: the values of each frame, by metric
Groups = Mapping[str, Sequence[Frames]]  # the clips of each config or file, by what they are


def configs_curves(record: ConfigsComparison) -> list[Chart]:
    """Charts of both configs; none of images."""
    groups = {
        f"{side}: {record.names[side]}": [run.per_frame for run in record.runs(side)]
        for side in SIDES
    }
    charts = [curves_chart(metric, groups) for metric in ("psnr_db", "ssim", "lpips", "flicker")]
    return [each for each in charts if each is not None]


def files_curves(record: FilesComparison) -> list[Chart]:
    """Charts of both files; none of images."""
    both = {"B against A": [record.per_frame]}
    flicker = {
        f"{side}: {name_of(file)}": [[{"flicker": frame.get(name)} for frame in record.per_frame]]
        for side, file, name in (("A", record.a, "flicker_a"), ("B", record.b, "flicker_b"))
    }
    charts = [curves_chart(metric, both) for metric in ("psnr_db", "ssim", "lpips")]
    charts.append(curves_chart("flicker", flicker))
    return [each for each in charts if each is not None]


def frames_table(record: FilesComparison) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: every frame's number, and its values of all that was measured."""
    found = [name for name in METRICS if any(f.get(name) is not None for f in record.per_frame)]
    rows = []
    for number, frame in enumerate(record.per_frame):
        values = ((frame.get(name), METRICS[name][2]) for name in found)
        cells = ("" if value is None else f"{scale * value:.4g}" for value, scale in values)
        rows.append([str(number), *cells])
    return ["frame", *(METRICS[name][1] for name in found)], rows


def curves_chart(metric: str, groups: Groups) -> Chart | None:
    """One metric over the frames: the median clip of each group, and from the least to the most.

    None where there is nothing to draw: clips of a single frame, or that have no such metric.
    """
    caption, label, scale = METRICS[metric]
    spreads = [spread(clips, metric, scale) for clips in groups.values()]
    frames = 1 + max((row[0] for rows in spreads for row in rows), default=0)
    if all(len(rows) < 2 for rows in spreads):
        return None

    def draw(axes: Axes) -> None:
        whole_axis(axes, "frame, from 0", frames)
        axes.set_ylabel(label)
        for (name, clips), rows, colour in zip(groups.items(), spreads, SERIES, strict=False):
            if len(rows) < 2:
                continue
            numbers, low, middle, high = zip(*rows, strict=True)
            if len(clips) > 1:
                axes.fill_between(numbers, low, high, color=colour, alpha=0.16, linewidth=0)
            known = dict(zip(numbers, middle, strict=True))
            places = range(numbers[0], numbers[-1] + 1)  # with a gap where no clip has a value
            line = "-" if colour == SERIES[0] else "--"
            heights = [known.get(place, float("nan")) for place in places]
            axes.plot(places, heights, color=colour, linestyle=line, label=name)
        if metric not in ("psnr_db", "ssim"):
            axes.set_ylim(bottom=0)

    return Chart(caption, draw, caption)


def spread(
    clips: Sequence[Frames], metric: str, scale: float
) -> list[tuple[int, float, float, float]]:
    """Frame, least, median and most of all clips, where any has a value."""
    rows = []
    for frame in range(max((len(clip) for clip in clips), default=0)):
        found = [clip[frame].get(metric) for clip in clips if frame < len(clip)]
        known = [scale * value for value in found if value is not None]
        if known:
            rows.append((frame, min(known), statistics.median(known), max(known)))
    return rows

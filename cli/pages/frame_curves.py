"""Curves over the frames of clips: how close each is to its reference, how much it flickers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chipsparse.cli.pages.axes import Axis, fitting
from chipsparse.cli.pages.chart import Band, Chart, Key, Line, Mark, figure, gaps
from chipsparse.cli.pages.elements import Element
from chipsparse.cli.pages.json_values import Values

PIXEL_SCALE = 255.0
METRICS = {
    "psnr_db": ("PSNR of each frame", "PSNR, dB", 1.0),
    "ssim": ("SSIM of each frame", "SSIM", 1.0),
    "lpips": ("LPIPS of each frame", "LPIPS", 1.0),
    "flicker_a": ("Flicker of A", "flicker of A, of 255", PIXEL_SCALE),
    "flicker_b": ("Flicker of B", "flicker of B, of 255", PIXEL_SCALE),
    "flicker": ("Flicker of each frame", "flicker, of 255", PIXEL_SCALE),
}

# A value for each frame; None where a metric has none, as flicker at both ends.
Curve = Sequence[float | None]


@dataclass(frozen=True)
class Curves:
    """The clips of one config or file.

    Attributes:
        label: what they are.
        clips: of each clip its curves, by metric.
    """

    label: str
    clips: Sequence[Mapping[str, Curve]]


def read_curves(entries: Sequence[Values]) -> dict[str, Curve]:
    """The curves of the ``per_frame`` list of a comparison; raises `UserError` if damaged."""
    names = {name: None for entry in entries for name in entry.content if name != "frame"}
    return {name: [entry.number_or_none(name) for entry in entries] for name in names}


def curves_figure(metric: str, groups: Sequence[Curves]) -> Element | None:
    """One metric over the frames: the median clip of each group, and from the least to the most.

    None where there is nothing to draw: clips of a single frame, or that have no such metric.
    """
    caption, label, scale = METRICS[metric]
    marks: list[Mark] = []
    keys, values, frames = [], [], 0
    for group, class_ in zip(groups, ("first", "second", "third"), strict=False):
        spread = _spread([clip[metric] for clip in group.clips if metric in clip], scale)
        if len(spread) < 2:
            continue
        frames = max(frames, int(spread[-1][0]) + 1)
        values += [value for _, low, _, high in spread for value in (low, high)]
        middle = [(place, median) for place, _, median, _ in spread]
        if len(group.clips) > 1:
            marks.insert(0, Band([(place, low, high) for place, low, _, high in spread], class_))
        dashed = class_ != "first"
        marks.append(Line(gaps(middle), class_, dashed))
        keys.append(Key(class_, group.label, "dashed" if dashed else "line"))
    if not keys:
        return None
    chart = Chart(
        caption,
        Axis("frame, from 0", -0.5, frames - 0.5, whole=True, grid=False),
        fitting(label, values, zero=metric not in ("psnr_db", "ssim")),
        marks,
    )
    return figure(chart, caption=caption, keys=keys)


def _spread(curves: Sequence[Curve], scale: float) -> list[tuple[float, float, float, float]]:
    """Frame, least, median and most of all clips, where any has a value."""
    rows = []
    for frame in range(max((len(curve) for curve in curves), default=0)):
        found = [curve[frame] for curve in curves if frame < len(curve)]
        known = [scale * value for value in found if value is not None]
        if known:
            rows.append((float(frame), min(known), statistics.median(known), max(known)))
    return rows

"""Charts of quality over speed, where nothing but the upper edge is worth having."""

from __future__ import annotations

from collections.abc import Sequence

from chipsparse.cli.pages.axes import fitting
from chipsparse.cli.pages.chart import Chart, Dots, Key, Line, Mark, figure
from chipsparse.cli.pages.elements import Element
from chipsparse.cli.pages.part import QualityPoint, folded, table
from chipsparse.cli.pages.units import times


def best_points(points: Sequence[QualityPoint]) -> list[QualityPoint]:
    """Those that no other one beats in both speed and quality, from the slowest to the fastest."""
    kept: list[QualityPoint] = []
    for point in sorted(points, key=lambda each: (-each.speedup, -each.psnr_db)):
        if not kept or point.psnr_db > kept[-1].psnr_db:
            kept.append(point)
    return kept[::-1]


def quality_speed_figure(points: Sequence[QualityPoint]) -> Element:
    """Several results against their own dense runs, and the line of the best of them."""
    best = best_points(points)
    edge = [(point.speedup, point.psnr_db) for point in best]
    others = [point for point in points if point not in best]
    marks: list[Mark] = [Line(edge, "first", dashed=True)]
    for group, class_, square in ((best, "first", False), (others, "second", True)):
        marks.append(
            Dots(
                [(each.speedup, each.psnr_db) for each in group],
                [f"{each.label}: {times(each.speedup)}, {each.psnr_db:.2f} dB" for each in group],
                class_,
                radius=5,
                square=square,
            )
        )
    chart = Chart(
        "quality over speed",
        fitting("times as fast as dense", [each.speedup for each in points], zero=False),
        fitting("PSNR against dense, dB", [each.psnr_db for each in points], zero=False),
        marks,
        height=340,
    )
    keys = [Key("first", "nothing here is both faster and closer to dense", "dot")]
    if others:
        keys.append(Key("second", "something here is", "square"))
    return figure(chart, caption="Quality over speed", keys=keys)


def points_table(points: Sequence[QualityPoint]) -> Element:
    """The same as a table, the fastest first."""
    ordered = sorted(points, key=lambda each: -each.speedup)
    rows = ((each.label, times(each.speedup), f"{each.psnr_db:.2f} dB") for each in ordered)
    return folded("All points as a table", table(("", "speed-up", "PSNR"), rows))

"""Charts of quality over speed, where nothing but the upper edge is worth having."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from chipsparse.cli.pages.axes import fitting
from chipsparse.cli.pages.chart import Chart, Dots, Key, Labels, Line, Mark, figure
from chipsparse.cli.pages.elements import Element
from chipsparse.cli.pages.part import QualityPoint, table
from chipsparse.cli.pages.units import times


def best_points(points: Sequence[QualityPoint]) -> list[QualityPoint]:
    """Those that no other one beats in both speed and quality, from the slowest to the fastest."""
    kept: list[QualityPoint] = []
    for point in sorted(points, key=lambda each: (-each.speedup, -each.psnr_db)):
        if not kept or point.psnr_db > kept[-1].psnr_db:
            kept.append(point)
    return kept[::-1]


def numbered(files: Sequence[Sequence[QualityPoint]]) -> dict[str, QualityPoint]:
    """The points of several files by their numbers: that of the file, or 2.1, 2.2 and so on."""
    found = {}
    for number, points in enumerate(files, 1):
        for place, point in enumerate(points, 1):
            found[str(number) if len(points) == 1 else f"{number}.{place}"] = point
    return found


def quality_speed_figure(points: Mapping[str, QualityPoint]) -> Element:
    """Several results against their own dense runs, by number, and the line of the best of them."""
    best = best_points(list(points.values()))
    edge = [(point.speedup, point.psnr_db) for point in best]
    marks: list[Mark] = [Line(edge, "first", dashed=True)]
    for class_, square in (("first", False), ("second", True)):
        group = {n: each for n, each in points.items() if (each in best) != square}
        marks.append(
            Dots(
                [(each.speedup, each.psnr_db) for each in group.values()],
                [
                    f"{n}: {each.label}: {times(each.speedup)}, {each.psnr_db:.2f} dB"
                    for n, each in group.items()
                ],
                class_,
                radius=5,
                square=square,
            )
        )
    places = [(each.speedup, each.psnr_db) for each in points.values()]
    marks.append(Labels(places, list(points)))
    chart = Chart(
        "quality over speed",
        fitting("times as fast as dense", [speedup for speedup, _ in places], zero=False),
        fitting("PSNR against dense, dB", [psnr_db for _, psnr_db in places], zero=False),
        marks,
        height=340,
    )
    keys = [Key("first", "nothing here is both faster and closer to dense", "dot")]
    if len(best) < len(points):
        keys.append(Key("second", "something here is", "square"))
    return figure(chart, caption="Quality over speed", keys=keys)


def points_table(points: Mapping[str, QualityPoint]) -> Element:
    """What the numbers of the chart stand for, the fastest first."""
    ordered = sorted(points.items(), key=lambda each: -each[1].speedup)
    rows = (
        (f"{n}: {each.label}", times(each.speedup), f"{each.psnr_db:.2f} dB") for n, each in ordered
    )
    return table(("number in the chart", "speed-up", "PSNR"), rows)

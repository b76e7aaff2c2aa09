"""Points of quality over speed, of which only those that nothing beats are worth having."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class QualityPoint:
    """A sparse generation, or several, against dense.

    Attributes:
        label: which.
        speedup: times as fast as dense.
        psnr_db: against dense, of the same prompt and seed.
    """

    label: str
    speedup: float
    psnr_db: float


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

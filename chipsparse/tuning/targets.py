"""The distance of a generation from the target of a search."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from chipsparse.profiles.tuned_range import TunedMeasurement, TunedTarget

SAME_DB = 100.0  # stands for outputs that are the same


@dataclass(frozen=True)
class Pair:
    """A sparse generation against the dense one of the same prompt and seed."""

    psnr_db: float  # at most `SAME_DB`
    ssim: float | None  # None where the frames are too small for it
    lpips: float | None  # None where it was not measured
    seconds: float  # of the sparse generation, text and decoding included
    dense_seconds: float  # the same of the dense one
    actions: tuple[str, ...] = ()  # of every step


def wants_quality(target: TunedTarget) -> bool:
    """Return True for a bound of quality, under which the fastest schedule is searched."""
    return (target.min_psnr_db, target.min_ssim, target.max_lpips) != (None, None, None)


def quality(target: TunedTarget, pair: Pair) -> float:
    """Return how far a pair is above the bounds of quality, in dB; its PSNR where there are none.

    SSIM and LPIPS are taken in dB of their distance from the same output, which falls about as a
    PSNR does, so that the bound that is missed by most decides.
    """
    margins = []
    if target.min_psnr_db is not None:
        margins.append(pair.psnr_db - target.min_psnr_db)
    if target.min_ssim is not None:
        ssim = 1.0 if pair.ssim is None else pair.ssim
        margins.append(_decibel(1 - ssim) - _decibel(1 - target.min_ssim))
    if target.max_lpips is not None:
        assert pair.lpips is not None
        margins.append(2 * (_decibel(pair.lpips) - _decibel(target.max_lpips)))
    return min(margins, default=pair.psnr_db)


def _decibel(distance: float) -> float:
    return -10 * math.log10(max(distance, 1e-6))


def meets_quality(target: TunedTarget, pairs: Sequence[Pair]) -> bool:
    """Return True where the worst pair is good enough."""
    return not wants_quality(target) or min(quality(target, pair) for pair in pairs) >= 0


def fast_enough(target: TunedTarget, pairs: Sequence[Pair]) -> bool:
    """Return True where the median generation meets the bounds of time."""
    seconds, dense_seconds = _median_seconds(pairs)
    return seconds <= limit_seconds(target, dense_seconds)


def limit_seconds(target: TunedTarget, dense_seconds: float) -> float:
    """Return the longest that a generation may take; infinite where nothing bounds it."""
    limit = math.inf if target.max_seconds is None else target.max_seconds
    return limit if target.min_speedup is None else min(limit, dense_seconds / target.min_speedup)


def _median_seconds(pairs: Sequence[Pair]) -> tuple[float, float]:
    return (
        statistics.median(pair.seconds for pair in pairs),
        statistics.median(pair.dense_seconds for pair in pairs),
    )


def measurement(pairs: Sequence[Pair]) -> TunedMeasurement:
    """Return the numbers that a profile holds of its pairs."""
    psnrs = [pair.psnr_db for pair in pairs]
    ssims = [pair.ssim for pair in pairs if pair.ssim is not None]
    distances = [pair.lpips for pair in pairs if pair.lpips is not None]
    seconds, dense_seconds = _median_seconds(pairs)
    worst, median = (
        None if value >= SAME_DB else round(value, 2)
        for value in (min(psnrs), statistics.median(psnrs))
    )
    return TunedMeasurement(
        prompts=len(pairs),
        psnr_db_worst=worst,
        psnr_db_median=median,
        ssim_worst=round(min(ssims), 4) if ssims else None,
        lpips_worst=round(max(distances), 4) if distances else None,
        seconds=round(seconds, 3),
        dense_seconds=round(dense_seconds, 3),
    )

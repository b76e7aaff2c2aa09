"""Bootstrap intervals over paired measurements: what another draw of prompts could have given.

The percentile method of Efron 1979, "Bootstrap methods: another look at the jackknife". All series
of one comparison are resampled with the same `draws`, which keeps their pairs together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
LEAST_VALUES = 2

Statistic = Literal["mean", "median"]


@dataclass(frozen=True)
class Interval:
    """A statistic of some values and the bounds between which most resamples have it.

    Attributes:
        value: of the values themselves.
        low: lower bound.
        high: upper bound.
    """

    value: float
    low: float
    high: float

    def contains(self, value: float) -> bool:
        """Whether a value lies between the bounds or on one of them."""
        return self.low <= value <= self.high


def draws(count: int, *, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """Which of ``count`` values each resample consists of, int64 ``[resamples, count]``.

    The same numbers for the same arguments. Raises `ValueError` for fewer than two values.
    """
    if count < LEAST_VALUES:
        raise ValueError(f"an interval needs at least {LEAST_VALUES} values, got {count}")
    return np.random.default_rng(seed).integers(count, size=(resamples, count))


def interval(
    values: Sequence[float], statistic: Statistic, drawn: np.ndarray, *, level: float = LEVEL
) -> Interval:
    """The percentile interval of the mean or the median.

    Args:
        values: ``[n]``; infinite ones of one sign are allowed, NaN is not.
        statistic: of what.
        drawn: int ``[resamples, n]``, from `draws`.
        level: share of the resamples between the bounds.

    Returns:
        Bounds that are the smallest values of the statistic with at least ``(1 - level) / 2`` and
        ``(1 + level) / 2`` of the resamples at or below them; nothing is interpolated.

    Raises:
        ValueError: a value is NaN, infinities cancel out, or the shapes differ.
    """
    series = np.asarray(values, dtype=np.float64)
    if series.ndim != 1 or drawn.ndim != 2 or drawn.shape[1] != len(series):
        raise ValueError(f"values {series.shape} and draws {drawn.shape} do not fit together")
    if np.isnan(series).any() or (np.isposinf(series).any() and np.isneginf(series).any()):
        raise ValueError(f"values must be numbers that can be added up, got {series.tolist()}")
    reduce = np.mean if statistic == "mean" else np.median
    found = np.sort(reduce(series[drawn], axis=1))

    def at(share: float) -> float:
        return float(found[max(0, math.ceil(share * len(found)) - 1)])

    return Interval(float(reduce(series)), at((1 - level) / 2), at((1 + level) / 2))

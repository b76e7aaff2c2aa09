"""Bootstrap intervals over paired measurements: the range that other prompts could have given.

The percentile method of Efron 1979, "Bootstrap methods: another look at the jackknife". All series
of one comparison are resampled with the same `draws`, which keeps their pairs together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from chipsparse.common.bounded import Number

RESAMPLES = 10_000
LEVEL = 0.95
LEAST_VALUES = 2

Statistic = Literal["mean", "median"]


class Estimate(BaseModel):
    """A statistic, and the bounds between which most resamples have it; None is infinite."""

    model_config = ConfigDict(frozen=True)

    value: Number | None = None
    low: Number | None = None
    high: Number | None = None

    @property
    def includes_zero(self) -> bool:
        """True where zero lies between the bounds, or on one of them."""
        return self.low is not None and self.low <= 0 and (self.high is None or self.high >= 0)

    @property
    def numbers(self) -> tuple[float, float, float] | None:
        """The value and both bounds; None where one is infinite."""
        if self.value is None or self.low is None or self.high is None:
            return None
        return self.value, self.low, self.high


def draws(count: int) -> np.ndarray:
    """Return the indices of ``count`` values in each resample, int64 ``[RESAMPLES, count]``.

    The same numbers for the same count. Raises `ValueError` for fewer than two values.
    """
    if count < LEAST_VALUES:
        raise ValueError(f"an interval needs at least {LEAST_VALUES} values, got {count}")
    return np.random.default_rng(0).integers(count, size=(RESAMPLES, count))


def interval(
    values: Sequence[float],
    statistic: Statistic,
    drawn: np.ndarray,
    *,
    level: float = LEVEL,
) -> Estimate:
    """Return the mean or the median with its percentile interval.

    Its bounds are the smallest values of the statistic with at least ``(1 - level) / 2`` and
    ``(1 + level) / 2`` of the resamples at or below them; nothing is interpolated.

    Takes values ``[n]`` and `draws` int ``[resamples, n]``. Raises `ValueError` for other shapes,
    NaN and -inf.
    """
    series = np.asarray(values, dtype=np.float64)
    if series.ndim != 1 or drawn.ndim != 2 or drawn.shape[1] != len(series):
        raise ValueError(f"values {series.shape} and draws {drawn.shape} do not fit together")
    if np.isnan(series).any() or np.isneginf(series).any():
        raise ValueError(f"values must be numbers that can be added up, got {series.tolist()}")
    reduce = np.mean if statistic == "mean" else np.median
    resampled = np.sort(reduce(series[drawn], axis=1))

    def finite(value: float | np.floating[Any]) -> float | None:
        return float(value) if math.isfinite(value) else None

    def at(share: float) -> float | None:
        return finite(resampled[max(0, math.ceil(share * len(resampled)) - 1)])

    low = at((1 - level) / 2)
    high = at((1 + level) / 2)
    return Estimate(value=finite(reduce(series)), low=low, high=high)

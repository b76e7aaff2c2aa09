"""Axes of charts: from where to where, with round numbers along them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

ROUND = (1.0, 2.0, 5.0, 10.0)


def number(value: float) -> str:
    """A number with as many digits as its ticks need."""
    return f"{value:,.10g}" if abs(value) < 1e6 else f"{value:.3g}"


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        label: what it shows, with the unit.
        low: its first value.
        high: its last one, larger.
        text: how a value is written.
        whole: whether only whole numbers mean anything.
        down: whether it grows downwards, as the layers of a model do.
        grid: whether its ticks have lines through the chart.
    """

    label: str
    low: float
    high: float
    text: Callable[[float], str] = number
    whole: bool = False
    down: bool = False
    grid: bool = True

    def ticks(self, most: int) -> list[float]:
        """Round values on the axis, no more than so many."""
        span = self.high - self.low
        least = span / max(1, most - 1)
        power = 10.0 ** math.floor(math.log10(least))
        step = next(power * each for each in ROUND if power * each >= 0.999 * least)
        if self.whole:
            step = max(1.0, step)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(step * place, 10) for place in range(first, last + 1)][:most]


def steps_axis(count: int) -> Axis:
    """The denoising steps of a generation."""
    return Axis("denoising step, from 0", -0.5, max(1, count) - 0.5, whole=True, grid=False)


def fitting(
    label: str,
    values: Iterable[float],
    *,
    zero: bool = True,
    text: Callable[[float], str] = number,
) -> Axis:
    """An axis on which all values lie.

    Args:
        label: see `Axis`.
        values: finite ones; there may be none.
        zero: whether it begins at zero, as it must where areas are compared.
        text: see `Axis`.
    """
    known = [*values] or [0.0]
    low, high = min(known), max(known)
    if zero:
        low, high = min(0.0, low), max(0.0, high)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return Axis(label, low if zero and low == 0 else low - margin, high + margin, text)

"""Means and medians over prompts with their bootstrap intervals, of each config and of B - A."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from chipsparse.cli.compare.paired_runs import SIDES, ConfigRun, PromptRuns
from chipsparse.cli.results import fields_json
from chipsparse.experiments.statistics import Interval, draws, interval

Column = Literal["A", "B", "B - A"]

FLICKER_SCALE = 255.0  # people think of pixels as 8-bit values


@dataclass(frozen=True)
class Metric:
    """One number of each generation.

    Attributes:
        title: for people, with its unit.
        value: of a generation; None where it has none.
        scale: what it is multiplied with for people.
    """

    title: str
    form: str
    value: Callable[[ConfigRun], float | None]
    scale: float = 1.0

    def text(self, value: float, *, sign: bool = False) -> str:
        """A value for people; one that would be rounded to zero keeps its first digits."""
        if math.isinf(value):
            return "the same"
        shown, form = self.scale * value, self.form
        if shown and float(format(shown, form)) == 0:
            form = ".1e"
        return format(shown, ("+" if sign else "") + form)


METRICS: dict[str, Metric] = {
    "psnr_db": Metric("PSNR (dB)", ".2f", lambda run: run.clip.psnr_db),
    "ssim": Metric("SSIM", ".4f", lambda run: run.clip.ssim),
    "lpips": Metric("LPIPS", ".4f", lambda run: run.clip.lpips),
    "flicker_change": Metric(
        "flicker change", ".3f", lambda run: run.clip.flicker_change, scale=FLICKER_SCALE
    ),
    "seconds": Metric("seconds", ".2f", lambda run: run.seconds),
    "speedup": Metric("speed-up", ".2f", lambda run: run.speedup),
}


@dataclass(frozen=True)
class Summary:
    """One metric over all prompts."""

    mean: Interval
    median: Interval

    def to_json(self) -> dict[str, Any]:
        """Both, and whether zero is in their intervals."""
        both = {"mean": self.mean, "median": self.median}
        return {
            name: {**fields_json(found), "includes_zero": found.contains(0.0)}
            for name, found in both.items()
        }


def statistics(prompts: list[PromptRuns]) -> dict[Column, dict[str, Summary | None]]:
    """All metrics over all prompts, of A, of B, and of B - A, prompt by prompt.

    Every metric is resampled by the same prompts. None where one has no values, and of B - A also
    where one of a pair is infinite.
    """
    drawn = draws(len(prompts))
    found: dict[Column, dict[str, Summary | None]] = {"A": {}, "B": {}, "B - A": {}}
    for name, metric in METRICS.items():
        a, b = ([metric.value(runs.sides[side]) for runs in prompts] for side in SIDES)
        found["A"][name] = _summary(a, drawn)
        found["B"][name] = _summary(b, drawn)
        found["B - A"][name] = _summary([*map(_minus, b, a)], drawn)
    return found


def _minus(b: float | None, a: float | None) -> float | None:
    if a is None or b is None or math.isinf(a) or math.isinf(b):
        return None
    return b - a


def _summary(series: list[float | None], drawn: np.ndarray) -> Summary | None:
    known = [value for value in series if value is not None]
    if len(known) < len(series):
        return None
    return Summary(interval(known, "mean", drawn), interval(known, "median", drawn))

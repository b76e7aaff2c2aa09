"""Walks along the frontier until a target holds, with as few measurements as possible.

What is measured rises along the frontier as what is predicted does, but not by as much: every
measurement moves the prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Measure = Callable[[int], float]


@dataclass(frozen=True)
class Found:
    """Where a search ended.

    Attributes:
        place: the first place at which the target was seen to hold, None where it holds at none.
        measured: what was measured, by place.
    """

    place: int | None
    measured: dict[int, float]

    @property
    def best(self) -> int:
        """The place with the best measurement."""
        return max(self.measured, key=lambda place: self.measured[place])


def search(
    predicted: Sequence[float],
    goal: float,
    measure: Measure,
    *,
    known: Mapping[int, float] | None = None,
    tolerance: float,
    rounds: int,
) -> Found:
    """Looks for the first place whose measurement reaches the goal.

    Args:
        predicted: a score for every place, rising; a larger one is better.
        goal: the score to reach.
        measure: the true score of a place.
        known: scores that were measured before.
        tolerance: a place that is better than the goal by no more than this will do.
        rounds: most measurements. Where the target was not seen to hold by then, the last place is
            measured as well.
    """
    measured = dict(known or {})
    last = len(predicted) - 1
    for _ in range(rounds):
        low, high = bracket(measured, goal, last)
        if high - low <= 1 or (high in measured and measured[high] <= goal + tolerance):
            break
        wanted = _wanted(predicted, measured, goal, low, high)
        place = next((i for i in range(low + 1, high) if predicted[i] >= wanted), high - 1)
        measured[place] = measure(place)
    _, high = bracket(measured, goal, last)
    if high > last and last not in measured:
        measured[last] = measure(last)
        _, high = bracket(measured, goal, last)
    return Found(high if high <= last else None, measured)


def bracket(measured: Mapping[int, float], goal: float, last: int) -> tuple[int, int]:
    """The last place below the first good one that failed, and that first good one.

    Where none failed the former is -1, where none is good the latter is one past the end.
    """
    high = min((place for place, score in measured.items() if score >= goal), default=last + 1)
    low = max((p for p, score in measured.items() if score < goal and p < high), default=-1)
    return low, high


def _wanted(
    predicted: Sequence[float], measured: Mapping[int, float], goal: float, low: int, high: int
) -> float:
    """The prediction at which the goal should be reached, from the nearest measurements."""
    ends = [place for place in (low, high) if place in measured]
    if not ends:
        return goal
    if len(ends) == 1:
        return predicted[ends[0]] + goal - measured[ends[0]]
    share = (goal - measured[low]) / (measured[high] - measured[low])
    # Not too near to an end: a measurement there would say little.
    share = min(0.9, max(0.1, share))
    return predicted[low] + share * (predicted[high] - predicted[low])

"""The search of `chipsparse tune`: the form of a schedule, and its number of full steps.

Forms are compared at one time of a generation: the time that is asked for, or the one at which the
first form meets the quality that is asked for. Each gets as many full steps as fit into that time,
by the times of its steps on this machine, and the best quality wins.

All decisions follow from the lab's measurements, so that a search that goes on from kept ones takes
the same way again.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from chipsparse.config import SparsityConfig
from chipsparse.profiles.tuned_range import TunedTarget
from chipsparse.tuning.forms import LEAST_FULL_STEPS, ActionSeconds, Candidate, Form, Forms
from chipsparse.tuning.jump_costs import Trajectory
from chipsparse.tuning.targets import (
    Pair,
    fast_enough,
    limit_seconds,
    meets_quality,
    quality,
    wants_quality,
)

Rival = TypeVar("Rival")


class Lab(Protocol):
    """Generates and measures; prompts are numbered, those that calibrate first."""

    def trajectory(self, prompt: int) -> Trajectory:
        """Return that of the dense generation of a prompt."""

    def step_seconds(self) -> ActionSeconds:
        """Return the times of steps; asked after the trajectories."""

    def pair(self, config: SparsityConfig, prompt: int, form: str) -> Pair:
        """Return a generation against the dense one; ``form`` describes it for people."""


@dataclass(frozen=True)
class Tried:
    """A candidate on held-out prompts, as far as it was tried."""

    candidate: Candidate
    pairs: Sequence[Pair]


class Unreachable(Exception):
    """Nothing that was tried meets the target; `best` comes closest, on all held-out prompts."""

    def __init__(self, best: Tried, *, out_of_budget: bool) -> None:
        super().__init__()
        self.best = best
        self.out_of_budget = out_of_budget


def least_budget(calibrating: int, held_out: int) -> int:
    """Return about how many dense generations a search takes in any case: see `Search`."""
    return calibrating + 2 * held_out + 2


@dataclass
class Search:
    """One search."""

    lab: Lab
    base: SparsityConfig  # what all candidates have in common
    steps: int
    target: TunedTarget
    calibrating: Sequence[int]  # prompts
    held_out: Sequence[int]  # others, that verify
    budget: float  # dense generations whose time all may take, with those and the timing of steps
    _spent: dict[tuple[SparsityConfig, int], float] = field(default_factory=dict, init=False)
    _forms: Forms = field(init=False)
    _seconds: ActionSeconds = field(init=False)

    def run(self) -> Tried:
        """Return the best candidate, on all held-out prompts, or raise `Unreachable`."""
        trajectories = [self.lab.trajectory(prompt) for prompt in self.calibrating]
        self._seconds = self.lab.step_seconds()
        self._forms = Forms(self.base, trajectories, self._seconds)
        usual = max(LEAST_FULL_STEPS, self.steps // 4)
        form = self._forms.first(usual)
        if wants_quality(self.target):
            # Where the budget ends before any was seen to pass: the largest number there is.
            count = self._count_for_quality(form, self.calibrating[:1], usual) or self.steps - 1
            limit = self._predicted(form, count)
        else:
            limit = limit_seconds(self.target, self._dense_seconds)
        form = self._best_form(form, limit)
        start = self._fitting(form, limit)
        if wants_quality(self.target):
            start = self._count_for_quality(form, self.calibrating, start or usual) or start
            return self._verified(form, start or self.steps - 1)
        return self._verified(form, start or LEAST_FULL_STEPS)

    @property
    def _dense_seconds(self) -> float:
        return self._seconds.dense * self.steps + self._seconds.other

    def _predicted(self, form: Form, count: int) -> float:
        return self._seconds.generation(self._forms.candidate(form, count))

    def _fitting(self, form: Form, limit: float) -> int | None:
        """Return the number of full steps with which a form takes no longer."""
        counts = range(LEAST_FULL_STEPS, self.steps)
        too_slow = bisect_left(counts, True, key=lambda n: self._predicted(form, n) > limit)
        return counts[too_slow - 1] if too_slow else None

    def _pair(self, candidate: Candidate, prompt: int) -> Pair:
        pair = self.lab.pair(candidate.config, prompt, candidate.describe)
        self._spent[candidate.config, prompt] = pair.seconds / pair.dense_seconds
        return pair

    def _score(self, candidate: Candidate, prompt: int) -> float:
        return quality(self.target, self._pair(candidate, prompt))

    def _left(self) -> float:
        """Return the rest of the budget, the dense generations of all prompts set aside."""
        dense = len(self.calibrating) + len(self.held_out)
        timing = self._seconds.measuring / self._dense_seconds
        return self.budget - dense - timing - sum(self._spent.values())

    def _best_form(self, form: Form, limit: float) -> Form:
        """Return the form with the best quality of those that take so long, choice by choice."""
        forms = self._forms
        choices = (forms.of_skips, forms.of_sparse_steps, forms.of_sparse_mlps)
        # Enough to verify twice is left for later.
        share = min(1.0, limit / self._dense_seconds)
        reserve = 2 * share * len(self.held_out)
        rounds = sum(0.5**turn for turn in self.calibrating)
        for place, rivals_of in enumerate(choices):
            count = self._fitting(form, limit) or LEAST_FULL_STEPS
            sized: dict[SparsityConfig, Candidate] = {}  # with as many full steps as fit
            for rival in (form, *rivals_of(form, count)):
                fitting = self._fitting(rival, limit)
                if fitting is not None:
                    candidate = forms.candidate(rival, fitting)
                    sized.setdefault(candidate.config, candidate)
            allowance = (self._left() - reserve) / (len(choices) - place)
            rivals = list(sized.values())[: max(1, int(allowance / (share * rounds)))]
            if len(rivals) > 1:
                form = halve(rivals, self.calibrating, self._score).form
        return form

    def _count_for_quality(self, form: Form, prompts: Sequence[int], start: int) -> int | None:
        """Return the least number of full steps with which the prompts meet the target, if any."""

        def passes(count: int) -> bool:
            candidate = self._forms.candidate(form, count)
            return all(self._score(candidate, prompt) >= 0 for prompt in prompts)

        def may_go_on() -> bool:
            """Return True while the held-out prompts could be verified after one more candidate."""
            dearest = max(self._spent.values(), default=0.0)
            return self._left() >= (len(self.held_out) + 1) * dearest

        return smallest(LEAST_FULL_STEPS, self.steps - 1, start, passes, may_go_on)

    def _verified(self, form: Form, count: int) -> Tried:
        """Return the number of full steps around this one that holds on the held-out prompts."""
        tried: dict[int, Tried] = {}
        # Without a bound of quality the more, the better, but the slower.
        sign = 1 if wants_quality(self.target) else -1
        meets = meets_quality if wants_quality(self.target) else fast_enough

        def passes(signed: int) -> bool:
            candidate = self._forms.candidate(form, sign * signed)
            pairs = list[Pair]()
            for prompt in self.held_out:
                pairs.append(self._pair(candidate, prompt))
                if not meets_quality(self.target, pairs):
                    break
            tried[signed] = Tried(candidate, pairs)
            return meets(self.target, pairs)

        def may_go_on() -> bool:
            return not tried or self._left() > 0

        def closeness(one: Tried) -> float:
            if wants_quality(self.target):
                return min(quality(self.target, pair) for pair in one.pairs)
            return -max(pair.seconds for pair in one.pairs)

        low, high = sorted((sign * LEAST_FULL_STEPS, sign * (self.steps - 1)))
        result = smallest(low, high, sign * count, passes, may_go_on)
        if result is not None and fast_enough(self.target, tried[result].pairs):
            return tried[result]
        best = tried[result] if result is not None else max(tried.values(), key=closeness)
        # Those that a miss ended are generated to the end.
        pairs = [self._pair(best.candidate, prompt) for prompt in self.held_out]
        raise Unreachable(Tried(best.candidate, pairs), out_of_budget=not may_go_on())


def halve(
    rivals: Sequence[Rival],
    prompts: Sequence[int],
    score: Callable[[Rival, int], float],
) -> Rival:
    """Return the rival with the best mean score by successive halving.

    All rivals are scored on the first prompt, the better half on the next one, and so on. The
    largest score wins; of equal ones the first.
    """
    scores: dict[int, list[float]] = {place: [] for place in range(len(rivals))}
    for turn, prompt in enumerate(prompts):
        if len(scores) == 1:
            break
        for place, own in scores.items():
            own.append(score(rivals[place], prompt))
        best = sorted(scores, key=lambda place: -statistics.fmean(scores[place]))
        kept = 1 if turn == len(prompts) - 1 else math.ceil(len(best) / 2)
        scores = {place: scores[place] for place in best[:kept]}
    return rivals[next(iter(scores))]


def smallest(
    low: int,
    high: int,
    start: int,
    passes: Callable[[int], bool],
    may_go_on: Callable[[], bool],
) -> int | None:
    """Return the smallest number that passes; None where none is known to.

    All above a number that passes pass, too. Looks from the start on in growing strides, then by
    bisection.
    """
    failed = low - 1
    passed = high + 1
    place = min(high, max(low, start))
    stride = 1
    while failed + 1 < passed and may_go_on():
        if passes(place):
            passed = place
        else:
            failed = place
        if failed >= low and passed <= high:
            place = (failed + passed) // 2
        else:
            place = max(low, passed - stride) if passed <= high else min(high, failed + stride)
            stride *= 2
    return passed if passed <= high else None

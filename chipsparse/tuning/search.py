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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from chipsparse.config import SparsityConfig
from chipsparse.profiles.tuned_range import TunedTarget
from chipsparse.schedule.schedule import Action, Schedule
from chipsparse.tuning.forms import ActionSeconds, Form, Lists
from chipsparse.tuning.jump_costs import Trajectory
from chipsparse.tuning.placed_steps import Steps
from chipsparse.tuning.targets import (
    Pair,
    fast_enough,
    limit_seconds,
    meets_quality,
    quality,
    wants_quality,
)

Rival = TypeVar("Rival")

LEAST_FULL_STEPS = 2


class Lab(Protocol):
    """Generates and measures; prompts are numbered, those that calibrate first."""

    def trajectory(self, prompt: int) -> Trajectory:
        """Of the dense generation of a prompt."""

    def step_seconds(self) -> ActionSeconds:
        """What steps take; after the trajectories."""

    def pair(self, config: SparsityConfig, prompt: int, form: str) -> Pair:
        """A generation against the dense one; ``form`` says what it is, for people."""


@dataclass(frozen=True)
class Candidate:
    """A config with what it is made of."""

    form: Form
    steps: Steps
    config: SparsityConfig
    describe: str


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
    """Dense generations that a search takes in any case, about: see `Search`."""
    return calibrating + 2 * held_out + 2


class Search:
    """One search.

    Args:
        lab: generates and measures.
        base: what all candidates have in common.
        steps: denoising steps.
        target: what is asked for.
        calibrating: how many prompts calibrate.
        held_out: how many others verify.
        budget: what may be generated, in the time of dense generations, those and what times the
            steps included.
    """

    def __init__(
        self,
        lab: Lab,
        base: SparsityConfig,
        steps: int,
        target: TunedTarget,
        *,
        calibrating: int,
        held_out: int,
        budget: float,
    ) -> None:
        self._lab, self._base, self._steps, self._target = lab, base, steps, target
        self._calibrating = range(calibrating)
        self._held_out = range(calibrating, calibrating + held_out)
        self._budget = budget
        self._most = steps - 1  # full steps
        self._wants_quality = wants_quality(target)
        self._spent: dict[tuple[SparsityConfig, int], float] = {}
        self._lists: Lists
        self._seconds: ActionSeconds

    def run(self) -> Tried:
        """The best candidate, on all held-out prompts.

        Raises:
            Unreachable: none was seen to meet the target.
        """
        trajectories = [self._lab.trajectory(prompt) for prompt in self._calibrating]
        self._seconds = self._lab.step_seconds()
        self._lists = Lists(trajectories, self._seconds)
        self._dense_seconds = self._seconds.dense * self._steps + self._seconds.other
        usual = max(LEAST_FULL_STEPS, self._steps // 4)
        form = self._lists.first(usual)
        if self._wants_quality:
            # Where the budget ends before any was seen to pass: the largest number there is.
            count = self._count_for_quality(form, self._calibrating[:1], usual) or self._most
            limit = self._predicted(form, count)
            form = self._best_form(form, limit)
            start = self._fitting(form, limit)
            found = self._count_for_quality(form, self._calibrating, start or usual)
            return self._verified(form, found or start or self._most)
        limit = limit_seconds(self._target, self._dense_seconds)
        form = self._best_form(form, limit)
        return self._verified(form, self._fitting(form, limit) or LEAST_FULL_STEPS)

    # Candidates, and their times.

    def _candidate(self, form: Form, count: int) -> Candidate:
        steps = self._lists.steps(form, count)
        config = form.config(self._base, steps)
        return Candidate(form, steps, config, form.describe(config, self._steps))

    def _predicted(self, form: Form, count: int) -> float:
        return self._seconds.generation(form, self._lists.steps(form, count), self._steps)

    def _fitting(self, form: Form, limit: float) -> int | None:
        """The number of full steps with which a form takes no longer."""
        counts = range(LEAST_FULL_STEPS, self._steps)
        too_slow = bisect_left(counts, True, key=lambda n: self._predicted(form, n) > limit)
        return counts[too_slow - 1] if too_slow else None

    def _pair(self, candidate: Candidate, prompt: int) -> Pair:
        pair = self._lab.pair(candidate.config, prompt, candidate.describe)
        self._spent[candidate.config, prompt] = pair.seconds / pair.dense_seconds
        return pair

    def _score(self, candidate: Candidate, prompt: int) -> float:
        return quality(self._target, self._pair(candidate, prompt))

    def _left(self) -> float:
        """The rest of the budget, the dense generations of all prompts set aside."""
        dense = len(self._calibrating) + len(self._held_out)
        timing = self._seconds.measuring / self._dense_seconds
        return self._budget - dense - timing - sum(self._spent.values())

    # The form.

    def _best_form(self, form: Form, limit: float) -> Form:
        """The form with the best quality of those that take so long, choice by choice."""
        choices: Sequence[Callable[[Form, int], Iterator[Form]]] = (
            self._lists.of_skips,
            self._lists.of_sparse_steps,
            self._lists.of_sparse_mlps,
        )
        # Enough to verify twice is left for later.
        share = min(1.0, limit / self._dense_seconds)
        reserve = 2 * share * len(self._held_out)
        for place, rivals_of in enumerate(choices):
            count = self._fitting(form, limit) or LEAST_FULL_STEPS
            rivals = self._sized(form, rivals_of(form, count), limit)
            allowance = (self._left() - reserve) / (len(choices) - place)
            rounds = sum(0.5**turn for turn in self._calibrating)
            rivals = rivals[: max(1, int(allowance / (share * rounds)))]
            if len(rivals) > 1:
                form = halve(rivals, self._calibrating, self._score).form
        return form

    def _sized(self, own: Form, others: Iterator[Form], limit: float) -> list[Candidate]:
        """Each form with as many full steps as fit, the same config only once.

        Those that are to have sparse steps and get none are left out: they differ in nothing that
        is computed.
        """
        found: dict[SparsityConfig, Candidate] = {}
        for form in (own, *others):
            count = self._fitting(form, limit)
            if count is not None:
                candidate = self._candidate(form, count)
                schedule = Schedule(candidate.config.schedule, self._steps)
                actions = {schedule.action(step) for step in range(self._steps)}
                if form == own or not form.is_sparse or Action.SPARSE in actions:
                    found.setdefault(candidate.config, candidate)
        return list(found.values())

    # The number of full steps.

    def _count_for_quality(self, form: Form, prompts: Sequence[int], start: int) -> int | None:
        """The least number with which the prompts meet the target; None where none is known to."""

        def passes(count: int) -> bool:
            candidate = self._candidate(form, count)
            return all(self._score(candidate, prompt) >= 0 for prompt in prompts)

        def may_go_on() -> bool:
            """Whether the held-out prompts could be verified after one more candidate."""
            dearest = max(self._spent.values(), default=0.0)
            return self._left() >= (len(self._held_out) + 1) * dearest

        return smallest(LEAST_FULL_STEPS, self._most, start, passes, may_go_on)

    def _verified(self, form: Form, count: int) -> Tried:
        """The number of full steps around this one that holds on the held-out prompts."""
        tried: dict[int, Tried] = {}
        # Without a bound of quality the more, the better, but the slower.
        sign = 1 if self._wants_quality else -1
        meets = meets_quality if self._wants_quality else fast_enough

        def passes(signed: int) -> bool:
            candidate, pairs = self._candidate(form, sign * signed), list[Pair]()
            for prompt in self._held_out:
                pairs.append(self._pair(candidate, prompt))
                if not meets_quality(self._target, pairs):
                    break
            tried[signed] = Tried(candidate, pairs)
            return meets(self._target, pairs)

        def may_go_on() -> bool:
            return not tried or self._left() > 0

        low, high = sorted((sign * LEAST_FULL_STEPS, sign * self._most))
        found = smallest(low, high, sign * count, passes, may_go_on)
        if found is not None and fast_enough(self._target, tried[found].pairs):
            return tried[found]
        best = tried[found] if found is not None else max(tried.values(), key=self._closeness)
        # Those that a miss ended are generated to the end.
        pairs = [self._pair(best.candidate, prompt) for prompt in self._held_out]
        raise Unreachable(Tried(best.candidate, pairs), out_of_budget=not may_go_on())

    def _closeness(self, tried: Tried) -> float:
        if self._wants_quality:
            return min(quality(self._target, pair) for pair in tried.pairs)
        return -max(pair.seconds for pair in tried.pairs)


def halve(
    rivals: Sequence[Rival], prompts: Sequence[int], score: Callable[[Rival, int], float]
) -> Rival:
    """The rival with the best mean score by successive halving.

    All rivals are scored on the first prompt, the better half on the next one, and so on.

    Args:
        rivals: at least one; of equal ones the first wins.
        prompts: at least one.
        score: the larger, the better; asked once for each rival and prompt that come together.
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
    low: int, high: int, start: int, passes: Callable[[int], bool], may_go_on: Callable[[], bool]
) -> int | None:
    """The smallest number that passes, where all above it pass, too; None where none is known to.

    Looks from the start on in growing strides, then by bisection.
    """
    failed, passed = low - 1, high + 1
    place, stride = min(high, max(low, start)), 1
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

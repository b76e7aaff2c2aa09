"""The action of each denoising step. Pure, printable, comparable."""

from __future__ import annotations

import bisect
import enum
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from chipsparse.config import ScheduleConfig

MANY_STEPS = 1000  # assumed where the number of steps is not known
FEW_STEPS = 16  # fewer make too large jumps for any share of full steps below a half
# Above a flow shift, the share of steps in full from which correction gains where all others are
# skipped: below, it lost 0.5 to 2 dB on tiny-wan (benchmarks/notes/schedules.md).
LEAST_CORRECTED = ((5.5, 0.28), (4.0, 0.2))
# The weight of a skipped step by its place u in the generation, 0 to 1:
# exp(EARLY exp(-u / REACH) + LATE u^POWER). Fitted to lists that were searched for two models, and
# the best that was tried where skipped steps are not put right: benchmarks/notes/schedules.md.
EARLY = 4.1
REACH = 0.2
LATE = 1.7
POWER = 9
# They are flatter where sparse steps stand between full ones: the caches of a refresh grow old.
EARLY_OF_SPARSE = 3.0
LATE_OF_SPARSE = 1.4
# So few steps have at most so many full ones, see `short_list`.
SHORT_RUN = 8
FULL_OF_SHORT = 3
SHARES = {0.5: "half a forecast", 1.0: "a full forecast"}
NO_SHARE = (
    "a share of the steps needs their number, which the pipeline does not tell: full_share makes "
    "all of them full, sparse_steps none sparse"
)


class Action(str, enum.Enum):
    """The computation of one layer at one step.

    DENSE records the LSE, REFRESH also chooses columns and fills the caches, SPARSE
    computes only the kept columns and neurons, SKIP makes its output of those before.
    """

    DENSE = "dense"
    REFRESH = "refresh"
    SPARSE = "sparse"
    SKIP = "skip"

    __str__ = str.__str__


@dataclass(frozen=True)
class Schedule:
    """The meaning of a schedule's config for a number of steps."""

    config: ScheduleConfig  # what the user asked for
    steps: int | None  # number of denoising steps, or None where the pipeline does not say
    first: int = 0  # the first step that runs: not 0 where the generation starts from an image
    corrects: bool = True  # True where the scheduler lets skipped steps be put right

    @property
    def run(self) -> int | None:
        return None if self.steps is None else self.steps - self.first

    @property
    def is_short(self) -> bool:
        """True where there are so few steps that all but some of the first are sparse."""
        share = self.config.full_share
        run = self.run or 0
        some_sparse = share is not None and round(share * run) < run and self.config.sparse_steps
        return bool(some_sparse) and 2 < run <= SHORT_RUN

    @cached_property
    def full_steps(self) -> tuple[int, ...] | None:
        """The steps that are listed to be computed in full, the first one among them.

        None where none are listed: the schedule has the published form, or gives a share of a
        number of steps that is not known.
        """
        config = self.config
        run = self.run
        share = self.config.full_share
        if not config.lists_full:
            return None
        if config.full_steps is not None:
            reached = range(self.first, self.end)
            return tuple(sorted({self.first, *(s for s in config.full_steps if s in reached)}))
        if run is None or share is None:
            return None
        if self.is_short:
            listed = short_list(run)
        else:
            count = min(run, max(config.least_full, round(share * run)))
            listed = spread(run, count, among_sparse=bool(config.sparse_steps))
        return tuple(self.first + step for step in listed)

    @cached_property
    def sparse_steps(self) -> tuple[int, ...]:
        """The steps that a list of full steps makes sparse."""
        share = self.config.sparse_steps
        run = self.run
        full = self.full_steps
        assert full is not None
        if isinstance(share, tuple):
            return share
        if share == 1 or self.is_short:
            return tuple(range(self.end))
        if run is None:
            return ()
        listed = halved([step - self.first for step in full], run, round(share * run))
        return tuple(self.first + step for step in listed)

    @property
    def end(self) -> int:
        """The number of steps, or many of them."""
        return MANY_STEPS if self.steps is None else self.steps

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """The action of every step from 0 on; the last one stands for all that may follow."""
        config = self.config
        if config.actions:
            count = len(config.actions)
            return tuple(Action(config.actions[min(step, count - 1)]) for step in range(self.end))
        if self.full_steps is not None:
            return around_full(self.full_steps, self.sparse_steps, self.end)
        if config.lists_full:  # a share of a number that is not known
            return (Action.DENSE,) * self.end
        last = 0 if self.steps is None else config.warmup_steps // 3
        return periodic(self.end, config.warmup_steps, config.refresh_every, last)

    @property
    def skips_any(self) -> bool:
        return Action.SKIP in self.actions[self.first :]

    def forecast_share(self, step: int) -> float:
        """Return the share of a forecast in the output of a skipped step; 0: it is held."""
        after = self.config.forecast_after
        begun = after == 0 if self.run is None else step - self.first >= after * self.run
        return self.config.forecast if begun else 0.0

    @property
    def forecasts_any(self) -> bool:
        return self.skips_any and self.forecast_share(self.end - 1) > 0

    def why_not_corrected(self, shift: float) -> str | None:
        """Return why correction would lose at a flow shift; None where it gains."""
        actions = () if self.steps is None else self.actions[self.first :]
        computed = len(actions) - actions.count(Action.SKIP)
        least = next((share for above, share in LEAST_CORRECTED if shift > above), 0.0)
        if Action.SPARSE in actions or computed >= least * len(actions):
            return None
        return (
            f"only {computed} of {len(actions)} steps are computed, too few of them for a flow "
            "shift that is so large"
        )

    def notes(self) -> list[str]:
        config = self.config
        run = self.run
        if not config.lists_full:
            return []
        if run is None:
            lost = config.full_share is not None or (config.sparse_steps and not self.sparse_steps)
            return [NO_SHARE] if lost else []
        count = len(self.full_steps or ())
        if config.full_share is None or run >= FEW_STEPS or 2 * count >= run or self.is_short:
            return []
        return [
            f"full_share {config.full_share:g} of only {run} steps lists {count} of them: such "
            "shares are made for some 50 steps; list more with full_steps, a larger full_share or "
            "least_full",
        ]


def periodic(end: int, first: int, every: int, last: int) -> tuple[Action, ...]:
    """Return the schedule as published: a refresh ``every`` so many steps, sparse ones between.

    Of ``end`` steps the ``first`` ones are computed in full, and the last of those is a refresh. At
    the end ``last`` steps are dense.
    """
    actions = [Action.DENSE] * end
    for step in range(first - 1, end - last):
        actions[step] = Action.SPARSE if (step - first + 1) % every else Action.REFRESH
    return tuple(actions)


def around_full(full_steps: Sequence[int], sparse: Iterable[int], end: int) -> tuple[Action, ...]:
    """Return full steps, refreshes where sparse ones come behind them, and the rest skipped.

    ``full_steps`` are in order, from the first step that runs on.
    """
    actions = [Action.DENSE] * end
    wanted = set(sparse)
    for full, following in itertools.pairwise((*full_steps, end)):
        gap = range(full + 1, following)
        if full > full_steps[0] and not wanted.isdisjoint(gap):
            actions[full] = Action.REFRESH
        for step in gap:
            actions[step] = Action.SPARSE if step in wanted else Action.SKIP
    return tuple(actions)


def _weights(steps: int, *, among_sparse: bool) -> Any:
    early, late = (EARLY_OF_SPARSE, LATE_OF_SPARSE) if among_sparse else (EARLY, LATE)
    places = np.arange(steps) / max(1, steps - 1)
    return np.exp(early * np.exp(-places / REACH) + late * places**POWER)


def halved(full_steps: Sequence[int], end: int, count: int) -> list[int]:
    """Return ``count`` sparse steps, each in the middle of the gap that is then the largest.

    A gap is as large as the sum of the roots of its steps' weights. That behind the first full step
    has none, since the first cannot be a refresh.
    """
    sums = np.concatenate([[0.0], np.cumsum(_weights(end, among_sparse=True) ** 0.5)])
    computed = [*full_steps[1:], end]
    for _ in range(min(count, end - full_steps[0] - len(full_steps))):
        gaps = itertools.pairwise(computed)
        largest = max(gaps, key=lambda gap: sums[gap[1]] - sums[gap[0] + 1], default=(0, 0))
        if largest[1] - largest[0] < 2:
            break
        bisect.insort(computed, sum(largest) // 2)
    return sorted(set(computed[:-1]) - set(full_steps))


@functools.lru_cache(maxsize=64)
def spread(steps: int, count: int, *, among_sparse: bool = False) -> tuple[int, ...]:
    """Return ``count`` full steps, from 0: close at the start, and somewhat closer at the end.

    A gap costs the square of the sum of its skipped steps' weights, so gaps are short where weights
    are large. The list costs the least of all of its length, by dynamic programming.
    """
    sums = np.concatenate([[0.0], np.cumsum(_weights(steps, among_sparse=among_sparse))])
    gaps = (sums[None, :] - sums[1:, None]) ** 2  # from behind a step to one, or to the end
    gaps[np.tril_indices(steps, m=steps + 1)] = np.inf
    ending = np.full(steps, np.inf)  # the least cost of a list that ends with each step
    ending[0] = 0.0
    origins = []
    for _ in range(count - 1):
        longer = ending[:, None] + gaps[:, :steps]
        origins.append(longer.argmin(axis=0))
        ending = longer.min(axis=0)
    listed = [int((ending + gaps[:, steps]).argmin())]
    for origin in reversed(origins):
        listed.append(int(origin[listed[-1]]))
    return tuple(reversed(listed))


def short_list(steps: int, count: int = FULL_OF_SHORT) -> tuple[int, ...]:
    """Return the full steps of a short run: the first two, and then every other one.

    There are at most ``count``, and the last step is never full: benchmarks/notes/few_steps.md.
    """
    return (0, *range(1, steps - 1, 2))[:count]


def list_text(schedule: Schedule, *, sparse: bool) -> str:
    """Return the words of a list of full steps: ``13 of 50 steps in full, close at the ...``."""
    config = schedule.config
    full = schedule.full_steps
    assert full is not None
    if len(full) == schedule.run:
        return "the only step in full" if len(full) == 1 else f"all {len(full)} steps in full"
    of = "" if schedule.run is None else f" of {schedule.run}"
    usual = "at the start" if schedule.is_short else "close at the start"
    form = "as listed" if config.full_share is None else usual
    what = "sparse" if sparse else "dense"
    text = f"{len(full)}{of} steps in full, {form}"
    if len(schedule.sparse_steps) == schedule.end:
        return f"{text}, all others {what}"
    count = schedule.actions[schedule.first :].count(Action.SPARSE)
    text += f", {count} between them {what}" if count else ""
    if not schedule.skips_any:
        return text
    corrects = config.correct and schedule.corrects and len(full) > 1
    return f"{text}, the rest skipped{forecast_text(schedule)}{', then corrected' * corrects}"


def forecast_text(schedule: Schedule) -> str:
    """Return how skipped outputs are forecast, as the end of a phrase; empty: held."""
    config = schedule.config
    if not config.forecast:
        return ""
    share = SHARES.get(config.forecast, f"{config.forecast:g} of a forecast")
    if not config.forecast_after:
        return f" with {share}"
    if schedule.steps is None:
        return f" with {share} after {100 * config.forecast_after:g}% of the steps"
    begun = schedule.first + math.ceil(config.forecast_after * (schedule.steps - schedule.first))
    return f" with {share} from step {begun} on"

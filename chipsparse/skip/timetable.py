"""The action of each denoising step, by guidance branch. Pure, printable, comparable."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from chipsparse.common.validation import assert_never
from chipsparse.config import (
    Action,
    Actions,
    Branches,
    ByCost,
    Form,
    Listed,
    Periodic,
    ScheduleConfig,
    Spread,
)
from chipsparse.config.schedule_forms import EVERY_BRANCH, OTHERS, BranchForm
from chipsparse.skip.spread import full_steps, sparse_steps

MANY_STEPS = 1000  # assumed where the number of steps is not known
# Above a flow shift, the fraction of full steps from which correction gains where all others are
# skipped: below, it lost 0.5 to 2 dB on tiny-wan (benchmarks/notes/schedules.md).
LEAST_CORRECTED = ((5.5, 0.28), (4.0, 0.2))


@dataclass(frozen=True)
class Run:
    """The steps of one generation, and the cost of a sparse one.

    Args:
        steps: the number of denoising steps; None where the pipeline does not tell it.
        first: the first step that runs, above 0 where the generation starts from an image.
        sparse_cost: the time of a sparse step as a fraction of a dense one's; None: no layer can
            be sparse. By default sparse steps cost nothing.
    """

    steps: int | None
    first: int = 0
    sparse_cost: float | None = 0.0

    @property
    def count(self) -> int | None:
        """The number of steps that run; None where it is not known."""
        return None if self.steps is None else self.steps - self.first

    @property
    def end(self) -> int:
        """The number of steps, or many of them."""
        return MANY_STEPS if self.steps is None else self.steps


@dataclass(frozen=True)
class Timetable:
    """The action of every step from 0 on, by guidance branch; the last one is that of later steps.

    ``*`` has those of branches without a list of their own.
    """

    by_branch: Mapping[str, tuple[Action, ...]]

    def actions(self, branch: str = EVERY_BRANCH) -> tuple[Action, ...]:
        """Return the actions of a branch."""
        own = _of_samples(branch)
        return self.by_branch[own if own in self.by_branch else EVERY_BRANCH]

    def action(self, branch: str, step: int) -> Action:
        """Return the action of a branch at a step."""
        actions = self.actions(branch)
        return actions[min(step, len(actions) - 1)]


def _of_samples(branch: str) -> str:
    """Return ``cond`` for ``cond 0,2``, which are samples of that branch in a call of their own."""
    return branch.partition(" ")[0]


def list_name(form: Form, branch: str) -> str:
    """Return the name under which a form lists the steps of a branch."""
    own = _of_samples(branch)
    return own if isinstance(form, Branches) and own in dict(form.forms) else EVERY_BRANCH


@functools.lru_cache(maxsize=64)
def resolve(form: Form, run: Run) -> Timetable:
    """Return the timetable of a form in a run."""
    match form:
        case Spread() | Listed() | Periodic() | Actions():
            return Timetable({EVERY_BRANCH: _actions(form, run)})
        case ByCost():
            return resolve(form.taken(run.sparse_cost), run)
        case Branches():
            return Timetable({branch: _actions(own, run) for branch, own in form.forms})
        case _:
            return assert_never(form)


def form_of(form: Form, branch: str, sparse_cost: float | None) -> BranchForm:
    """Return the form that a branch follows at a cost of sparse steps."""
    match form:
        case ByCost():
            return form.taken(sparse_cost)
        case Branches():
            return dict(form.forms)[list_name(form, branch)]
        case _:
            return form


def _actions(form: BranchForm, run: Run) -> tuple[Action, ...]:
    """Return the actions of one branch."""
    match form:
        case Spread():
            if run.count is None:  # a fraction of a number that is not known
                return (Action.DENSE,) * run.end
            full = full_steps(form, run.count)
            sparse = sparse_steps(form, full, run.count)
            return around_full(
                [run.first + step for step in full],
                {run.first + step for step in sparse},
                run.end,
            )
        case Listed():
            reached = range(run.first, run.end)
            listed = sorted({run.first, *(step for step in form.full if step in reached)})
            wanted = range(run.end) if form.sparse == OTHERS else form.sparse
            return around_full(listed, {*wanted}, run.end)
        case Periodic():
            last = 0 if run.steps is None else form.warmup // 3
            return periodic(run.end, form.warmup, form.refresh_every, last)
        case Actions():
            count = len(form.each)
            return tuple(Action(form.each[min(step, count - 1)]) for step in range(run.end))
        case _:
            return assert_never(form)


def periodic(end: int, first: int, every: int, last: int) -> tuple[Action, ...]:
    """Return the schedule as published: one of ``every`` steps is a refresh, the others are sparse.

    The ``first`` of ``end`` steps are computed in full, and the last of those is a refresh. The
    ``last`` steps are dense.
    """
    actions = [Action.DENSE] * end
    for step in range(first - 1, end - last):
        actions[step] = Action.SPARSE if (step - first + 1) % every else Action.REFRESH
    return tuple(actions)


def around_full(full: Sequence[int], sparse: Collection[int], end: int) -> tuple[Action, ...]:
    """Return full steps, refreshes where sparse ones come after them, and the rest skipped.

    Args:
        full: the full steps in order, from the first step that runs on.
        sparse: the sparse steps; those that are full stay so.
        end: the number of steps.
    """
    actions = [Action.DENSE] * end
    for step, following in itertools.pairwise((*full, end)):
        between = range(step + 1, following)
        if step > full[0] and any(later in sparse for later in between):
            actions[step] = Action.REFRESH
        for later in between:
            actions[later] = Action.SPARSE if later in sparse else Action.SKIP
    return tuple(actions)


@dataclass(frozen=True)
class Schedule:
    """The meaning of a schedule's config in one run."""

    config: ScheduleConfig
    run: Run

    @cached_property
    def timetable(self) -> Timetable:
        """The actions of all branches."""
        return resolve(self.config.form, self.run)

    def actions(self, branch: str = EVERY_BRANCH) -> tuple[Action, ...]:
        """Return the action of every step of a branch, from 0 on."""
        return self.timetable.actions(branch)

    def full_steps(self, branch: str = EVERY_BRANCH) -> tuple[int, ...]:
        """Return the steps of a branch that are computed in full, from the first one that runs."""
        full = (Action.DENSE, Action.REFRESH)
        steps = enumerate(self.actions(branch))
        return tuple(step for step, action in steps if step >= self.run.first and action in full)

    @cached_property
    def skips_any(self) -> bool:
        """True where a branch has a skipped step."""
        lists = self.timetable.by_branch.values()
        return any(Action.SKIP in actions[self.run.first :] for actions in lists)

    def forecast(self, step: int) -> float:
        """Return the fraction of a forecast in a skipped output; 0: it is the last output again."""
        after = self.config.forecast_after
        count = self.run.count
        begun = after == 0 if count is None else step - self.run.first >= after * count
        return self.config.forecast if begun else 0.0

    @property
    def forecasts_any(self) -> bool:
        """True where a skipped output may be a forecast."""
        return self.skips_any and self.forecast(self.run.end - 1) > 0

    def why_not_corrected(self, shift: float) -> str | None:
        """Return why correction would lose at a flow shift; None where it gains."""
        if self.run.steps is None:
            return None
        least = next((fraction for above, fraction in LEAST_CORRECTED if shift > above), 0.0)
        for listed in self.timetable.by_branch.values():
            actions = listed[self.run.first :]
            computed = len(actions) - actions.count(Action.SKIP)
            if Action.SPARSE not in actions and computed < least * len(actions):
                return (
                    f"only {computed} of {len(actions)} steps are computed, too few of them for a "
                    "flow shift that is so large"
                )
        return None

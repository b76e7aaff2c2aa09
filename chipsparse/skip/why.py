"""A schedule in words: what it computes, why it saves nothing, and what would help."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chipsparse.common.validation import assert_never
from chipsparse.config import Action, Actions, Branches, ByCost, Form, Listed, Periodic, Spread
from chipsparse.config.schedule_forms import EVERY_BRANCH, BranchForm
from chipsparse.skip.spread import is_short
from chipsparse.skip.timetable import Schedule, form_of

FEW_STEPS = 16  # fewer make too large jumps for any fraction of full steps below a half
LEAST_FULL = 0.01  # the smallest fraction of full steps that a hint tries
NEVER_AGAIN = 1 << 20  # steps without a refresh, likewise
FORECASTS = {0.5: "half a forecast", 1.0: "a full forecast"}
NO_NUMBER = (
    "a fraction of the steps needs their number, which the pipeline does not tell: spread makes "
    "all of them full"
)


@dataclass(frozen=True)
class Hint:
    """A change of one field of a schedule that leaves more steps to sparse or skipped ones."""

    verb: str  # what to do with the field
    path: str  # of the field, below ``schedule``
    now: Any  # its value
    loosest: Any  # the value that leaves most steps

    @property
    def text(self) -> str:
        """The change in words."""
        now = ", ".join(map(str, self.now)) if isinstance(self.now, tuple) else self.now
        return f"{self.verb} schedule.{self.path} (now {now})"


def hints(form: Form, sparse_cost: float | None) -> list[Hint]:
    """Return the fields of a form that can leave more steps to sparse or skipped ones."""
    match form:
        case Spread():
            return _hints_of_spread(form, "spread")
        case Listed():
            return [Hint("shorten", "listed.full", form.full, ())] if form.full else []
        case Periodic():
            found = []
            if form.warmup > 2:
                found.append(Hint("lower", "periodic.warmup", form.warmup, 2))
            if form.refresh_every == 1:
                found.append(Hint("raise", "periodic.refresh_every", 1, NEVER_AGAIN))
            return found
        case ByCost():
            taken = form.taken(sparse_cost)
            name = "mixed" if taken is form.mixed else "skipping"
            return _hints_of_spread(taken, f"by_cost.{name}")
        case Actions() | Branches():
            return []
        case _:
            return assert_never(form)


def _hints_of_spread(form: Spread, path: str) -> list[Hint]:
    found = []
    if form.full != LEAST_FULL:
        found.append(Hint("lower", f"{path}.full", form.full, LEAST_FULL))
    if form.at_least > 2:
        found.append(Hint("lower", f"{path}.at_least", form.at_least, 2))
    return found


def fewest_steps(saves: Callable[[int], bool], first: int, *, most: int) -> int | None:
    """Return the fewest steps with which a generation saves anything; None: more do not help.

    Args:
        saves: returns True where a number of steps has a sparse or skipped one.
        first: the first step that runs.
        most: the largest number that is asked for.
    """
    if not saves(most):
        return None
    return next(steps for steps in itertools.count(first + 1) if saves(steps))


def asks_to_save(form: Form, *, sparse_parts: bool) -> bool:
    """Return True where a form asks for sparse or skipped steps at all.

    ``sparse_parts`` is True where the config lets a part of some layer be sparse.
    """
    match form:
        case Spread():
            return sparse_parts or form.sparse != 1
        case Listed():
            return sparse_parts or not isinstance(form.sparse, str)
        case Periodic():
            return sparse_parts
        case Actions():
            return "skip" in form.each or (sparse_parts and "sparse" in form.each)
        case ByCost():
            return True
        case Branches():
            return any(asks_to_save(own, sparse_parts=sparse_parts) for _, own in form.forms)
        case _:
            return assert_never(form)


def may_be_sparse(form: Form, sparse_cost: float | None) -> bool:
    """Return True where some number of steps has sparse ones, in layers that can be sparse."""
    match form:
        case Spread():
            return form.full != 1 and form.sparse > 0
        case Listed():
            return bool(form.sparse)
        case Periodic():
            return form.refresh_every > 1
        case Actions():
            return "sparse" in form.each
        case ByCost():
            return may_be_sparse(form.taken(sparse_cost), sparse_cost)
        case Branches():
            return any(may_be_sparse(own, sparse_cost) for _, own in form.forms)
        case _:
            return assert_never(form)


def notes(schedule: Schedule) -> list[str]:
    """Return a sentence for each list that is not what its form was made for."""
    form = schedule.config.form
    branches = (
        [branch for branch, _ in form.forms] if isinstance(form, Branches) else [EVERY_BRANCH]
    )
    found = (_note(schedule, branch) for branch in branches)
    return list(dict.fromkeys(note for note in found if note is not None))


def _note(schedule: Schedule, branch: str) -> str | None:
    form = form_of(schedule.config.form, branch, schedule.run.sparse_cost)
    count = schedule.run.count
    if not isinstance(form, Spread):
        return None
    if count is None:
        return NO_NUMBER
    full = len(schedule.full_steps(branch))
    if count >= FEW_STEPS or 2 * full >= count or is_short(form, count):
        return None
    return (
        f"spread.full {form.full:g} of only {count} steps lists {full} of them: such fractions are "
        "made for some 50 steps; list more with a larger full or at_least, or with listed.full"
    )


def schedule_text(schedule: Schedule, *, sparse: bool, corrects: bool) -> str | None:
    """Return the full steps and what is between them, in words; None where no form lists any.

    Args:
        schedule: what is described.
        sparse: True where some layer can be sparse.
        corrects: True where the scheduler lets skipped steps be corrected.
    """
    form = schedule.config.form
    if not isinstance(form, Branches):
        return _list_text(schedule, EVERY_BRANCH, sparse=sparse, corrects=corrects)
    texts = {
        branch: _list_text(schedule, branch, sparse=sparse, corrects=corrects)
        for branch, _ in form.forms
    }
    if None in texts.values():
        return None
    return "; ".join(f"{branch}: {text}" for branch, text in texts.items())


def _list_text(schedule: Schedule, branch: str, *, sparse: bool, corrects: bool) -> str | None:
    """Return the words of a list of full steps: ``13 of 50 steps in full, close at the ...``."""
    form = form_of(schedule.config.form, branch, schedule.run.sparse_cost)
    count = schedule.run.count
    if not isinstance(form, (Spread, Listed)) or (isinstance(form, Spread) and count is None):
        return None
    full = schedule.full_steps(branch)
    if len(full) == count:
        return "the only step in full" if len(full) == 1 else f"all {len(full)} steps in full"
    of = "" if count is None else f" of {count}"
    what = "sparse" if sparse else "dense"
    text = f"{len(full)}{of} steps in full, {_distances(form, count)}"
    actions = schedule.actions(branch)[schedule.run.first :]
    if all_others_sparse(form, count):
        return f"{text}, all others {what}"
    between = actions.count(Action.SPARSE)
    if between:
        text += f", {between} between them {what}"
    if Action.SKIP not in actions:
        return text
    text += f", the rest skipped{forecast_text(schedule)}"
    if schedule.config.correct and corrects and len(full) > 1:
        text += ", then corrected"
    return text


def _distances(form: BranchForm, count: int | None) -> str:
    if isinstance(form, Listed):
        return "as listed"
    short = isinstance(form, Spread) and count is not None and is_short(form, count)
    return "at the start" if short else "close at the start"


def listed_full(schedule: Schedule) -> tuple[int, ...] | None:
    """Return the full steps where a form lists them for all branches, else None."""
    form = form_of(schedule.config.form, EVERY_BRANCH, schedule.run.sparse_cost)
    lists = isinstance(form, (Spread, Listed)) and schedule.run.count is not None
    return schedule.full_steps() if lists else None


def all_others_sparse(form: BranchForm, count: int | None) -> bool:
    """Return True where a form makes all steps sparse that are not full."""
    if isinstance(form, Listed):
        return isinstance(form.sparse, str)
    if not isinstance(form, Spread) or count is None:
        return False
    return form.sparse == 1 or is_short(form, count)


def forecast_text(schedule: Schedule) -> str:
    """Return how skipped outputs are forecast, as the end of a phrase; empty: they are not."""
    config = schedule.config
    if not config.forecast:
        return ""
    share = FORECASTS.get(config.forecast, f"{config.forecast:g} of a forecast")
    if not config.forecast_after:
        return f" with {share}"
    run = schedule.run
    if run.steps is None:
        return f" with {share} after {100 * config.forecast_after:g}% of the steps"
    begun = run.first + math.ceil(config.forecast_after * (run.steps - run.first))
    return f" with {share} from step {begun} on"

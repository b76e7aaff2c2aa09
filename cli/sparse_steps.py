"""Whether a generation would compute anything sparse, told from its number of steps alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from chipsparse.cli.option_checks import MOST_STEPS
from chipsparse.cli.wording import counted
from chipsparse.plan import CACHED, Action, SparsityPlan


def too_few_steps(plan: SparsityPlan, first_step: Callable[[int], int] = lambda _: 0) -> str | None:
    """One sentence where a plan that wants to be sparse has too few steps for it, else None.

    Args:
        plan: with the number of steps.
        first_step: the step that the pipeline begins with, of so many; more than 0 where it starts
            from a picture.
    """
    assert plan.steps is not None
    first = first_step(plan.steps)
    if plan.schedule.skips_by_threshold() or _saves(plan, first):
        return None
    if not _saves(dataclasses.replace(plan, steps=MOST_STEPS), first_step(MOST_STEPS)):
        return None  # the profile wants nothing sparse
    enough = next(
        (
            steps
            for steps in range(plan.steps + 1, MOST_STEPS + 1)
            if _saves(dataclasses.replace(plan, steps=steps), first_step(steps))
        ),
        MOST_STEPS,
    )
    computed = plan.steps - first
    return (
        f"nothing runs sparse: the profile's schedule computes {_all(computed)} in full; it takes "
        f"--steps {enough} or more, or a profile with fewer schedule.warmup_steps"
    )


def _all(steps: int) -> str:
    return "the only step" if steps == 1 else f"all {counted(steps, 'step')}"


def actions_from(plan: SparsityPlan, first: int) -> list[Action]:
    """What the steps do of a generation that begins with a later one than the schedule's first."""
    assert plan.steps is not None
    taken: list[Action] = []
    recorded: Action | None = None
    for step in range(first, plan.steps):
        taken.append(plan.taken(step, recorded))
        recorded = plan.recorded_after(step, taken[-1], recorded)
    return taken


def _saves(plan: SparsityPlan, first: int) -> bool:
    """Whether any step uses what another one computed."""
    assert plan.steps is not None
    # What is taken is never less than what is planned, which is quicker to ask for.
    planned = any(plan.step_action(step) in CACHED for step in range(first, plan.steps))
    return planned and any(action in CACHED for action in actions_from(plan, first))

"""Whether a generation would compute anything sparse, known from its number of steps alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from chipsparse.cli.wording import counted
from chipsparse.plan import CACHED, SparsityPlan
from chipsparse.profiles.profile import MOST_STEPS
from chipsparse.report.nothing_sparse import what_helps


def too_few_steps(plan: SparsityPlan, first_step: Callable[[int], int] = lambda _: 0) -> str | None:
    """One sentence where a plan that wants to be sparse has too few steps for it, else None.

    Args:
        first_step: the step that the pipeline begins with, of so many; more than 0 where it starts
            from an image.
    """
    assert plan.steps is not None
    first = first_step(plan.steps)
    if _saves(plan, first):
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
    changes = what_helps(plan, first)
    return (
        f"nothing runs sparse: the profile's schedule computes {_all(computed)} in full; it takes "
        f"--steps {enough} or more" + (f", or in the profile {changes}" if changes else "")
    )


def _all(steps: int) -> str:
    return "the only step" if steps == 1 else f"all {counted(steps, 'step')}"


def _saves(plan: SparsityPlan, first: int) -> bool:
    """Whether any step uses what another one computed."""
    assert plan.steps is not None
    # What is taken is never less than what is planned, which is quicker to ask for.
    planned = any(plan.step_action(step) in CACHED for step in range(first, plan.steps))
    return planned and any(action in CACHED for action in plan.actions(first))

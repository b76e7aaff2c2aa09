"""The reasons why layers, or a whole generation, run dense although asked otherwise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from chipsparse.config import ScheduleConfig, SparsityConfig
from chipsparse.reasons.reason import Reason, nothing_sparse
from chipsparse.skip.timetable import MANY_STEPS, NO_SHARE
from chipsparse.sparse.plan import CACHED, SparsityPlan

# Fields of the schedule, each with the value that leaves most steps to sparse ones, the word for
# the way there, and whether a schedule has some way to go.
LOOSEST: dict[str, tuple[Any, str, Callable[[ScheduleConfig], bool]]] = {
    "warmup_steps": (2, "lower", lambda now: now.warmup_steps > 2),
    "refresh_every": (1 << 20, "raise", lambda now: now.refresh_every == 1),
    "full_steps": ((), "shorten", lambda now: bool(now.full_steps)),
    "full_share": (0.01, "lower", lambda now: now.full_share not in (None, 0.01)),
    "least_full": (2, "lower", lambda now: now.full_share is not None and now.least_full > 2),
}


def wants_sparse(config: SparsityConfig) -> bool:
    """Return True where a config asks for sparse or skipped steps at all."""
    schedule = config.schedule
    parts = config.attention.is_sparse or config.mlp.is_sparse
    if schedule.actions is not None:
        return "skip" in schedule.actions or (parts and "sparse" in schedule.actions)
    if parts:
        return True
    return schedule.lists_full and schedule.sparse_steps != 1


def why_nothing(plan: SparsityPlan, first: int = 0, name: str = "transformer") -> Reason | None:
    """Return why no step will be sparse or skipped, with what would help; None if one may be.

    The transformer of this name is called from the step ``first`` on.
    """
    if plan.steps is None and plan.config.schedule.full_share is not None:
        return nothing_sparse("schedule.steps_unknown", NO_SHARE)
    if plan.steps is None or not wants_sparse(plan.config) or _uses_caches(plan, first):
        return None
    layers = _why_no_layer(replace(plan, steps=first + MANY_STEPS))
    if layers is not None:
        return nothing_sparse("schedule.no_layer", layers)
    changes = what_helps(plan, first)
    fewest = _fewest_steps(plan, first)
    if fewest is None:
        every = "the schedule computes every step in full"
        return nothing_sparse("schedule.all_full", every, changes or "change it")
    code = "schedule.few_steps"
    help = "take more steps" + (f", or {changes}" if changes else "")
    if first:
        late = (
            f"{name} is first called at step {first} of {plan.steps} (from 0), and the schedule "
            f"needs {fewest - first} calls in a row"
        )
        return nothing_sparse(code, late, help)
    few = "1 step is" if plan.steps == 1 else f"{plan.steps} steps are"
    short = f"{few} too few for the schedule, which needs at least {fewest}"
    return nothing_sparse(code, short, help)


def _uses_caches(plan: SparsityPlan, first: int) -> bool:
    return any(action in CACHED for action in plan.actions(first))


def _why_no_layer(plan: SparsityPlan) -> str | None:
    """Return what of the config leaves no layer sparse, where no step is to be skipped."""
    if plan.has_sparse_layers or plan.schedule.skips_any:
        return None
    count = plan.layout.layers
    first = plan.config.schedule.first_dense_layers
    if first >= count:
        return f"schedule.first_dense_layers is {first}, and the model has {count} layers"
    return f"what layers and schedule.first_dense_layers name leaves all {count} layers dense"


def _fewest_steps(plan: SparsityPlan, first: int) -> int | None:
    """Return the fewest steps of which one is sparse or skipped; None: more do not help."""
    if not _uses_caches(replace(plan, steps=first + MANY_STEPS), first):
        return None
    numbers = itertools.count(first + 1)
    return next(n for n in numbers if _uses_caches(replace(plan, steps=n), first))


def what_helps(plan: SparsityPlan, first: int) -> str | None:
    """Return the fields of the schedule of which one, or else all, would make a step sparse."""
    schedule = plan.config.schedule
    if schedule.actions:
        return "change schedule.actions"
    tight = [name for name, (_, _, is_tight) in LOOSEST.items() if is_tight(schedule)]

    def helps(*names: str) -> bool:
        changes = {f"schedule.{name}": LOOSEST[name][0] for name in names}
        return _uses_caches(replace(plan, config=plan.config.override(changes)), first)

    alone = [name for name in tight if helps(name)]
    if not alone and not (tight and helps(*tight)):
        return None
    texts = []
    for name in alone or tight:
        value = getattr(schedule, name)
        now = ", ".join(map(str, value)) if isinstance(value, tuple) else value
        texts.append(f"{LOOSEST[name][1]} schedule.{name} (now {now})")
    return (" or " if alone else " and ").join(texts)

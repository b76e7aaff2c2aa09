"""The reasons why layers, or a whole generation, run dense although asked otherwise."""

from __future__ import annotations

from dataclasses import replace

from chipsparse.config import Actions, Branches, SparsityConfig, Spread
from chipsparse.reasons.reason import Reason, nothing_sparse
from chipsparse.skip.timetable import MANY_STEPS, form_of
from chipsparse.skip.why import NO_NUMBER, Hint, asks_to_save, fewest_steps, hints
from chipsparse.sparse.plan import CACHED, SparsityPlan


def wants_sparse(config: SparsityConfig) -> bool:
    """Return True where a config asks for sparse or skipped steps at all."""
    parts = config.attention.is_sparse or config.mlp.is_sparse
    return asks_to_save(config.schedule.form, sparse_parts=parts)


def why_nothing(plan: SparsityPlan, first: int = 0, name: str = "transformer") -> Reason | None:
    """Return why no step will be sparse or skipped, with what would help; None if one may be.

    The transformer of this name is called from the step ``first`` on. Where guidance branches have
    lists of their own, the reason of the plan's branch counts if every branch has one.
    """
    own = _why_nothing(plan, first, name)
    others = [branch for branch in plan.schedule.timetable.by_branch if branch != plan.branch]
    if own is None or any(
        _why_nothing(replace(plan, branch=branch), first, name) is None for branch in others
    ):
        return None
    return own


def _why_nothing(plan: SparsityPlan, first: int, name: str) -> Reason | None:
    form = form_of(plan.config.schedule.form, plan.branch, plan.sparse_cost)
    if plan.steps is None and isinstance(form, Spread):
        return nothing_sparse("schedule.steps_unknown", NO_NUMBER)
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
    return f"what layers names leaves all {plan.layout.layers} layers dense"


def _fewest_steps(plan: SparsityPlan, first: int) -> int | None:
    """Return the fewest steps of which one is sparse or skipped; None: more do not help."""

    def saves(steps: int) -> bool:
        return _uses_caches(replace(plan, steps=steps), first)

    return fewest_steps(saves, first, most=first + MANY_STEPS)


def what_helps(plan: SparsityPlan, first: int) -> str | None:
    """Return the fields of the schedule of which one, or else all, would make a step sparse."""
    form = plan.config.schedule.form
    if isinstance(form, Actions):
        return "change schedule.actions"
    if isinstance(form, Branches):
        return "change schedule.branches"
    tight = hints(form, plan.sparse_cost)

    def helps(*changes: Hint) -> bool:
        values = {f"schedule.{change.path}": change.loosest for change in changes}
        return _uses_caches(replace(plan, config=plan.config.override(values)), first)

    alone = [change for change in tight if helps(change)]
    if not alone and not (tight and helps(*tight)):
        return None
    join = " or " if alone else " and "
    return join.join(change.text for change in alone or tight)

"""The reasons why layers, or a whole generation, run dense although asked otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from chipsparse.config import Actions, Branches, LayerPart, Part, SparsityConfig, Spread
from chipsparse.skip.timetable import MANY_STEPS, form_of
from chipsparse.skip.why import NO_NUMBER, Hint, asks_to_save, fewest_steps, hints
from chipsparse.sparse.plan import CACHED, SparsityPlan

NOTHING = "nothing runs sparse"


def part_name(part: Part) -> str:
    """Return the name of a part of a layer in messages."""
    return "MLP" if part == "mlp" else part


def dense_notes(reasons: Mapping[LayerPart, str], layers: int) -> list[str]:
    """Return one sentence for each part and reason, of a model with so many layers."""
    alike: dict[tuple[Part, str], list[int]] = {}
    for (layer, part), reason in sorted(reasons.items()):
        alike.setdefault((part, reason), []).append(layer)
    return [
        f"{part_name(part)} runs dense in {len(dense)} of {layers} layers (first: layer "
        f"{dense[0]}): {reason}"
        for (part, reason), dense in alike.items()
    ]


def wants_sparse(config: SparsityConfig) -> bool:
    """Return True where a config asks for sparse or skipped steps at all."""
    parts = config.attention.is_sparse or config.mlp.is_sparse
    return asks_to_save(config.schedule.form, sparse_parts=parts)


def why_nothing(plan: SparsityPlan, first: int = 0, name: str = "transformer") -> str | None:
    """Return why no step will be sparse or skipped, with what would help; None if one may be.

    The transformer of this name is called from the step ``first`` on.
    """
    form = form_of(plan.config.schedule.form, plan.branch, plan.sparse_cost)
    if plan.steps is None and isinstance(form, Spread):
        return f"{NOTHING}: {NO_NUMBER}"
    if plan.steps is None or not wants_sparse(plan.config) or _uses_caches(plan, first):
        return None
    layers = _why_no_layer(replace(plan, steps=first + MANY_STEPS))
    if layers is not None:
        return f"{NOTHING}: {layers}"
    changes = what_helps(plan, first)
    fewest = _fewest_steps(plan, first)
    if fewest is None:
        return f"{NOTHING}: the schedule computes every step in full; {changes or 'change it'}"
    help = "take more steps" + (f", or {changes}" if changes else "")
    if first:
        return (
            f"{NOTHING}: {name} is first called at step {first} of {plan.steps} (from 0), and the "
            f"schedule needs {fewest - first} calls in a row; {help}"
        )
    few = "1 step is" if plan.steps == 1 else f"{plan.steps} steps are"
    return f"{NOTHING}: {few} too few for the schedule, which needs at least {fewest}; {help}"


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

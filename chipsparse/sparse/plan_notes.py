"""Sentences about a plan: what of the config has no effect, or another one than it seems."""

from __future__ import annotations

from chipsparse.config import Action, Listed, SparsityConfig, Spread
from chipsparse.skip.timetable import form_of
from chipsparse.skip.why import all_others_sparse, notes
from chipsparse.sparse.plan import SparsityPlan
from chipsparse.without_effect import without_effect

# Measured, rounding included: as fast with 4,352 tokens, 1.1 times with 6,144, 1.2 with 8,192.
FP8_PAYS_TOKENS = 5_000


def plan_notes(
    plan: SparsityPlan,
    *,
    base: SparsityConfig | None = None,
    on_cpu: bool = False,
) -> list[str]:
    """Return a sentence for whatever of a plan's config is worth knowing.

    Args:
        plan: the plan.
        base: the config where nobody asked for anything, which has no effect unnoted; None: the
            defaults.
        on_cpu: the device is a CPU.
    """
    found = [*without_effect(plan, base=base, on_cpu=on_cpu), *notes(plan.schedule)]
    found += _raised_notes(plan)
    if plan.config.attention.in_fp8 and plan.layout.tokens < FP8_PAYS_TOKENS:
        found.append(
            f"attention.precision: with {plan.layout.tokens:,} tokens attention is slower in 8 "
            f"bits than in 16 (on an H200 they pay from about {FP8_PAYS_TOKENS:,} on)",
        )
    return found


def _raised_notes(plan: SparsityPlan) -> list[str]:
    """Return a sentence for each sparse step that has no refresh to read."""
    form = form_of(plan.config.schedule.form, plan.branch, plan.sparse_cost)
    if plan.steps is None or not isinstance(form, (Spread, Listed)):
        return []
    if all_others_sparse(form, plan.steps - plan.first):  # nobody chose that step
        return []
    return [
        f"step {step} is computed in full: it was to be sparse, and the only full step "
        "before it is the first one, which cannot be a refresh"
        for step, action in enumerate(plan.actions())
        if action is not Action.SPARSE and plan.step_action(step) is Action.SPARSE
    ]

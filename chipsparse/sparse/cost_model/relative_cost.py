"""The cost of a sparse step in dense ones, by which a schedule decides whether it has any.

It is computed from the sizes of the video or image and the rates of one GPU, whichever this one is.
So the same call has the same schedule everywhere, on all processes and for all guidance branches.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from chipsparse.config import PARTS, Action, ByCost, Part, SparsityConfig
from chipsparse.layout import ModelLayout
from chipsparse.sparse.cost_model.layer_times import Rates, layer_time
from chipsparse.sparse.plan import SparsityPlan


def asked_cost(
    config: SparsityConfig,
    layout: ModelLayout,
    masked: Collection[Part] = (),
) -> float | None:
    """Return the `sparse_cost` that the schedule decides by; 0 where it does not ask for it."""
    if not isinstance(config.schedule.form, ByCost):
        return 0.0
    return sparse_cost(config, layout, masked)


def sparse_cost(
    config: SparsityConfig,
    layout: ModelLayout,
    masked: Collection[Part] = (),
) -> float | None:
    """Return the time of a sparse step over that of a dense one; None where no layer is sparse.

    Text tokens, samples and what other processes have of a call are left out, since guidance
    branches differ in them. Parts that are ``masked`` run dense in all layers.
    """
    plan = SparsityPlan(config, layout.without_prompts)
    layers = range(layout.layers)
    parts = [part for part in PARTS if part not in masked]
    if not any(plan.is_sparse(layer, part) for layer in layers for part in parts):
        return None

    def seconds(action: Action) -> float:
        times = (
            layer_time(
                layer,
                action,
                plan=plan,
                rates=Rates(),
                dtype=torch.bfloat16,
                dense_parts=masked,
            )
            for layer in layers
        )
        return sum(time.total for time in times)

    return seconds(Action.SPARSE) / seconds(Action.DENSE)


def why_skipping(plan: SparsityPlan) -> str | None:
    """Return why a plan skips steps that its config would have sparse; None where it does not."""
    form = plan.config.schedule.form
    if not isinstance(form, ByCost) or form.taken(plan.sparse_cost) is not form.skipping:
        return None
    if not plan.schedule.skips_any:
        return None
    if plan.sparse_cost is None:
        return "no step is sparse, since no layer can be: steps are skipped instead"
    return (
        f"no step is sparse: at this size one takes {plan.sparse_cost:.0%} of a dense step's time, "
        f"and schedule.by_cost.at_most is {form.at_most:.0%}; steps are skipped instead"
    )

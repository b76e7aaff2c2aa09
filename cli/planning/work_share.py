"""How much of a dense generation's arithmetic a sparse one did, where no dense one was timed."""

from __future__ import annotations

import math

import torch

from chipsparse.cache.kinds import PARTS
from chipsparse.cost_model.layer_times import Rates, layer_time
from chipsparse.cost_model.run_times import DenseParts
from chipsparse.plan import Action, SparsityPlan
from chipsparse.report.generation import GenerationReport, StepRecord

# Rates under which the seconds of the cost model are operations.
OPERATIONS = Rates(
    device="operations",
    attention=1.0,
    linear=1.0,
    memory=math.inf,
    sparse_attention=1.0,
    sparse_mlp=1.0,
    refresh_attention=1.0,
    refresh_seconds=0.0,
    launch_seconds=0.0,
)


def work_share(report: GenerationReport) -> float | None:
    """Operations of all transformer calls over those of the same calls dense; None without plans.

    Counts attention, feed-forward layers and projections, not the choice of columns and neurons.
    """
    done = whole = 0.0
    for record in report.steps:
        if record.plan is None:
            return None
        layers = range(record.plan.layout.layers)
        dense = [_operations(record.plan, layer) for layer in layers]
        whole += sum(map(sum, dense))
        done += _done(record, dense)
    return done / whole if whole else None


def step_costs(plan: SparsityPlan, *, first: int = 0) -> list[float]:
    """Operations of each step of a plan from ``first`` on, as far as known beforehand."""
    costs = _action_costs(plan, {part: {} for part in PARTS})
    return [costs[action] for action in plan.actions(first)]


def planned_share(plan: SparsityPlan, dense: DenseParts) -> float:
    """Operations of a whole generation over those of a dense one, as far as known beforehand."""
    costs = _action_costs(plan, dense)
    actions = plan.actions()
    return sum(costs[action] for action in actions) / (len(actions) * costs[Action.DENSE])


def _action_costs(plan: SparsityPlan, dense: DenseParts) -> dict[Action, float]:
    """Operations of a step of each action."""

    def cost(layer: int, action: Action) -> float:
        parts = [part for part in PARTS if layer in dense[part]]
        time = layer_time(
            layer, action, plan=plan, rates=OPERATIONS, dtype=torch.float32, dense_parts=parts
        )
        return time.total

    layers = range(plan.layout.layers)
    return {action: sum(cost(layer, action) for layer in layers) for action in Action}


def _operations(plan: SparsityPlan, layer: int) -> tuple[float, float, float]:
    """Of a dense layer: its attention, its feed-forward layer, and the rest."""
    time = layer_time(layer, Action.DENSE, plan=plan, rates=OPERATIONS, dtype=torch.float32)
    return time.attention, time.mlp, time.rest


def _done(record: StepRecord, dense: list[tuple[float, float, float]]) -> float:
    if record.action is Action.SKIP:
        return 0.0
    saved = sum(
        (1.0 - each.kept) * dense[each.layer][0 if each.part == "attention" else 1]
        for each in record.layers
        if each.action is Action.SPARSE
    )
    return sum(map(sum, dense)) - saved

"""Fields of a config that ask for something, and change nothing in this generation."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from chipsparse.common.byte_sizes import format_bytes
from chipsparse.common.validation import shown
from chipsparse.config import PUBLISHED_FORM, LayerBudget, Part, SparsityConfig
from chipsparse.schedule.schedule import Action

if TYPE_CHECKING:
    from chipsparse.plan import SparsityPlan

# Values that keep something off, so that they ask for nothing.
OFF = ("never", "none", "bf16", "dense")
NOTHING_SPARSE = "no step is sparse"
OVERRIDDEN = "schedule.actions overrides it"
NO_FORECAST = "schedule.forecast is not given"
LATE = "schedule.forecast_after lets no skipped step have one"
# Fields of the schedule that hold beside ``actions`` too.
BESIDE_ACTIONS = ("actions", "first_dense_layers", "forecast", "forecast_after", "correct")


def without_effect(plan: SparsityPlan, *, on_cpu: bool = False) -> list[str]:
    """Return one sentence for each reason, with all fields that it holds for.

    A field asks for something where it has neither its default nor what the named quality gives it
    (`SparsityConfig.usual`).

    Args:
        plan: of the generation.
        on_cpu: True where the generation runs on a CPU.
    """
    fields: dict[str, list[str]] = {}
    for path, value, reason in itertools.chain(_fields(plan, on_cpu), _budgets(plan)):
        if reason is not None:
            amount = format_bytes(value) if path in ("memory.vram", "memory.ram") else shown(value)
            fields.setdefault(reason, []).append(f"{path} ({amount})")
    notes = [
        f"{', '.join(paths)} {'has' if len(paths) == 1 else 'have'} no effect: {reason}"
        for reason, paths in fields.items()
    ]
    rules, usual, steps = plan.config.schedule, plan.config.usual, plan.steps
    for name in ("full_steps", "between"):
        listed = getattr(rules, name)
        own = usual is None or getattr(usual.schedule, name) != listed
        if not own or steps is None or not isinstance(listed, tuple):
            continue
        if beyond := ", ".join(str(step) for step in listed if step >= steps):
            last = f"the last of {steps} steps is {steps - 1}"
            notes.append(f"{name} {beyond} are never reached: {last}")
    return notes


def _fields(plan: SparsityPlan, on_cpu: bool) -> Iterator[tuple[str, Any, str | None]]:
    config, rules, default = plan.config, plan.config.schedule, SparsityConfig()
    reasons = {**_of_parts(plan), **_of_schedule(plan), **_of_memory(plan, on_cpu)}
    for path, reason in reasons.items():
        value = attrgetter(path)(config)
        # A list of full steps asks for sparse ones between them unless it says none.
        gaps = path == "schedule.between" and rules.lists_full and isinstance(rules.between, str)
        asks = gaps or value != attrgetter(path)(default)
        is_usual = config.usual is not None and value == attrgetter(path)(config.usual)
        if asks and value not in OFF and not is_usual:
            yield path, list(value) if isinstance(value, tuple) else value, reason


def _of_parts(plan: SparsityPlan) -> dict[str, str | None]:
    columns, neurons = _why_not_sparse(plan, "attention"), _why_not_sparse(plan, "mlp")
    density = {part: _all_budgeted(plan, part) for part in ("attention", "mlp")}
    random = None if plan.attention_random_count() else "attention.random_fraction adds no column"
    return {
        "attention.density": columns or density["attention"],
        "attention.random_fraction": columns or random,
        "attention.delta_rule": columns,
        "tile": columns,
        "mlp.density": neurons or density["mlp"],
        "block_size": columns and neurons,
        "memory.cache_precision": columns and neurons,
    }


def _of_schedule(plan: SparsityPlan) -> dict[str, str | None]:
    schedule, rules = plan.schedule, plan.config.schedule
    actions = {step: schedule.action(step) for step in schedule.known_steps}
    skipped = [step for step, action in actions.items() if action is Action.SKIP]
    no_layer = None if plan.has_sparse_layers else "no layer is sparse"
    no_skip = None if skipped else "no step is skipped"
    if rules.actions is not None:
        names = [field.name for field in dataclasses.fields(rules)]
        overridden = [name for name in names if name not in BESIDE_ACTIONS]
        reasons: dict[str, str | None] = {f"schedule.{name}": OVERRIDDEN for name in overridden}
    else:
        gaps = None
        if not rules.lists_full:
            gaps = "no full steps are listed"
        elif isinstance(rules.between, tuple):
            gaps = no_layer
        elif skipped and Action.SPARSE not in actions.values():
            gaps = "no gap between full steps is long enough"
        no_share = "schedule.full_share is not given" if rules.full_share is None else None
        reasons = {
            "schedule.between": gaps,
            "schedule.least_full": no_share,
            **{f"schedule.{name}": no_layer for name in PUBLISHED_FORM},
        }
    late = None if any(map(schedule.forecast_share, skipped)) else LATE
    parts = plan.config.attention.is_sparse or plan.config.mlp.is_sparse
    dense = NOTHING_SPARSE if plan.has_sparse_layers and plan.is_dense() else None
    return {
        **reasons,
        "schedule.forecast": no_skip or late,
        "schedule.forecast_after": no_skip if rules.forecast else NO_FORECAST,
        "schedule.first_dense_layers": dense or (None if parts else no_layer),
    }


def _of_memory(plan: SparsityPlan, on_cpu: bool) -> dict[str, str | None]:
    dense = NOTHING_SPARSE if plan.is_dense() else None
    cpu = "this device is a CPU" if on_cpu else None
    never = "memory.offload is never" if plan.config.memory.offload == "never" else None
    return {
        "memory.vram": dense or cpu,
        "memory.ram": dense or (None if on_cpu else never),
        "memory.offload": dense,
        "cuda_graphs": dense or cpu,
        "backend": None if plan.config.attention.precision == "fp8" else dense,
    }


def _budgets(plan: SparsityPlan) -> Iterator[tuple[str, Any, str | None]]:
    config = plan.config
    if config.usual is not None and config.layers == config.usual.layers:
        return
    for place, budget in enumerate(config.layers):
        parts: Mapping[Part, Any] = {"attention": budget.attention, "mlp": budget.mlp}
        if set(parts.values()) == {None}:
            yield f"layers[{place}]", budget.layers, "it names neither attention nor mlp"
        for part, share in parts.items():
            if share not in (None, "dense"):
                yield f"layers[{place}].{part}", share, _why_no_budget(plan, budget, part, share)


def _why_no_budget(plan: SparsityPlan, budget: LayerBudget, part: Part, share: float) -> str | None:
    layers = itertools.chain.from_iterable(budget.ranges)
    if reason := _why_not_sparse(plan, part):
        return reason
    if not any(plan.is_sparse(layer, part) for layer in layers):
        return f"schedule.first_dense_layers is {plan.config.schedule.first_dense_layers}"
    own = (plan.config.attention if part == "attention" else plan.config.mlp).density
    return f"it is {part}.density" if share == own else None


def _why_not_sparse(plan: SparsityPlan, part: Part) -> str | None:
    reasons = {plan.why_dense(layer, part) for layer in range(plan.layout.layers)}
    if None in reasons:
        return NOTHING_SPARSE if plan.is_dense() else None
    return reasons.pop() if len(reasons) == 1 else f"{part} is sparse in no layer"


def _all_budgeted(plan: SparsityPlan, part: Part) -> str | None:
    named = {
        layer
        for budget in plan.config.layers
        if getattr(budget, part) is not None
        for layers in budget.ranges
        for layer in layers
    }
    first = plan.config.schedule.first_dense_layers
    return (
        "layers has a budget for every layer"
        if named.issuperset(range(first, plan.layout.layers))
        else None
    )

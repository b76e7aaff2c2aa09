"""Fields of a config that ask for something, and change nothing in this generation."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from chipsparse.common.byte_sizes import format_bytes
from chipsparse.common.validation import shown
from chipsparse.config import PUBLISHED_FORM, LayerBudget, Part, SparsityConfig
from chipsparse.schedule.schedule import Action

if TYPE_CHECKING:
    from chipsparse.plan import SparsityPlan

# Values that keep something off, so that they ask for nothing.
OFF = ("never", "none", "bf16", "dense")
STEP_LISTS = ("full_steps", "between")
NOTHING_SPARSE = "no step is sparse"
# Fields of the schedule that hold beside ``actions`` too.
BESIDE_ACTIONS = ("actions", "first_dense_layers", "forecast", "forecast_after", "correct")


def without_effect(plan: SparsityPlan, *, on_cpu: bool = False) -> list[str]:
    """One sentence for each reason, with all fields that it holds for.

    A field asks for something where it has neither its default nor what the named quality gives it
    (`SparsityConfig.usual`).

    Args:
        on_cpu: whether the generation runs on a CPU.
    """
    fields: dict[str, list[str]] = {}
    for path, value, reason in itertools.chain(_fields(plan, on_cpu), _budgets(plan)):
        if reason is not None:
            amount = format_bytes(value) if path in ("memory.vram", "memory.ram") else shown(value)
            fields.setdefault(reason, []).append(f"{path} ({amount})")
    return [
        f"{', '.join(each)} {'has' if len(each) == 1 else 'have'} no effect: {reason}"
        for reason, each in fields.items()
    ] + _never_reached(plan)


def _never_reached(plan: SparsityPlan) -> list[str]:
    rules, usual, steps = plan.config.schedule, plan.config.usual, plan.steps
    fields = {name: getattr(rules, name) for name in STEP_LISTS}
    lists = {name: value for name, value in fields.items() if isinstance(value, tuple)}
    return [
        f"{name} {', '.join(map(str, beyond))} are never reached: the last of {steps} steps is "
        f"{steps - 1}"
        for name, listed in lists.items()
        if steps is not None
        and (usual is None or getattr(usual.schedule, name) != listed)
        and (beyond := [step for step in listed if step >= steps])
    ]


def _fields(plan: SparsityPlan, on_cpu: bool) -> Iterator[tuple[str, Any, str | None]]:
    config, default = plan.config, SparsityConfig()
    reasons = {**_of_parts(plan), **_of_schedule(plan), **_of_memory(plan, on_cpu)}
    for path, reason in reasons.items():
        value, *usual = (_value(each, path) for each in (config, default, config.usual or default))
        # A list of full steps asks for sparse ones between them unless it says none.
        rules = config.schedule
        listed = path == "schedule.between" and rules.lists_full and isinstance(rules.between, str)
        if (
            (listed or value != usual[0])
            and value not in OFF
            and (config.usual is None or value != usual[1])
        ):
            yield path, list(value) if isinstance(value, tuple) else value, reason


def _value(config: SparsityConfig, path: str) -> Any:
    group, _, name = path.rpartition(".")
    return getattr(getattr(config, group) if group else config, name)


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
    names = [f"schedule.{each.name}" for each in dataclasses.fields(rules)]
    steps = schedule.known_steps
    skipped = [step for step in steps if schedule.action(step) is Action.SKIP]
    no_layer = None if plan.has_sparse_layers else "no layer is sparse"
    no_skip = None if skipped else "no step is skipped"
    found: dict[str, str | None] = {}
    if rules.actions is not None:
        found = {
            name: "schedule.actions overrides it"
            for name in names
            if name.rpartition(".")[2] not in BESIDE_ACTIONS
        }
    else:
        gaps = None
        if not rules.lists_full:
            gaps = "no full steps are listed"
        elif isinstance(rules.between, tuple):
            gaps = no_layer
        elif skipped and not any(schedule.action(step) is Action.SPARSE for step in steps):
            gaps = "no gap between full steps is long enough"
        found = {
            "schedule.between": gaps,
            "schedule.least_full": _unless(rules.full_share, "schedule.full_share"),
            **{f"schedule.{name}": no_layer for name in PUBLISHED_FORM},
        }
    late = any(map(schedule.forecast_share, skipped))
    after = None if late else "schedule.forecast_after lets no skipped step have one"
    found["schedule.forecast"] = no_skip or after
    found["schedule.forecast_after"] = (
        _unless(rules.forecast or None, "schedule.forecast") or no_skip
    )
    parts = plan.config.attention.is_sparse or plan.config.mlp.is_sparse
    found["schedule.first_dense_layers"] = (
        NOTHING_SPARSE if plan.has_sparse_layers and plan.is_dense() else None
    ) or (None if parts else no_layer)
    return found


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


def _unless(value: Any, field: str) -> str | None:
    """Why a field does nothing that another one needs."""
    return f"{field} is not given" if value is None else None

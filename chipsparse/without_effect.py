"""Fields of a config that ask for something, and change nothing in this generation."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from chipsparse.common.byte_sizes import format_bytes
from chipsparse.common.validation import shown
from chipsparse.config import PUBLISHED_FORM, Part, ScheduleConfig, SparsityConfig
from chipsparse.skip.timetable import Action

if TYPE_CHECKING:
    from chipsparse.sparse.plan import SparsityPlan

OFF = ("never", "bf16", "dense", ())  # values that keep something off and ask for nothing
NOTHING_SPARSE = "no step is sparse"
# Fields of the schedule that hold beside ``actions`` too.
BESIDE_ACTIONS = ("actions", "first_dense_layers", "forecast", "forecast_after", "correct")


def without_effect(plan: SparsityPlan, *, on_cpu: bool = False) -> list[str]:
    """Return one sentence for each reason, with all fields that it holds for.

    A field asks for something where it has neither its default nor what the named quality gives it
    (`SparsityConfig.usual`).
    """
    config = plan.config
    rules = plan.config.schedule
    usual = plan.config.usual
    fields: dict[str, list[str]] = {}
    for path, reason in _reasons(plan, on_cpu).items():
        field = attrgetter(path)
        value = field(config)
        default = field(SparsityConfig())
        is_usual = usual is not None and value == field(usual)
        if reason is None or is_usual or value in OFF or value == default:
            continue
        if path in ("memory.vram", "memory.ram"):
            text = format_bytes(value)
        else:
            text = shown(list(value) if isinstance(value, tuple) else value)
        fields.setdefault(reason, []).append(f"{path} ({text})")
    if usual is None or config.layers != usual.layers:
        for path, value, reason in _budgets(plan):
            fields.setdefault(reason, []).append(f"{path} ({shown(value)})")
    notes = [
        f"{', '.join(paths)} {'has' if len(paths) == 1 else 'have'} no effect: {reason}"
        for reason, paths in fields.items()
    ]
    for name in ("full_steps", "sparse_steps"):
        listed = getattr(rules, name)
        own = usual is None or getattr(usual.schedule, name) != listed
        if not own or plan.steps is None or not isinstance(listed, tuple):
            continue
        if beyond := ", ".join(str(step) for step in listed if step >= plan.steps):
            last = f"the last of {plan.steps} steps is {plan.steps - 1}"
            notes.append(f"{name} {beyond} are never reached: {last}")
    return notes


def _reasons(plan: SparsityPlan, on_cpu: bool) -> dict[str, str | None]:
    """Return why each field is without effect; None where it has one."""
    config = plan.config
    columns = _why_not_sparse(plan, "attention")
    neurons = _why_not_sparse(plan, "mlp")
    dense = NOTHING_SPARSE if plan.is_dense() else None
    cpu = "this device is a CPU" if on_cpu else None
    never = "memory.offload is never" if config.memory.offload == "never" and not on_cpu else None
    return {
        "attention.density": columns,
        "attention.delta_rule": columns,
        "tile": columns,
        "mlp.density": neurons,
        "block_size": columns and neurons,
        "memory.cache_precision": columns and neurons,
        **_schedule_reasons(plan, config.schedule),
        "memory.vram": dense or cpu,
        "memory.ram": dense or never,
        "memory.offload": dense,
        "cuda_graphs": dense or cpu,
        "backend": None if config.attention.in_fp8 else dense,
    }


def _schedule_reasons(plan: SparsityPlan, rules: ScheduleConfig) -> dict[str, str | None]:
    schedule = plan.schedule
    actions = schedule.actions[schedule.first :]
    skips = Action.SKIP in actions
    no_layer = None if plan.has_sparse_layers else "no layer is sparse"
    no_skip = None if skips else "no step is skipped"
    if plan.has_sparse_layers:
        first = NOTHING_SPARSE if plan.is_dense() else None
    else:
        first = None if plan.config.attention.is_sparse or plan.config.mlp.is_sparse else no_layer
    least = None if rules.full_share else "schedule.full_share is not given"
    if schedule.is_short:
        least = "of so few steps, at most the first, second and fourth are full"
    sparse = no_layer if rules.lists_full else "no full steps are listed"
    is_share = not isinstance(rules.sparse_steps, tuple)
    if is_share and skips and Action.SPARSE not in actions and plan.steps is not None:
        sparse = sparse or "no gap between full steps has room for one, or it rounds to none"
    reasons = {
        "schedule.sparse_steps": sparse,
        "schedule.least_full": least,
        **{f"schedule.{name}": no_layer for name in PUBLISHED_FORM},
    }
    if rules.actions is not None:
        names = [field.name for field in dataclasses.fields(rules)]
        overridden = [f"schedule.{name}" for name in names if name not in BESIDE_ACTIONS]
        reasons = dict.fromkeys(overridden, "schedule.actions overrides it")
    return {
        **reasons,
        "schedule.forecast": no_skip,
        "schedule.forecast_after": no_skip if rules.forecast else "schedule.forecast is not given",
        "schedule.first_dense_layers": first,
    }


def _budgets(plan: SparsityPlan) -> Iterator[tuple[str, Any, str]]:
    """Yield the budgets of layers that are without effect: the path, the value and the reason."""
    for place, budget in enumerate(plan.config.layers):
        shares: dict[Part, Any] = {"attention": budget.attention, "mlp": budget.mlp}
        if set(shares.values()) == {None}:
            yield f"layers[{place}]", budget.layers, "it names neither attention nor mlp"
        own = list(itertools.chain(*budget.ranges()))
        for part, share in shares.items():
            reason = _why_not_sparse(plan, part) or _why_not_sparse(plan, part, own)
            if share not in (None, "dense") and reason is not None:
                yield f"layers[{place}].{part}", share, reason


def _why_not_sparse(
    plan: SparsityPlan,
    part: Part,
    layers: Sequence[int] | None = None,
) -> str | None:
    """Return why no layer, or none of these, is sparse; None where one is."""
    reasons = {plan.dense.get((layer, part)) for layer in layers or range(plan.layout.layers)}
    if None in reasons:
        return NOTHING_SPARSE if plan.is_dense() else None
    return reasons.pop() if len(reasons) == 1 else f"{part} is sparse in no layer"

"""Fields of a config that ask for something, and change nothing in this generation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from chipsparse.common.byte_sizes import format_bytes
from chipsparse.common.validation import shown
from chipsparse.config import Action, Listed, Part, Periodic, SparsityConfig, Spread
from chipsparse.config.schedule_forms import OTHERS
from chipsparse.skip.timetable import form_of

if TYPE_CHECKING:
    from chipsparse.sparse.plan import SparsityPlan

OFF = ("never", "dense")  # values that keep something off and ask for nothing
NOTHING_SPARSE = "no step is sparse"


def without_effect(
    plan: SparsityPlan,
    *,
    base: SparsityConfig | None = None,
    on_cpu: bool = False,
) -> list[str]:
    """Return one sentence for each reason, with all fields that it holds for.

    A field asks for something where it has neither its default nor the value of ``base``, which is
    the config where nobody asked for anything.
    """
    config = plan.config
    fields: dict[str, list[str]] = {}
    for path, reason in _reasons(plan, on_cpu).items():
        field = attrgetter(path)
        value = field(config)
        default = field(SparsityConfig())
        is_usual = base is not None and value == field(base)
        if reason is None or is_usual or value in OFF or value == default:
            continue
        if path in ("memory.vram", "memory.ram"):
            text = format_bytes(value)
        else:
            text = shown(list(value) if isinstance(value, tuple) else value)
        fields.setdefault(reason, []).append(f"{path} ({text})")
    if base is None or config.schedule.form != base.schedule.form:
        for path, value, reason in _form_fields(plan):
            fields.setdefault(reason, []).append(f"{path} ({shown(value)})")
    if base is None or config.layers != base.layers:
        for path, value, reason in _budgets(plan):
            fields.setdefault(reason, []).append(f"{path} ({shown(value)})")
    notes = [
        f"{', '.join(paths)} {'has' if len(paths) == 1 else 'have'} no effect: {reason}"
        for reason, paths in fields.items()
    ]
    if base is None or config.schedule.form != base.schedule.form:
        notes += _unreached(plan)
    return notes


def _reasons(plan: SparsityPlan, on_cpu: bool) -> dict[str, str | None]:
    """Return why each field is without effect; None where it has one."""
    config = plan.config
    columns = _why_not_sparse(plan, "attention")
    neurons = _why_not_sparse(plan, "mlp")
    dense = NOTHING_SPARSE if plan.is_dense() else None
    rules = config.schedule
    no_skip = None if plan.schedule.skips_any else "no step is skipped"
    cpu = "this device is a CPU" if on_cpu else None
    never = "memory.offload is never" if config.memory.offload == "never" and not on_cpu else None
    return {
        "attention.density": columns,
        "attention.delta_rule": columns,
        "tile": columns,
        "mlp.density": neurons,
        "block_size": columns and neurons,
        "memory.cache_precision": columns and neurons,
        "schedule.forecast": no_skip,
        "schedule.forecast_after": no_skip if rules.forecast else "schedule.forecast is not given",
        "memory.vram": dense or cpu,
        "memory.ram": dense or never,
        "memory.offload": dense,
        "cuda_graphs": dense or cpu,
        "backend": None if config.attention.in_fp8 else dense,
    }


def _form_fields(plan: SparsityPlan) -> Iterator[tuple[str, Any, str]]:
    """Yield the fields of the schedule's form that ask for sparse steps where there are none."""
    form = plan.config.schedule.form
    if not plan.has_sparse_layers:
        reason = "no layer is sparse"
        if isinstance(form, Periodic) and form != Periodic():
            for name in ("warmup", "refresh_every"):
                value = getattr(form, name)
                if value != getattr(Periodic(), name):
                    yield f"schedule.periodic.{name}", value, reason
        elif isinstance(form, Spread) and form.sparse:
            yield "schedule.spread.sparse", form.sparse, reason
        elif isinstance(form, Listed) and form.sparse:
            sparse = OTHERS if form.sparse == OTHERS else list(form.sparse)
            yield "schedule.listed.sparse", sparse, reason
        return
    if not isinstance(form, Spread) or not form.sparse or plan.steps is None:
        return
    actions = plan.schedule.actions()[plan.first :]
    if Action.SKIP in actions and Action.SPARSE not in actions:
        reason = "no skipped interval has room for one, or it rounds to none"
        yield "schedule.spread.sparse", form.sparse, reason


def _unreached(plan: SparsityPlan) -> list[str]:
    """Return which listed steps a generation does not have."""
    form = form_of(plan.config.schedule.form, plan.branch, plan.sparse_cost)
    if not isinstance(form, Listed) or plan.steps is None:
        return []
    sparse = () if form.sparse == OTHERS else form.sparse
    beyond = [str(step) for step in sorted({*form.full, *sparse}) if step >= plan.steps]
    if not beyond:
        return []
    return [
        f"the listed steps {', '.join(beyond)} are never reached: the last of {plan.steps} steps "
        f"is {plan.steps - 1}",
    ]


def _budgets(plan: SparsityPlan) -> Iterator[tuple[str, Any, str]]:
    """Yield the budgets of layers that are without effect: the path, the value and the reason."""
    for place, budget in enumerate(plan.config.layers):
        shares: dict[Part, Any] = {"attention": budget.attention, "mlp": budget.mlp}
        if set(shares.values()) == {None}:
            yield f"layers[{place}]", budget.index, "it names neither attention nor mlp"
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

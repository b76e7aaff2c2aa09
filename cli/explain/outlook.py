"""What one config makes of a generation on a device: its plan, its caches and its expected time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from chipsparse.cache.memory_plan import (
    Capacity,
    MemoryDemand,
    MemoryPlan,
    available,
    declared,
    plan_memory,
    working_bytes,
)
from chipsparse.cli.generation_options import GenerationOptions
from chipsparse.cli.model.dense_layers import dense_layers, fp8_weights
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.planning.planned import PlannedGeneration, plan_generation
from chipsparse.cli.planning.work_share import planned_share
from chipsparse.cli.ranks.sharing import check_sharing, sharing_of
from chipsparse.config import Part
from chipsparse.cost_model.exchanges import Sharing
from chipsparse.cost_model.layer_times import (
    PartSeconds,
    Rates,
    captures,
    known_rates,
    part_times,
    slower_parts,
)
from chipsparse.cost_model.run_times import RunEstimate, estimate_run
from chipsparse.experiments.timing import measure_rates
from chipsparse.parallel.degrees import Parallel
from chipsparse.parallel.sequence_cut import on_rank
from chipsparse.plan import SparsityPlan
from chipsparse.profiles.profile import Profile


@dataclass(frozen=True)
class Target:
    """Where the generation would run.

    Attributes:
        device: its type, as PyTorch calls it.
        here: whether this machine has it.
        dtype: of weights and hidden states.
        rates: of the device; None where times cannot be estimated.
        why_untimed: why not, one sentence.
        known: rates that decide what runs dense; None where nothing is decided.
    """

    device: torch.device
    here: bool
    dtype: torch.dtype
    rates: Rates | None
    why_untimed: str | None
    known: Rates | None

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, *, here: bool) -> Target:
        """Measures the rates of a GPU that is here, unless they are known."""
        why = None
        if device.type != "cuda":
            why = "times are not estimated: the rates of this CPU are not known"
        elif dtype is torch.float32:
            why = "times are not estimated: the known rates are those of 16-bit types"
        if why is not None:
            return cls(device, here, dtype, None, why, None)
        known = known_rates(device, dtype) if here else Rates()
        return cls(device, here, dtype, known or measure_rates(device), None, known)


@dataclass(frozen=True)
class Outlook:
    """What is known of a generation beforehand; of several processes, of the one with most of it.

    Attributes:
        working: bytes that a transformer call needs besides weights and caches.
        times: of a step of what the config has sparse; empty where they are not known.
        dense: layers of each part that never run sparse, and why.
        estimate: expected times; None where they are not known.
        why_untimed: why not, one sentence.
        sharing: how several processes share it; None for one.
    """

    planned: PlannedGeneration
    working: int
    memory: MemoryPlan
    times: Mapping[tuple[int, Part], PartSeconds]
    dense: dict[Part, dict[int, str]]
    estimate: RunEstimate | None
    why_untimed: str | None
    sharing: Sharing | None

    @property
    def action_counts(self) -> Counter[str]:
        """How many steps take each action."""
        return Counter(action.value for action in self.planned.plan.actions())

    @property
    def work(self) -> float:
        """Share of the multiply-adds of a dense generation."""
        return planned_share(self.planned.plan, self.dense)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the caches, wherever they live."""
        return self.memory.device_bytes + self.memory.host_bytes

    def to_json(self) -> dict[str, Any]:
        """What tells qualities apart."""
        return {
            "counts": self.action_counts,
            "work": self.work,
            "cache_bytes": self.cache_bytes,
            "speedup_run": None if self.estimate is None else self.estimate.speedup_run,
        }


def look_ahead(
    options: GenerationOptions,
    model: ModelDescription,
    profile: Profile,
    target: Target,
    *,
    weights: int,
    parallel: Parallel | None = None,
) -> Outlook:
    """The outlook of what a profile computes; raises `UserError`.

    Args:
        weights: bytes of them all.
        parallel: the processes that share it; None for one.
    """
    planned, sharing = plan_generation(options, model, profile), None
    check_sharing(model, planned, parallel)
    if parallel is not None:
        sharing = sharing_of(model, planned, parallel, target.dtype)
        planned = replace(planned, plan=_largest(sharing))
    plan = planned.plan
    calls = planned.branches if sharing is None else sharing.calls
    captured = (
        target.device.type == "cuda"
        and sharing is None
        and captures(plan, target.dtype, target.known)
    )
    never: set[tuple[int, Part]] = {
        (layer, part) for part in planned.never for layer in range(plan.layout.layers)
    }
    form = fp8_weights(model)
    fp8 = {} if form is None else dict.fromkeys(range(plan.layout.layers), form)
    working = working_bytes(
        plan, dtype=target.dtype, captured=calls if captured else 0, fp8_mlps=fp8.keys()
    )
    times: dict[tuple[int, Part], PartSeconds] = {}
    slower: dict[tuple[int, Part], str] = {}
    if target.known is not None:
        times = part_times(
            plan,
            rates=target.known,
            dtype=target.dtype,
            captured=captured,
            dense=never,
            fp8_mlps=fp8,
        )
        slower = slower_parts(times, target.known)
    memory = plan_memory(
        plan,
        _capacity(plan, target, parallel, working=working, weights=weights),
        MemoryDemand(target.dtype, calls, dense=frozenset(never | slower.keys())),
    )
    dense = dense_layers(plan, planned.never, slower, memory.placement)
    if sharing is not None:
        sharing = replace(sharing, dense=frozenset(dense["attention"]))
    estimate, why = _estimate(planned, memory, dense, target, sharing, captured=captured)
    return Outlook(planned, working, memory, times, dense, estimate, why, sharing)


def _largest(sharing: Sharing) -> SparsityPlan:
    """The plan of a process with the largest share, from which all of them plan their memory."""
    plan = sharing.plan
    if sharing.parallel.ulysses == 1:
        return plan
    return replace(plan, layout=on_rank(plan.layout, sharing.cut, 0))


def _capacity(
    plan: SparsityPlan, target: Target, parallel: Parallel | None, *, working: int, weights: int
) -> Capacity:
    budgets = plan.config.memory
    if target.here:
        found = available(budgets, target.device, working=working, pending=weights)
    else:
        found = declared(budgets, working=working, pending=weights)
    if parallel is None:
        return found
    # The processes of a machine share its memory.
    device = found.device // parallel.ranks if target.device.type == "cpu" else found.device
    return replace(found, device=device, host=found.host // parallel.ranks)


def _estimate(
    planned: PlannedGeneration,
    memory: MemoryPlan,
    dense: dict[Part, dict[int, str]],
    target: Target,
    sharing: Sharing | None,
    *,
    captured: bool,
) -> tuple[RunEstimate | None, str | None]:
    """The expected times, or a sentence that says why there are none."""
    if target.rates is None:
        return None, target.why_untimed
    estimate = estimate_run(
        planned.plan,
        moved=partial(memory.placement.moved, planned.plan.config),
        captured=captured and not memory.placement.host,
        dense_parts=dense,
        dtype=target.dtype,
        branches=planned.branches,
        rates=target.rates,
        sharing=sharing,
    )
    if estimate.stock_layer < planned.branches * estimate.rates.launch_seconds:
        return None, (
            "times are not estimated: a layer this small computes in less time than the host takes "
            f"to launch a sparse one, about {estimate.rates.launch_seconds * 1e3:.1f} ms"
        )
    return estimate, None

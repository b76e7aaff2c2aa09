"""The forecast of a generation on a device: its plan, its caches and its expected time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from chipsparse.cache.kinds import PARTS, kind_bytes, with_caches
from chipsparse.cache.memory_plan import (
    Capacity,
    MemoryDemand,
    MemoryPlan,
    available,
    declared,
    plan_memory,
    working_bytes,
)
from chipsparse.cache.placement import Placement
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.plan import PlannedGeneration, fp8_weights
from chipsparse.cli.settings import patch_sizes
from chipsparse.config import Part
from chipsparse.cost_model.exchanges import RankShare, Sharing
from chipsparse.cost_model.layer_times import (
    PartSeconds,
    Rates,
    captures,
    known_rates,
    layer_time,
    part_times,
    slower_parts,
)
from chipsparse.cost_model.run_times import RunEstimate, estimate_run
from chipsparse.experiments.clips import planned_share
from chipsparse.experiments.timing import measure_rates
from chipsparse.parallel.degrees import Parallel
from chipsparse.parallel.sequence_cut import on_rank
from chipsparse.plan import Action, SparsityPlan


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
class Forecast:
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


def look_ahead(
    model: ModelDescription,
    planned: PlannedGeneration,
    target: Target,
    *,
    weights: int,
    parallel: Parallel | None = None,
) -> Forecast:
    """Return the forecast of a planned generation.

    Args:
        weights: bytes of them all.
        parallel: the processes that share it, which can; None for one.
    """
    sharing = None
    if parallel is not None:
        config = model.transformer_config
        channels = config.get("out_channels") or config.get("in_channels", 0)
        channels *= math.prod(patch_sizes(config))
        sharing = Sharing(
            planned.plan, parallel, planned.branches, target.dtype, output_channels=channels
        )
        if parallel.ulysses > 1:  # all plan their memory as the process with the largest share
            layout = on_rank(planned.plan.layout, sharing.cut, 0)
            planned = replace(planned, plan=replace(planned.plan, layout=layout))
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
    dense = _dense_layers(planned, slower, memory.placement)
    if sharing is not None:
        sharing = replace(sharing, dense=frozenset(dense["attention"]))
    estimate, why = _estimate(planned, memory, dense, target, sharing, captured=captured)
    return Forecast(planned, working, memory, times, dense, estimate, why, sharing)


def _dense_layers(
    planned: PlannedGeneration, slower: Mapping[tuple[int, Part], str], placement: Placement
) -> dict[Part, dict[int, str]]:
    """Return every layer part that runs dense, and why.

    Args:
        slower: what would be slower sparse, and why.
        placement: where caches live.
    """
    plan = planned.plan
    dense: dict[Part, dict[int, str]] = {part: {} for part in PARTS}
    for part in PARTS:
        for layer in range(plan.layout.layers):
            if part in planned.never:
                dense[part][layer] = planned.never[part]
            elif why := plan.why_dense(layer, part):
                dense[part][layer] = f"{why} in the profile"
            elif (layer, part) in slower:
                dense[part][layer] = slower[layer, part]
            elif (layer, part) in placement.recomputed:
                dense[part][layer] = placement.why_recomputed(layer, part)
    return dense


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


# Several processes.


@dataclass(frozen=True)
class RankForecast:
    """One of several processes.

    Attributes:
        branch: the guidance branch that it computes; None where it computes all.
        heads: that it has in attention.
        tokens: that it has of a call elsewhere, those of the text included.
        text_tokens: how many of them are text.
        cache_bytes: its caches, wherever they live.
        sent_bytes: what it sends to others in a step of each action.
        computing: seconds that it computes in a step of each action; None where not known.
        busy: the share of a generation in which it computes; likewise.
    """

    rank: int
    branch: int | None
    heads: int
    tokens: int
    text_tokens: int
    cache_bytes: int
    sent_bytes: Mapping[Action, int]
    computing: Mapping[Action, float] | None
    busy: float | None


def rank_forecasts(forecast: Forecast, sharing: Sharing) -> list[RankForecast]:
    """Return what each process has, of a forecast of the one with the largest share."""
    return [_rank(number, rank, forecast, sharing) for number, rank in enumerate(sharing.ranks())]


def _rank(number: int, rank: RankShare, forecast: Forecast, sharing: Sharing) -> RankForecast:
    plan = replace(sharing.plan, layout=sharing.layout_of(rank))
    placement = forecast.memory.placement
    config = with_caches(plan.config, in_fp8=forecast.memory.in_fp8)
    cache_bytes = sharing.calls * sum(
        kind_bytes(kind, layer, layout=plan.layout, config=config, dtype=sharing.dtype)
        for layer, kind in (*placement.device, *placement.host)
    )
    computing = busy = None
    if forecast.estimate is not None:
        rates = forecast.estimate.rates

        def call(action: Action, *, chooses: bool) -> float:
            return sum(
                layer_time(
                    layer,
                    action,
                    plan=plan,
                    rates=rates,
                    dtype=sharing.dtype,
                    dense_parts=[part for part in PARTS if layer in forecast.dense[part]],
                    chooses=chooses,
                ).total
                for layer in range(plan.layout.layers)
            )

        computing = {
            action: call(action, chooses=not rank.branch)
            + (sharing.calls - 1) * call(action, chooses=False)
            for action in Action
        }
        busy = sum(computing[action] for action in plan.actions()) / forecast.estimate.run
    return RankForecast(
        rank=number,
        branch=rank.branch,
        heads=plan.layout.own_heads,
        tokens=rank.tokens,
        text_tokens=rank.text_tokens,
        cache_bytes=cache_bytes,
        sent_bytes={action: sharing.sent_bytes(action)[number] for action in Action},
        computing=computing,
        busy=busy,
    )

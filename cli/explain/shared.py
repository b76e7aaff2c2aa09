"""What each of several processes has of a generation, and how well they share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from chipsparse.cache.kinds import PARTS, keeping_in_fp8, kind_bytes
from chipsparse.cli.explain.outlook import Outlook
from chipsparse.cli.results import NO_JSON, fields_json
from chipsparse.cost_model.exchanges import RankShare, Sharing
from chipsparse.cost_model.layer_times import Rates, layer_time
from chipsparse.parallel.degrees import Parallel
from chipsparse.plan import Action

Seconds = Mapping[Action, float]


@dataclass(frozen=True)
class RankOutlook:
    """One process.

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
    computing: Seconds | None
    busy: float | None


@dataclass(frozen=True)
class SharedOutlook:
    """All of them.

    Attributes:
        parallel: how many there are, by what they share.
        alone: the same generation on one device of this kind.
        efficiency: of a step of each action: its time on one device over that of all processes
            together; None where times are not known.
        efficiency_run: of all steps; likewise.
    """

    parallel: Parallel
    ranks: list[RankOutlook]
    alone: Outlook = field(metadata=NO_JSON)
    efficiency: Seconds | None
    efficiency_run: float | None

    def to_json(self) -> dict[str, Any]:
        """What is known of each process, and of one that does it all."""
        estimate = self.alone.estimate
        alone = {
            "cache_bytes": self.alone.cache_bytes,
            "steps": None if estimate is None else estimate.steps,
            "run": None if estimate is None else estimate.run,
        }
        return {**fields_json(self), "alone": alone}


def share_out(outlook: Outlook, alone: Outlook) -> SharedOutlook | None:
    """What each process has; None where there is one.

    Args:
        outlook: of the process with the largest share.
        alone: of one that has all.
    """
    sharing = outlook.sharing
    if sharing is None:
        return None
    ranks = [_rank(number, rank, outlook, sharing) for number, rank in enumerate(sharing.ranks())]
    efficiency = run = None
    if outlook.estimate is not None and alone.estimate is not None:
        count = sharing.parallel.ranks
        efficiency = {
            action: alone.estimate.steps[action] / (count * seconds)
            for action, seconds in outlook.estimate.steps.items()
            if alone.estimate.steps[action] > 0
        }
        run = alone.estimate.run / (count * outlook.estimate.run)
    return SharedOutlook(sharing.parallel, ranks, alone, efficiency, run)


def _rank(number: int, rank: RankShare, outlook: Outlook, sharing: Sharing) -> RankOutlook:
    plan = replace(sharing.plan, layout=sharing.layout_of(rank))
    placement = outlook.memory.placement
    config = keeping_in_fp8(plan.config, outlook.memory.in_fp8)
    cache_bytes = sharing.calls * sum(
        kind_bytes(kind, layer, layout=plan.layout, config=config, dtype=sharing.dtype)
        for layer, kind in (*placement.device, *placement.host)
    )
    computing = busy = None
    if outlook.estimate is not None:
        computing = _computing(rank, outlook, sharing, outlook.estimate.rates)
        done = sum(computing[action] for action in plan.actions())
        busy = done / outlook.estimate.run
    return RankOutlook(
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


def _computing(rank: RankShare, outlook: Outlook, sharing: Sharing, rates: Rates) -> Seconds:
    plan = replace(sharing.plan, layout=sharing.layout_of(rank))

    def call(action: Action, *, chooses: bool) -> float:
        return sum(
            layer_time(
                layer,
                action,
                plan=plan,
                rates=rates,
                dtype=sharing.dtype,
                dense_parts=[part for part in PARTS if layer in outlook.dense[part]],
                chooses=chooses,
            ).total
            for layer in range(plan.layout.layers)
        )

    return {
        action: call(action, chooses=not rank.branch)
        + (sharing.calls - 1) * call(action, chooses=False)
        for action in Action
    }

"""Which budgets and which schedule: the configs that nothing beats in the prediction.

For a given schedule, time and squared error are sums over the parts of layers, so the budgets that
minimise ``seconds + price * error`` are found part by part: on the lower convex hull of what each
can have. To raise the price of an error step by step is to take, again and again, the exchange that
removes most error per second; this greedy walk visits every optimum of that Lagrangian (Everett,
"Generalized Lagrange multiplier method", Operations Research 11, 1963). The walks of all schedules
together, without what another one beats, are the frontier.

What single layers have wrong says only so much of what all do together. So no layer gets more than
`SPREAD` times the common share of its part, or less than that fraction of it: allocations that went
by the prediction alone lost to one share for all layers (benchmarks/notes/tuning.md).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from chipsparse.cache_kinds import PARTS, Part
from chipsparse.config import SparsityConfig, ranges_text
from chipsparse.layout import ModelLayout
from chipsparse.plan import Action, SparsityPlan
from chipsparse.tuning.error_model import ErrorModel
from chipsparse.tuning.probes import BUDGETS
from chipsparse.tuning.time_model import TimeModel

# Neighbours on the frontier differ by at least so much.
SPACING_DB = 0.05
SPREAD = 2.0

Budget = float | None  # a share, or None where a layer is never sparse
Site = tuple[Part, int]


class Costed(Protocol):
    """Something that takes time and brings an error."""

    @property
    def seconds(self) -> float:
        """What it takes."""

    @property
    def error(self) -> float:
        """What it brings, squared."""


AnyCosted = TypeVar("AnyCosted", bound=Costed)


@dataclass(frozen=True)
class Option:
    """What one part of a layer can have.

    Attributes:
        budget: the share that it keeps.
        seconds: of the whole generation.
        error: squared.
    """

    budget: Budget
    seconds: float
    error: float


@dataclass(frozen=True)
class Candidate:
    """A config with its prediction.

    Attributes:
        config: what is computed.
        seconds: of a generation.
        error: squared, of the finished pictures in 0 to 1.
    """

    config: SparsityConfig
    seconds: float
    error: float

    @property
    def psnr_db(self) -> float:
        """The error as a peak signal-to-noise ratio."""
        return -10 * math.log10(max(self.error, 1e-12))


@dataclass(frozen=True)
class Walk:
    """Allocations for one schedule, from the fastest to the most accurate.

    Attributes:
        seconds: of each.
        errors: of each.
        budgets: gives the budgets of one, by its number.
    """

    seconds: Sequence[float]
    errors: Sequence[float]
    budgets: Callable[[int], dict[Site, Budget]]


def hull(options: Iterable[AnyCosted]) -> list[AnyCosted]:
    """Those on the lower convex hull of error over seconds, from the fastest to the best."""
    kept: list[AnyCosted] = []
    for option in sorted(options, key=lambda each: (each.seconds, each.error)):
        if kept and option.error >= kept[-1].error:
            continue
        while len(kept) > 1 and _removed(kept[-2], option) >= _removed(kept[-2], kept[-1]):
            kept.pop()
        kept.append(option)
    return kept


def _removed(worse: Costed, better: Costed) -> float:
    """Error removed per second."""
    spent = better.seconds - worse.seconds
    return math.inf if spent <= 0 else (worse.error - better.error) / spent


def walk(sites: dict[Site, list[Option]], *, seconds: float = 0.0, error: float = 0.0) -> Walk:
    """All optima of the Lagrangian, each site for itself.

    Args:
        sites: what each can have.
        seconds: what is spent besides.
        error: what is wrong besides.
    """
    hulls = {site: hull(options) for site, options in sites.items()}
    exchanges = [
        (_removed(worse, better), site, worse, better)
        for site, kept in hulls.items()
        for worse, better in itertools.pairwise(kept)
    ]
    exchanges.sort(key=lambda each: -each[0])  # stable: on a hull, each site's stay in order
    start_seconds = seconds + sum(kept[0].seconds for kept in hulls.values())
    start_error = error + sum(kept[0].error for kept in hulls.values())
    spent = [better.seconds - worse.seconds for _, _, worse, better in exchanges]
    removed = [worse.error - better.error for _, _, worse, better in exchanges]

    def budgets(number: int) -> dict[Site, Budget]:
        chosen = {site: kept[0].budget for site, kept in hulls.items()}
        return chosen | {site: better.budget for _, site, _, better in exchanges[:number]}

    return Walk(
        [start_seconds + float(s) for s in np.cumsum([0.0, *spent])],
        [max(0.0, start_error - float(e)) for e in np.cumsum([0.0, *removed])],
        budgets,
    )


@dataclass(frozen=True)
class OneBudget:
    """The same for all attention, and the same for all feed-forward layers.

    Attributes:
        budgets: by part.
        seconds: of the whole generation.
        error: squared.
    """

    budgets: dict[Part, Budget]
    seconds: float
    error: float


def _every_one(
    sites: dict[Site, list[Option]], seconds: float, error: float
) -> Iterable[OneBudget]:
    present = {part: {o.budget for o in each} for (part, _), each in sites.items()}
    for chosen in itertools.product(*present.values()):
        budgets = dict(zip(present, chosen, strict=True))
        taken = [
            option
            for (part, _), options in sites.items()
            for option in options
            if option.budget == budgets[part]
        ]
        yield OneBudget(
            budgets,
            seconds + sum(option.seconds for option in taken),
            error + sum(option.error for option in taken),
        )


def global_budgets(
    sites: dict[Site, list[Option]], *, seconds: float = 0.0, error: float = 0.0
) -> Walk:
    """For comparison: one budget for all attention, one for all feed-forward layers."""
    rows = list(_every_one(sites, seconds, error))
    return Walk(
        [row.seconds for row in rows],
        [row.error for row in rows],
        lambda number: {site: rows[number].budgets[site[0]] for site in sites},
    )


def near_one_budget(
    sites: dict[Site, list[Option]], *, seconds: float = 0.0, error: float = 0.0
) -> Walk:
    """The optima with every layer near a common budget of its part, for all common budgets.

    Args:
        sites: what each can have.
        seconds: what is spent besides.
        error: what is wrong besides.
    """
    walks = [
        walk(
            {
                site: [each for each in options if _is_near(each.budget, common.budgets[site[0]])]
                for site, options in sites.items()
            },
            seconds=seconds,
            error=error,
        )
        for common in hull(_every_one(sites, seconds, error))
    ]
    places = [(each, number) for each in walks for number in range(len(each.seconds))]
    return Walk(
        [each.seconds[number] for each, number in places],
        [each.errors[number] for each, number in places],
        lambda place: places[place][0].budgets(places[place][1]),
    )


def _is_near(budget: Budget, common: Budget) -> bool:
    if budget is None or common is None:
        return budget is common
    return 1 / SPREAD <= budget / common <= SPREAD


def frontier(
    configs: Iterable[SparsityConfig],
    layout: ModelLayout,
    errors: ErrorModel,
    times: TimeModel,
    allocate: Callable[..., Walk] = near_one_budget,
) -> list[Candidate]:
    """Configs that are faster than dense and that no other one beats, from the fastest on.

    Args:
        configs: schedules, with what all candidates have in common.
        layout: of the model.
        errors: predicts errors.
        times: predicts seconds.
        allocate: `near_one_budget`, or for comparison `walk` or `global_budgets`.
    """
    walks = []
    points: list[tuple[float, float, int, int]] = []
    for number, config in enumerate(configs):
        actions = SparsityPlan(config, layout, errors.steps).actions()
        made, spent = errors.of_schedule(actions), times.of_schedule(actions)
        sites = _sites(actions, config, errors, made, spent)
        fixed = spent.fixed + sum(
            float(spent.dense[part].sum())
            for part in PARTS
            if not _is_sparse(config, actions, part)
        )
        walks.append((config, allocate(sites, seconds=fixed, error=made.fixed)))
        own = walks[-1][1]
        totals = zip(own.seconds, own.errors, strict=True)
        points += [(spend, wrong, number, place) for place, (spend, wrong) in enumerate(totals)]
    points.sort()
    dense_seconds = times.dense_seconds(errors.steps)
    kept: list[Candidate] = []
    least = math.inf
    for seconds, error, number, place in points:
        # Times are measured, and so never quite the same: a hundredth less is no gain.
        if seconds >= dense_seconds or 10 * math.log10(least / max(error, 1e-12)) < SPACING_DB:
            continue
        least = max(error, 1e-12)
        config, own = walks[number]
        kept.append(Candidate(with_budgets(config, own.budgets(place)), seconds, error))
    return kept


def _is_sparse(config: SparsityConfig, actions: Sequence[Action], part: Part) -> bool:
    section = config.attention if part == "attention" else config.mlp
    return section.enabled and Action.SPARSE in actions


def _sites(
    actions: Sequence[Action],
    config: SparsityConfig,
    errors: ErrorModel,
    made: Any,
    spent: Any,
) -> dict[Site, list[Option]]:
    return {
        (part, layer): [
            Option(None, float(spent.dense[part][row]), 0.0),
            *(
                Option(budget, float(spent.of[part][row, i]), float(made.of[part][row, i]))
                for i, budget in enumerate(BUDGETS[part])
            ),
        ]
        for part in PARTS
        if _is_sparse(config, actions, part)
        for row, layer in enumerate(errors.layers[part])
    }


def with_budgets(config: SparsityConfig, budgets: dict[Site, Budget]) -> SparsityConfig:
    """A config in which each layer keeps its own share; the most frequent one is everybody's.

    A part in which every layer is dense is switched off.
    """
    changes: dict[str, Any] = {}
    own: dict[int, dict[str, Any]] = {}
    for part in PARTS:
        shares = {layer: budget for (each, layer), budget in budgets.items() if each == part}
        sparse = Counter(budget for budget in shares.values() if budget is not None)
        if shares and not sparse:
            changes[f"{part}.enabled"] = False
        if not sparse:
            continue
        common = max(sparse, key=lambda budget: (sparse[budget], budget))
        changes[f"{part}.keep_fraction"] = common
        for layer, budget in shares.items():
            if budget != common:
                own.setdefault(layer, {})[part] = "dense" if budget is None else budget
    groups: dict[tuple[Any, Any], list[int]] = {}
    for layer, kept in sorted(own.items()):
        groups.setdefault((kept.get("attention"), kept.get("mlp")), []).append(layer)
    changes["layers"] = [
        {"layers": ranges_text(layers), "attention": attention, "mlp": mlp}
        for (attention, mlp), layers in groups.items()
    ]
    return config.override(changes)

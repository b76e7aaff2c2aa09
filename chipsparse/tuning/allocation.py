"""Which budgets and which schedule: the configs that nothing beats in the prediction.

For a given schedule, time and squared error are sums over the parts of layers, so the budgets that
minimise ``seconds + price * error`` are found part by part: on the lower convex hull of what each
can have. To raise the price of an error step by step is to take, again and again, the exchange that
removes most error per second; this greedy walk visits every optimum of that Lagrangian (Everett,
"Generalized Lagrange multiplier method", Operations Research 11, 1963). The walks of all schedules
together, without what another one beats, are the frontier.

What single layers have wrong says only so much of what all do together: budgets that went by it
alone were no better than one budget for all layers. So exchanges are chosen by errors that are half
way to those of the other layers; these budgets were better (benchmarks/notes/tuning.md).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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
# The part of the differences between layers, in logarithms, that is believed.
TRUST = 0.5

Budget = float | None  # a share, or None where a layer is never sparse
Site = tuple[Part, int]


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


def hull(options: Iterable[Option]) -> list[Option]:
    """Those on the lower convex hull of error over seconds, from the fastest to the best."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda each: (each.seconds, each.error)):
        if kept and option.error >= kept[-1].error:
            continue
        while len(kept) > 1 and _removed(kept[-2], option) >= _removed(kept[-2], kept[-1]):
            kept.pop()
        kept.append(option)
    return kept


def _removed(worse: Option, better: Option) -> float:
    """Error removed per second."""
    spent = better.seconds - worse.seconds
    return math.inf if spent <= 0 else (worse.error - better.error) / spent


def walk(
    sites: dict[Site, list[Option]],
    *,
    seconds: float = 0.0,
    error: float = 0.0,
    trust: float = 1.0,
) -> Walk:
    """All optima of the Lagrangian, each site for itself.

    Args:
        sites: what each can have.
        seconds: what is spent besides.
        error: what is wrong besides.
        trust: how much of the difference between layers is believed when exchanges are chosen, 0
            to 1; the errors of the walk are those of the sites.
    """
    hulls = {site: hull(options) for site, options in _believed(sites, trust).items()}
    exchanges = [
        (_removed(worse, better), site, worse, better)
        for site, kept in hulls.items()
        for worse, better in itertools.pairwise(kept)
    ]
    exchanges.sort(key=lambda each: -each[0])  # stable: on a hull, each site's stay in order
    known = {site: {each.budget: each.error for each in options} for site, options in sites.items()}
    start_seconds = seconds + sum(kept[0].seconds for kept in hulls.values())
    start_error = error + sum(known[site][kept[0].budget] for site, kept in hulls.items())
    spent = [better.seconds - worse.seconds for _, _, worse, better in exchanges]
    removed = [
        known[site][worse.budget] - known[site][better.budget]
        for _, site, worse, better in exchanges
    ]

    def budgets(number: int) -> dict[Site, Budget]:
        chosen = {site: kept[0].budget for site, kept in hulls.items()}
        return chosen | {site: better.budget for _, site, _, better in exchanges[:number]}

    return Walk(
        [start_seconds + float(s) for s in np.cumsum([0.0, *spent])],
        [max(0.0, start_error - float(e)) for e in np.cumsum([0.0, *removed])],
        budgets,
    )


def _believed(sites: dict[Site, list[Option]], trust: float) -> dict[Site, list[Option]]:
    """The sites with errors moved towards the geometric mean of their part at the same budget."""
    if trust == 1:
        return sites
    logs: dict[tuple[Part, Budget], list[float]] = {}
    for (part, _), options in sites.items():
        for option in options:
            if option.error > 0:
                logs.setdefault((part, option.budget), []).append(math.log(option.error))
    means = {place: math.exp(sum(each) / len(each)) for place, each in logs.items()}
    return {
        (part, layer): [
            dataclasses.replace(
                option,
                error=means.get((part, option.budget), 0.0) ** (1 - trust) * option.error**trust,
            )
            for option in options
        ]
        for (part, layer), options in sites.items()
    }


def cautious_walk(
    sites: dict[Site, list[Option]], *, seconds: float = 0.0, error: float = 0.0
) -> Walk:
    """A `walk` that trusts what is known of single layers only so far."""
    return walk(sites, seconds=seconds, error=error, trust=TRUST)


def global_budgets(
    sites: dict[Site, list[Option]], *, seconds: float = 0.0, error: float = 0.0
) -> Walk:
    """For comparison: one budget for all attention, one for all feed-forward layers."""
    rows: list[tuple[float, float, dict[Part, Budget]]] = []
    present = {part: {o.budget for o in each} for (part, _), each in sites.items()}
    for chosen in itertools.product(*present.values()):
        budget = dict(zip(present, chosen, strict=True))
        taken = [
            option
            for (part, _), options in sites.items()
            for option in options
            if option.budget == budget[part]
        ]
        total = seconds + sum(o.seconds for o in taken)
        rows.append((total, error + sum(o.error for o in taken), budget))
    return Walk(
        [row[0] for row in rows],
        [row[1] for row in rows],
        lambda number: {site: rows[number][2][site[0]] for site in sites},
    )


def frontier(
    configs: Iterable[SparsityConfig],
    layout: ModelLayout,
    errors: ErrorModel,
    times: TimeModel,
    allocate: Callable[..., Walk] = cautious_walk,
) -> list[Candidate]:
    """Configs that are faster than dense and that no other one beats, from the fastest on.

    Args:
        configs: schedules, with what all candidates have in common.
        layout: of the model.
        errors: predicts errors.
        times: predicts seconds.
        allocate: `cautious_walk`, or for comparison `walk` or `global_budgets`.
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

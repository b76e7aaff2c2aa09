"""The prices of steps: times of a full-size model's steps over its stock step.

Quality is measured on a small model, speed on large ones. What joins both is the config: a step is
priced by measured steps of the same `step_digest`, and by no others. Where none were run, the price
is computed by the cost model, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.models import MODELS
from benchmarks.records import Record, read
from chipsparse.config import Action, SparsityConfig
from chipsparse.experiments.engine import step_digest
from chipsparse.sparse.cost_model.layer_times import Rates, layer_time
from chipsparse.sparse.plan import SparsityPlan

RESULTS = Path(__file__).parent / "results"
# Of today's configs first; the others have steps with sparse MLPs.
FULL_SIZE = (
    "full_size_steps_h200.json",
    "full_size_qualities_h200.json",
    "full_size_families_h200.json",
)
# Whose steps price generations of the small model.
PRICED_AS = "hunyuan_720p"
# Time of MLPs with 30 % of the neurons over dense ones (benchmarks/notes/sparse_mlp.md).
THIRTY_PERCENT_TIME = 0.4
# Steps that are the same whatever a config has sparse.
OF_ALL_CONFIGS = (Action.DENSE, Action.SKIP)


@dataclass(frozen=True)
class StepPrices:
    """The prices of one model's steps with one config.

    Attributes:
        case: the model and its size, of `benchmarks.models`.
        digest: the config's `step_digest`.
        by_action: times over a stock step. Without those that no record has.
        measured: False where the cost model computed them.
    """

    case: str
    digest: str
    by_action: Mapping[Action, float]
    measured: bool = True

    def scaled_as(self, computed: StepPrices, measured: StepPrices) -> StepPrices:
        """These computed prices, as far off as those of another config were found to be.

        Args:
            computed: of the other config, by the cost model.
            measured: the same, measured; of all actions.
        """
        found = {
            action: price * measured.by_action[action] / computed.by_action[action]
            for action, price in self.by_action.items()
            if price
        }
        return replace(self, by_action={**self.by_action, **found})

    def with_mlp(self, thirty: StepPrices, time: float) -> StepPrices:
        """The prices where MLPs of sparse steps take another time; these are of dense MLPs.

        Args:
            thirty: the same with 30 % of the neurons.
            time: of the MLPs at a sparse step, over dense ones.
        """
        sparse = self.by_action[Action.SPARSE]
        layers = (sparse - thirty.by_action[Action.SPARSE]) / (1 - THIRTY_PERCENT_TIME)
        changed = {**self.by_action, Action.SPARSE: sparse - layers * (1 - time)}
        measured = self.measured and thirty.measured
        return replace(self, by_action=changed, measured=measured)

    def cost(self, calls: Mapping[str, int]) -> float:
        """The time of a generation over that of as many stock steps.

        Args:
            calls: how many steps each action had, or calls where all branches do the same.

        Raises:
            ValueError: no step of one of the actions was measured.
        """
        taken = {Action(action): count for action, count in calls.items() if count}
        missing = [action.value for action in taken if action not in self.by_action]
        if missing:
            raise ValueError(
                f"no {' or '.join(missing)} step of {self.case} was measured with the config "
                f"{self.digest}",
            )
        total = sum(self.by_action[action] * count for action, count in taken.items())
        return total / sum(taken.values())


def measured_prices(
    records: Iterable[Record],
    config: SparsityConfig,
    case: str = PRICED_AS,
) -> StepPrices:
    """The prices of a config's steps from records of ``python -m benchmarks steps``.

    Dense and skipped steps are those of any config of the case, others of this one alone.
    """
    digest = step_digest(config)
    prices = dict[Action, float]()
    for record in records:
        if record["case"] != case:
            continue
        same = record.get("step_config") == digest
        for action in Action:
            ms = record.get(f"{action.value}_ms")
            if ms is not None and (same or (action in OF_ALL_CONFIGS and action not in prices)):
                prices[action] = ms / record["baseline_step_ms"]
    return StepPrices(case, digest, {Action.SKIP: 0.0, **prices})


def computed_prices(config: SparsityConfig, case: str = PRICED_AS) -> StepPrices:
    """The prices of a config's steps by the cost model, of one H200."""
    plan = SparsityPlan(config, MODELS[case].layout())

    def seconds(action: Action) -> float:
        times = (
            layer_time(layer, action, plan=plan, rates=Rates(), dtype=torch.bfloat16)
            for layer in range(plan.layout.layers)
        )
        return sum(time.total for time in times)

    stock = seconds(Action.DENSE)
    prices = {action: seconds(action) / stock for action in Action}
    return StepPrices(case, step_digest(config), prices, measured=False)


def prices_of(config: SparsityConfig, case: str = PRICED_AS) -> StepPrices:
    """The measured prices where all actions have one, else the computed ones."""
    measured = measured_prices(full_size_records(), config, case)
    if measured.by_action.keys() == set(Action):
        return measured
    return computed_prices(config, case)


def full_size_records() -> list[Record]:
    """The committed records of full-size models."""
    return [record for file in FULL_SIZE for record in read(RESULTS / file)]


def priced(clips: Iterable[Record], prices: Mapping[str, StepPrices]) -> list[Record]:
    """Clips with their ``cost``: the share of the dense generation's time.

    Ours are priced by steps of their config. Other methods cost their share of the work.

    Args:
        clips: records; those of ours name the `step_digest` of their config as ``step_config``.
        prices: by that digest.

    Raises:
        ValueError: a clip's config has no price.
    """
    result = []
    for clip in clips:
        cost = clip.get("work")
        if clip.get("step_config") and clip["refused"] is None:
            known = _price(clip, clip["step_config"], prices)
            if clip.get("mlp_time") is not None:
                thirty = _price(clip, clip["step_config_sparse_mlp"], prices)
                known = known.with_mlp(thirty, clip["mlp_time"])
            cost = known.cost(clip["calls"])
        result.append({**clip, "cost": cost})
    return result


def _price(clip: Record, digest: str, prices: Mapping[str, StepPrices]) -> StepPrices:
    if digest in prices:
        return prices[digest]
    way = ", ".join(filter(None, (clip["method"], clip["variant"], clip["setting"])))
    raise ValueError(
        f"{way}: no steps of a large model have its config {digest}; known are "
        f"{', '.join(prices) or 'none'}",
    )


def speed_of(quality: Record, speeds: Iterable[Record]) -> Record:
    """The record of speed that belongs to one of quality: that of the same config.

    Args:
        quality: of a named quality, with the digest of its config as ``config``.
        speeds: records of one case.

    Raises:
        ValueError: the quality was measured with another config than the speed, or no speed was.
    """
    name = quality["setting"]
    of_name = [record for record in speeds if record["schedule"] == name]
    if not of_name:
        raise ValueError(f"no speed of {name} was measured")
    for record in of_name:
        if record.get("config") == quality["config"]:
            return record
    raise ValueError(
        f"{name}: its quality is of the config {quality['config']}, its speed of "
        f"{', '.join(str(record.get('config')) for record in of_name)}: measure one of them again",
    )

"""The prices of steps: times of a full-size model's steps over its stock step, from records.

Quality is measured on a small model, speed on large ones. What joins both is the config: a step is
priced only by measured steps of the same `step_digest`, and a generation only by its own steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.records import Record, read

RESULTS = Path(__file__).parent / "results"
FULL_SIZE = ("full_size_qualities_h200.json", "full_size_families_h200.json")
# Whose steps price generations of the small model.
PRICED_AS = "hunyuan_720p"
ACTIONS = ("dense", "refresh", "sparse", "skip")
# Time of MLPs with 30 % of the neurons over dense ones (benchmarks/notes/sparse_mlp.md).
THIRTY_PERCENT_TIME = 0.4


@dataclass(frozen=True)
class StepPrices:
    """The prices of one model's steps with one config.

    Attributes:
        case: the model and its size, of `benchmarks.models`.
        digest: the config's `step_digest`.
        by_action: times over a stock step. Without those that no record has.
    """

    case: str
    digest: str
    by_action: Mapping[str, float]

    def with_mlp(self, thirty: StepPrices, time: float) -> StepPrices:
        """The prices where MLPs of sparse steps take another time; these are of dense MLPs.

        Args:
            thirty: the same with 30 % of the neurons.
            time: of the MLPs at a sparse step, over dense ones.
        """
        sparse = self.by_action["sparse"]
        layers = (sparse - thirty.by_action["sparse"]) / (1 - THIRTY_PERCENT_TIME)
        changed = {**self.by_action, "sparse": sparse - layers * (1 - time)}
        return StepPrices(self.case, self.digest, changed)

    def cost(self, calls: Mapping[str, int]) -> float:
        """The time of a generation over that of as many stock steps.

        Args:
            calls: how many steps each action had, or calls where all branches do the same.

        Raises:
            ValueError: no step of one of the actions was measured.
        """
        taken = {action: count for action, count in calls.items() if count}
        missing = [action for action in taken if action not in self.by_action]
        if missing:
            raise ValueError(
                f"no {' or '.join(missing)} step of {self.case} was measured with the config "
                f"{self.digest}"
            )
        total = sum(self.by_action[action] * count for action, count in taken.items())
        return total / sum(taken.values())


def step_prices(records: Iterable[Record], case: str = PRICED_AS) -> dict[str, StepPrices]:
    """The prices of a case by `step_digest`, from records of ``python -m benchmarks steps``."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        if record["case"] != case or record.get("step_config") is None:
            continue
        prices = found.setdefault(record["step_config"], {})
        for action in ACTIONS:
            if record.get(f"{action}_ms") is not None:
                prices[action] = record[f"{action}_ms"] / record["baseline_step_ms"]
    return {digest: StepPrices(case, digest, prices) for digest, prices in found.items()}


def known_prices() -> dict[str, StepPrices]:
    """Those of `PRICED_AS`, from the committed records."""
    return step_prices(full_size_records())


def full_size_records() -> list[Record]:
    """The committed records of full-size models."""
    return [record for file in FULL_SIZE for record in read(RESULTS / file)]


def priced(clips: Iterable[Record], prices: Mapping[str, StepPrices]) -> list[Record]:
    """Clips with their ``cost``: the share of the dense generation's time.

    Ours is priced by measured steps of its config. Other methods cost their share of the work.

    Raises:
        ValueError: no step was measured with the config of a clip.
    """
    result = []
    for clip in clips:
        cost = clip.get("work")
        if clip.get("step_config") and clip["refused"] is None:
            known = prices.get(clip["step_config"])
            if known is None:
                way = ", ".join(filter(None, (clip["method"], clip["variant"], clip["setting"])))
                raise ValueError(
                    f"{way}: no step of a large model was measured with its config "
                    f"{clip['step_config']}; measured are {', '.join(prices) or 'none'}"
                )
            if clip.get("mlp_time") is not None:
                known = known.with_mlp(prices[clip["step_config_sparse_mlp"]], clip["mlp_time"])
            cost = known.cost(clip["calls"])
        result.append({**clip, "cost": cost})
    return result


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
        f"{', '.join(str(record.get('config')) for record in of_name)}: measure one of them again"
    )

"""How long a generation takes, predicted from the measured times of layers and whole steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chipsparse.cache_kinds import PARTS, Part
from chipsparse.config import SparsityConfig
from chipsparse.cost_model import kept_columns
from chipsparse.layout import ModelLayout
from chipsparse.plan import Action, SparsityPlan
from chipsparse.tuning.error_model import Array
from chipsparse.tuning.layer_times import line
from chipsparse.tuning.probes import BUDGETS


@dataclass(frozen=True)
class WholeTimes:
    """Seconds of what no layer is.

    Attributes:
        step: a denoising step in full, all guidance branches together.
        skipped_step: one whose output is known.
        other: all that is no denoising step, such as decoding.
    """

    step: float
    skipped_step: float
    other: float


@dataclass(frozen=True)
class ScheduleTimes:
    """Seconds of a generation with a schedule.

    Attributes:
        fixed: of what no budget changes.
        of: of each layer at each budget, by part: ``[layers, budgets]``.
        dense: of each layer where it is never sparse, by part: ``[layers]``.
    """

    fixed: float
    of: dict[Part, Array]
    dense: dict[Part, Array]


class TimeModel:
    """Seconds of schedules and budgets.

    Args:
        times: of one layer of each kind and part, as `Recording` has them.
        whole: see `WholeTimes`.
        branches: guidance branches of a step.
        layout: of the model.
        layers: those that can be sparse, by part.
        config: what is in force besides budgets.
    """

    def __init__(
        self,
        times: Sequence[Mapping[str, Any]],
        whole: WholeTimes,
        branches: int,
        layout: ModelLayout,
        layers: Mapping[Part, Sequence[int]],
        config: SparsityConfig,
    ) -> None:
        self.whole = whole
        self._branches = branches
        self._layers = layers
        by_kind = {(entry["part"], entry["kind"]): entry for entry in times}
        self._times: dict[Part, list[Mapping[str, Any]]] = {
            part: [by_kind[part, layout.kind(layer).name] for layer in layers[part]]
            for part in PARTS
        }
        self._sparse = {part: self._budgets(part, layout, config) for part in PARTS}
        self.plain = {
            part: np.array([entry["plain"] for entry in self._times[part]]) for part in PARTS
        }
        layers_seconds = branches * sum(float(plain.sum()) for plain in self.plain.values())
        self._rest = max(0.0, whole.step - layers_seconds)

    def _budgets(self, part: Part, layout: ModelLayout, config: SparsityConfig) -> Array:
        """Seconds of a sparse step of each layer at each budget, ``[layers, budgets]``."""
        rows = []
        for layer, entry in zip(self._layers[part], self._times[part], strict=True):
            fit = line(entry["sparse"])
            shares = [
                _kept_columns_share(config, layout, layer, budget)
                if part == "attention"
                else budget
                for budget in BUDGETS[part]
            ]
            rows.append([fit["fixed"] + fit["per_share"] * share for share in shares])
        return np.array(rows).reshape(len(rows), len(BUDGETS[part]))

    def of_schedule(self, actions: Sequence[Action]) -> ScheduleTimes:
        """The times of a schedule, for all budgets at once."""
        count = Counter(actions)
        computed = len(actions) - count[Action.SKIP]
        fixed = self.whole.other + count[Action.SKIP] * self.whole.skipped_step
        fixed += computed * self._rest
        of, dense = {}, {}
        for part in PARTS:
            full = np.array(
                [
                    count[Action.DENSE] * entry["dense"] + count[Action.REFRESH] * entry["refresh"]
                    for entry in self._times[part]
                ]
            )
            sparse = count[Action.SPARSE] * self._sparse[part]
            of[part] = self._branches * (full[:, None] + sparse)
            dense[part] = self._branches * computed * self.plain[part]
        return ScheduleTimes(fixed, of, dense)

    def dense_seconds(self, steps: int) -> float:
        """A generation in which nothing is sparse or skipped."""
        return self.whole.other + steps * self.whole.step


def _kept_columns_share(
    config: SparsityConfig, layout: ModelLayout, layer: int, budget: float
) -> float:
    plan = SparsityPlan(
        config.override(
            {
                "attention.keep_fraction": budget,
                "layers": (),
                "schedule.first_dense_layers": 0,
            }
        ),
        layout,
    )
    return kept_columns(plan, layer) / layout.tokens

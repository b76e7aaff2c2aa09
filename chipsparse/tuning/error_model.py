"""How far a generation ends from the exact one, predicted from calibrations.

The squared error of the finished pictures is taken as a sum over layers and over the times between
two refreshes: errors of different origin are hardly correlated. At one step a layer contributes

    gain(step) * joint * passed(layer, step)^2 * error(layer, budget, refresh, age)^2

where ``error`` is the relative error of its output, ``passed`` the relative change of the
transformer's output for it, ``joint`` what all layers together change over the sum of what each
does alone, and ``gain`` the squared error of the pictures for a relative change of the output of
that step. What a layer has wrong grows from one step to the next in the same direction until its
caches are filled again, and is repeated by steps that are skipped: there the roots are summed. So
it is with the change of the output over steps that are skipped in a row. Between the steps that
were measured all logarithms are interpolated. What other correlations do to the sum is left to
verification, which moves the prediction.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chipsparse.cache_kinds import PARTS, Part
from chipsparse.plan import Action
from chipsparse.tuning.probes import BUDGETS

# A squared error below this counts as none.
FLOOR = 1e-16
# The square of an error that grows in proportion to its age grows as this power of it.
STEEPEST = 2.0

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class ScheduleErrors:
    """Squared error that a schedule brings.

    Attributes:
        fixed: of skipped steps, whatever the budgets.
        of: of each layer that can be sparse, by part and budget: ``[layers, budgets]``.
    """

    fixed: float
    of: dict[Part, Array]


class ErrorModel:
    """Squared errors of schedules and budgets, from recordings.

    Args:
        recordings: see `Recording`, as JSON values.
        gains: replays of one step each: ``step``, ``error`` (sparse or skip), ``change``, the
            relative change of its output, and ``squared_error`` of the pictures.
        steps: denoising steps.

    Attributes:
        layers: the layers that can be sparse, by part.
        gain: squared error of the pictures for a squared relative change at each step, by kind of
            error, ``[steps]``.
        joint: see above.
        passed: squared, ``[layers, steps]`` by part.
        error: squared, ``[layers, budgets, refresh steps, ages]`` by part.
    """

    def __init__(
        self,
        recordings: Sequence[Mapping[str, Any]],
        gains: Sequence[Mapping[str, Any]],
        steps: int,
    ) -> None:
        self.steps = steps
        errors = [entry for each in recordings for entry in each["errors"]]
        self.layers: dict[Part, list[int]] = {
            part: sorted({e["layer"] for e in errors if e["part"] == part}) for part in PARTS
        }
        self.error = {part: self._errors(part, errors) for part in PARTS}
        self.joint = _joint(recordings)
        disturbed = [entry for each in recordings for entry in each["disturbed"]]
        self.passed = {part: self._passed(part, disturbed) for part in PARTS}
        self.gain = {kind: self._gain(kind, gains) for kind in ("sparse", "skip")}
        self._skipped = self._skips([e for each in recordings for e in each["skipped"]])

    def of_schedule(self, actions: Sequence[Action]) -> ScheduleErrors:
        """The errors of a schedule, for all budgets at once."""
        carried = np.zeros(self.steps)  # roots of the gains of what sparse layers do at a step
        drifts = np.zeros(self.steps)  # roots of the errors of the skips behind a step
        computed = 0
        for step, action in enumerate(actions):
            if action is Action.SKIP:
                error = self.gain["skip"][step] * self._skip_error(step, step - computed)
                drifts[computed] += math.sqrt(error)
            else:
                computed = step
            if actions[computed] is Action.SPARSE:
                carried[computed] += math.sqrt(self.gain["sparse"][step])
        fixed = float(np.square(drifts).sum())
        of = {}
        for part in PARTS:
            drift: dict[int, Array] = defaultdict(lambda: np.zeros(1))
            for step, full in _last_full(actions, part):
                own = self.passed[part][:, step, None] * self.error[part][:, :, full, step - full]
                drift[full] = drift[full] + carried[step] * np.sqrt(own)
            total = np.zeros((len(self.layers[part]), len(BUDGETS[part])))
            of[part] = self.joint * sum((np.square(each) for each in drift.values()), total)
        return ScheduleErrors(fixed, of)

    def _skip_error(self, step: int, age: int) -> float:
        known = min(age, self._skipped.shape[1] - 1)
        return float(self._skipped[step, known] * (age / known) ** 2)

    # From measurements to tables.

    def _errors(self, part: Part, entries: Iterable[Mapping[str, Any]]) -> Array:
        measured: dict[tuple[int, int, int], list[Array]] = defaultdict(list)
        for entry in entries:
            if entry["part"] == part:
                place = entry["layer"], entry["anchor"], entry["age"]
                measured[place].append(np.square(entry["error"]))
        table = np.zeros((len(self.layers[part]), len(BUDGETS[part]), self.steps, self.steps))
        ages = np.log(np.arange(1, self.steps))
        for row, layer in enumerate(self.layers[part]):
            by_anchor: dict[int, Array] = {}
            for anchor in sorted({a for each, a, _ in measured if each == layer}):
                known = sorted(age for each, a, age in measured if (each, a) == (layer, anchor))
                values = np.stack([np.mean(measured[layer, anchor, age], 0) for age in known])
                by_anchor[anchor] = np.stack(
                    [_line(ages, np.log(known), np.log(v + FLOOR), STEEPEST) for v in values.T]
                )  # [budgets, ages]
            anchors = list(by_anchor)
            logs = np.stack([by_anchor[a] for a in anchors])
            for refresh in range(self.steps):
                table[row, :, refresh, 1:] = np.exp(_between(refresh, anchors, logs))
        return table

    def _passed(self, part: Part, entries: Iterable[Mapping[str, Any]]) -> Array:
        measured: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for entry in entries:
            if entry["part"] == part and entry["passed"] > 0:
                for layer in entry["layers"]:
                    factor = (entry["change"] / entry["passed"]) ** 2
                    measured[layer][entry["step"]].append(factor)
        return np.stack(
            [self._over_steps(measured[layer]) for layer in self.layers[part]]
            or [np.zeros(self.steps)]
        )[: len(self.layers[part])]

    def _gain(self, kind: str, gains: Iterable[Mapping[str, Any]]) -> Array:
        measured: dict[int, list[float]] = defaultdict(list)
        for entry in gains:
            if entry["error"] == kind and entry["change"] > 0:
                measured[entry["step"]].append(entry["squared_error"] / entry["change"] ** 2)
        return self._over_steps(measured)

    def _over_steps(self, measured: Mapping[int, Sequence[float]]) -> Array:
        """Geometric means at some steps, interpolated; nothing measured is no error at all."""
        if not measured:
            return np.zeros(self.steps)
        known = sorted(measured)
        logs = [float(np.mean(np.log(np.add(measured[step], FLOOR)))) for step in known]
        return np.exp(np.interp(np.arange(self.steps), known, logs))

    def _skips(self, entries: Sequence[Mapping[str, Any]]) -> Array:
        oldest = max(entry["age"] for entry in entries)
        measured: dict[tuple[int, int], list[float]] = defaultdict(list)
        for entry in entries:
            measured[entry["step"], entry["age"]].append(entry["change"] ** 2)
        table = np.zeros((self.steps, oldest + 1))
        for (step, age), values in measured.items():
            table[step, age] = np.mean(values)
        return table


def _last_full(actions: Sequence[Action], part: Part) -> list[tuple[int, int]]:
    """Each sparse step with the step whose caches it reads."""
    filling = {Action.REFRESH} if part == "attention" else {Action.REFRESH, Action.DENSE}
    last, pairs = 0, []
    for step, action in enumerate(actions):
        if action in filling:
            last = step
        elif action is Action.SPARSE:
            pairs.append((step, last))
    return pairs


def _joint(recordings: Sequence[Mapping[str, Any]]) -> float:
    """What all layers change together, over the sum of what they change alone, both squared."""
    logs = []
    for each in recordings:
        alone: dict[tuple[int, str], float] = defaultdict(float)
        for entry in each["disturbed"]:
            if entry["part"] != "all":
                alone[entry["step"], entry["branch"]] += entry["change"] ** 2
        for entry in each["disturbed"]:
            single = alone.get((entry["step"], entry["branch"]), 0.0)
            if entry["part"] == "all" and single > 0 and entry["change"] > 0:
                logs.append(math.log(entry["change"] ** 2 / single))
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def _line(at: Array, known: Array, values: Array, steepest: float) -> Array:
    """Linear interpolation that goes on behind the last known place as it went before it."""
    inside = np.interp(at, known, values)
    if len(known) < 2:
        return inside
    slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
    beyond = np.maximum(0.0, at - known[-1]) * min(steepest, max(0.0, slope))
    return inside + beyond


def _between(step: int, anchors: Sequence[int], logs: Array) -> Array:
    """Linear interpolation of ``[anchors, ...]`` between anchors, constant outside of them."""
    place = float(np.interp(step, anchors, np.arange(len(anchors))))
    lower = min(int(place), len(anchors) - 1)
    upper = min(lower + 1, len(anchors) - 1)
    return (1 - (place - lower)) * logs[lower] + (place - lower) * logs[upper]

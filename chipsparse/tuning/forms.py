"""What a search chooses from: forms of a schedule, each of any number of full steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chipsparse.config import ScheduleConfig, SparsityConfig
from chipsparse.schedule import Action, Schedule
from chipsparse.schedule_text import list_text
from chipsparse.step_lists import front_loaded
from chipsparse.tuning.jump_costs import Reuse, Trajectory, jump_costs
from chipsparse.tuning.step_search import best_lists

USUAL_GROWTH, USUAL_KEEP_FRACTION = 0.75, 0.2


@dataclass(frozen=True)
class Form:
    """A schedule but for the number of its full steps.

    Attributes:
        growth: its lists are searched, with errors that grow so; see `jump_costs`.
        front_load: or they are of this closed form; one of the two is given.
        reuse: what stands for the steps that are not full.
        keep_fraction: of the columns of sparse steps.
        sparse_mlp: whether the MLPs of sparse steps are sparse, too.
    """

    growth: float | None = USUAL_GROWTH
    front_load: float | None = None
    reuse: Reuse = Reuse()
    keep_fraction: float = USUAL_KEEP_FRACTION
    sparse_mlp: bool = False

    def config(self, base: SparsityConfig, full_steps: Sequence[int]) -> SparsityConfig:
        """The base with this schedule instead of its own, whatever form that has."""
        kept = {name: getattr(base.schedule, name) for name in ("first_dense_layers", "reselect")}
        schedule = dataclasses.replace(self.schedule(full_steps), **kept)
        return base.override(
            {
                "schedule": dataclasses.asdict(schedule),
                "attention.keep_fraction": self.keep_fraction,
                "mlp.enabled": self.sparse_mlp,
            }
        )

    def schedule(self, full_steps: Sequence[int]) -> ScheduleConfig:
        """The schedule with these full steps."""
        return ScheduleConfig(full_steps=tuple(full_steps), **vars(self.reuse))

    def describe(self, config: SparsityConfig, steps: int) -> str:
        """One line for people about one of its configs."""
        text = list_text(Schedule(config.schedule, steps), sparse=True)
        if self.reuse.between != "none":
            mlp = " and sparse MLPs" if self.sparse_mlp else ""
            text += f"; {self.keep_fraction:.0%} of the columns{mlp}"
        rule = (
            f"growth {self.growth:g}"
            if self.front_load is None
            else f"front_load {self.front_load:g}"
        )
        return f"{text} (list by {rule})"


class Lists:
    """The lists of full steps of every form, and what the calibration says they cost.

    Args:
        trajectories: one of each calibrating prompt, of the same number of steps.
    """

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        self.steps = trajectories[0].steps
        self._trajectories = trajectories
        self._costs: dict[tuple[Reuse, float], np.ndarray] = {}
        self._searched: dict[tuple[Reuse, float], dict[int, tuple[int, ...]]] = {}

    def full_steps(self, form: Form, count: int) -> tuple[int, ...]:
        """The list of so many full steps."""
        if form.front_load is not None:
            return front_loaded(self.steps, count, form.front_load)
        assert form.growth is not None
        key = form.reuse, form.growth
        if key not in self._searched:
            self._searched[key] = best_lists(self.costs(*key))
        return self._searched[key][count]

    def costs(self, reuse: Reuse, growth: float) -> np.ndarray:
        """Of all jumps, as of `jump_costs`; the mean over the prompts."""
        key = reuse, growth
        if key not in self._costs:
            found = [jump_costs(each, reuse, growth) for each in self._trajectories]
            self._costs[key] = np.mean(found, axis=0)
        return self._costs[key]


@dataclass(frozen=True)
class StepSeconds:
    """What the steps of this model take on this machine, all guidance branches together.

    Attributes:
        dense: a dense one.
        refresh: a refresh.
        sparse: a sparse one, by share of columns and whether MLPs are sparse.
        skipped: a skipped one.
        other: all but the steps: text, decoding.
    """

    dense: float
    refresh: float
    sparse: dict[tuple[float, bool], float]
    skipped: float
    other: float

    def generation(self, form: Form, full_steps: Sequence[int], steps: int) -> float:
        """Seconds of a generation of a form with these full steps."""
        sparse = self.sparse[form.keep_fraction, form.sparse_mlp]
        seconds = {
            Action.DENSE: self.dense,
            Action.REFRESH: self.refresh,
            Action.SPARSE: sparse,
            Action.SKIP: self.skipped,
        }
        schedule = Schedule(form.schedule(full_steps), steps)
        return self.other + sum(seconds[schedule.action(step)] for step in range(steps))

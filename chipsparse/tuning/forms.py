"""What a search chooses from: forms of a schedule, each of any number of full steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chipsparse.config import MLPConfig, ScheduleConfig, SparsityConfig
from chipsparse.schedule.schedule import Action, Schedule
from chipsparse.schedule.text import list_text
from chipsparse.tuning.jump_costs import Reuse, Trajectory, drift, jump_costs
from chipsparse.tuning.placed_steps import Placed, Steps
from chipsparse.tuning.step_search import best_lists

USUAL_GROWTH, USUAL_DENSITY = 1.0, 0.2


@dataclass(frozen=True)
class Form:
    """A schedule but for the number of its full steps.

    Attributes:
        growth: of errors in the search for its lists, see `jump_costs`.
        reuse: what stands for the steps that are not full.
        density: of the columns of sparse steps.
        sparse_mlp: whether the MLPs of sparse steps are sparse, too.
        sparse_error: sparse steps are placed one by one, taken to leave such an error behind; see
            `Placed`. None: where ``reuse`` says.
    """

    growth: float = USUAL_GROWTH
    reuse: Reuse = Reuse()
    density: float = USUAL_DENSITY
    sparse_mlp: bool = False
    sparse_error: float | None = None

    @property
    def is_sparse(self) -> bool:
        """Whether any step may be sparse."""
        return self.reuse.between != "none" or self.sparse_error is not None

    def config(self, base: SparsityConfig, steps: Steps) -> SparsityConfig:
        """The base with this schedule instead of its own, whatever form that has."""
        schedule = dataclasses.replace(
            self.schedule(steps), first_dense_layers=base.schedule.first_dense_layers
        )
        return with_sparse_mlp(base, self.sparse_mlp).override(
            {"schedule": dataclasses.asdict(schedule), "attention.density": self.density}
        )

    def schedule(self, steps: Steps) -> ScheduleConfig:
        """The schedule with these steps."""
        schedule = ScheduleConfig(full_steps=steps.full, **vars(self.reuse))
        if steps.sparse is None:
            return schedule
        return dataclasses.replace(schedule, between=steps.sparse)

    def describe(self, config: SparsityConfig, steps: int) -> str:
        """One line for people about one of its configs."""
        text = list_text(Schedule(config.schedule, steps), sparse=True)
        if self.is_sparse:
            mlp = " and sparse MLPs" if self.sparse_mlp else ""
            text += f"; {self.density:.0%} of the columns{mlp}"
        return f"{text} (list by growth {self.growth:g})"


def with_sparse_mlp(config: SparsityConfig, sparse: bool) -> SparsityConfig:
    """Return the config with dense MLPs, or with sparse ones of its own or the usual density."""
    if sparse == config.mlp.is_sparse:
        return config
    return config.override({"mlp.density": MLPConfig().density if sparse else "dense"})


class Lists:
    """The steps of every form, and what the calibration says they cost.

    Args:
        trajectories: one of each calibrating prompt, of the same number of steps.
        seconds: what steps take.
    """

    def __init__(self, trajectories: Sequence[Trajectory], seconds: ActionSeconds) -> None:
        self._steps = trajectories[0].steps
        self._seconds = seconds
        self._trajectories = trajectories
        self._costs: dict[tuple[Reuse, float], np.ndarray] = {}
        self._searched: dict[tuple[Reuse, float], dict[int, tuple[int, ...]]] = {}
        self._placed: dict[Form, Placed] = {}

    def steps(self, form: Form, count: float) -> Steps:
        """Those with so many full steps; where sparse ones are placed, in the time of so many."""
        if form.sparse_error is not None:
            return self._place(form, form.sparse_error).steps(count)
        key = form.reuse, form.growth
        if key not in self._searched:
            self._searched[key] = best_lists(self.costs(*key))
        return Steps(self._searched[key][max(1, int(count))])

    def _place(self, form: Form, error: float) -> Placed:
        if form not in self._placed:
            seconds = self._seconds
            self._placed[form] = Placed(
                self._trajectories,
                form.reuse,
                form.growth,
                error=error,
                refresh=seconds.refresh / seconds.dense,
                sparse=seconds.sparse[form.density, form.sparse_mlp] / seconds.dense,
            )
        return self._placed[form]

    def drift(self, form: Form, count: float) -> float:
        """How far those of `steps` lead astray, as of `drift`; the mean over the prompts."""
        schedule = Schedule(form.schedule(self.steps(form, count)), self._steps)
        steps = range(self._steps)
        computed = [step for step in steps if schedule.action(step) is not Action.SKIP]
        found = [drift(each, form.reuse, form.growth, computed) for each in self._trajectories]
        return float(np.mean(found))

    def costs(self, reuse: Reuse, growth: float) -> np.ndarray:
        """Of all jumps, as of `jump_costs`; the mean over the prompts."""
        key = reuse, growth
        if key not in self._costs:
            found = [jump_costs(each, reuse, growth) for each in self._trajectories]
            self._costs[key] = np.mean(found, axis=0)
        return self._costs[key]


@dataclass(frozen=True)
class ActionSeconds:
    """What the steps of this model take on this machine, all guidance branches together.

    Attributes:
        dense: a dense one.
        refresh: a refresh.
        sparse: a sparse one, by share of columns and whether MLPs are sparse.
        skipped: a skipped one.
        other: all but the steps: text, decoding.
        measuring: what it took to time them, beside the dense generations.
    """

    dense: float
    refresh: float
    sparse: dict[tuple[float, bool], float]
    skipped: float
    other: float
    measuring: float = 0.0

    def generation(self, form: Form, computed: Steps, steps: int) -> float:
        """Seconds of a generation of a form in which these of so many steps are computed."""
        sparse = self.sparse[form.density, form.sparse_mlp]
        seconds = {
            Action.DENSE: self.dense,
            Action.REFRESH: self.refresh,
            Action.SPARSE: sparse,
            Action.SKIP: self.skipped,
        }
        schedule = Schedule(form.schedule(computed), steps)
        return self.other + sum(seconds[schedule.action(step)] for step in range(steps))

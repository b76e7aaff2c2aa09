"""The schedules to choose from: forms, each of any number of full steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from chipsparse.config import Between, MLPConfig, ScheduleConfig, SparsityConfig
from chipsparse.schedule.schedule import Action, Schedule
from chipsparse.schedule.text import list_text
from chipsparse.tuning.jump_costs import Reuse, Trajectory, best_lists, drift, jump_costs
from chipsparse.tuning.placed_steps import Placed, Steps

USUAL_DENSITY = 0.2
# The likeliest first: where there is no time for all, the last ones are left out.
GROWTHS = (1.0, 2.0)
DENSITIES = (0.2, 0.1, 0.3)
# Shares, each with the places from which on it begins.
FORECASTS = [
    (share, after)
    for share in (0.5, 0.75, 0.0, 0.25, 1.0)
    for after in ((0.0, 0.25, 0.5) if share else (0.0,))
]
SPARSE_ERRORS = (0.3, 0.1, 0.6)


@dataclass(frozen=True)
class Form:
    """A schedule but for the number of its full steps.

    Attributes:
        growth: of errors in the search for its lists, see `jump_costs`.
        reuse: the outputs of skipped steps.
        density: of the columns of sparse steps.
        sparse_mlp: whether the MLPs of sparse steps are sparse, too.
        sparse_error: the error that a sparse step leaves behind, by which sparse steps are placed;
            see `Placed`. None: nothing is sparse.
    """

    growth: float = GROWTHS[0]
    reuse: Reuse = Reuse()
    density: float = USUAL_DENSITY
    sparse_mlp: bool = False
    sparse_error: float | None = None

    @property
    def is_sparse(self) -> bool:
        """Whether any step may be sparse."""
        return self.sparse_error is not None

    def config(self, base: SparsityConfig, steps: Steps) -> SparsityConfig:
        """The base with this schedule instead of its own, whatever form that has."""
        layers = base.schedule.first_dense_layers
        schedule = replace(self.schedule(steps), first_dense_layers=layers)
        return with_sparse_mlp(base, self.sparse_mlp).override(
            {"schedule": dataclasses.asdict(schedule), "attention.density": self.density}
        )

    def schedule(self, steps: Steps) -> ScheduleConfig:
        """The schedule with these steps."""
        between: Between | tuple[int, ...] = "none" if steps.sparse is None else steps.sparse
        return ScheduleConfig(full_steps=steps.full, between=between, **vars(self.reuse))

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


@dataclass(frozen=True)
class ActionSeconds:
    """The times of this model's steps on this machine, all guidance branches together.

    Attributes:
        dense: a dense one.
        refresh: a refresh.
        sparse: a sparse one, by share of columns and whether MLPs are sparse.
        skipped: a skipped one.
        other: all but the steps: text, decoding.
        measuring: the time of measuring them, beside the dense generations.
    """

    dense: float
    refresh: float
    sparse: dict[tuple[float, bool], float]
    skipped: float
    other: float
    measuring: float = 0.0

    def generation(self, form: Form, computed: Steps, steps: int) -> float:
        """Seconds of a generation of a form in which these of so many steps are computed."""
        seconds = {
            Action.DENSE: self.dense,
            Action.REFRESH: self.refresh,
            Action.SPARSE: self.sparse[form.density, form.sparse_mlp],
            Action.SKIP: self.skipped,
        }
        schedule = Schedule(form.schedule(computed), steps)
        return self.other + sum(seconds[schedule.action(step)] for step in range(steps))


class Lists:
    """The steps of every form, and their costs by the calibration.

    Args:
        trajectories: one of each calibrating prompt, of the same number of steps.
        seconds: the times of steps.
    """

    def __init__(self, trajectories: Sequence[Trajectory], seconds: ActionSeconds) -> None:
        self._seconds, self._trajectories = seconds, trajectories
        self._lists: dict[tuple[Reuse, float], dict[int, tuple[int, ...]]] = {}
        self._placed: dict[Form, Placed] = {}

    def steps(self, form: Form, count: float) -> Steps:
        """The steps with so many full ones, or in the time of so many where some are sparse."""
        key, seconds = (form.reuse, form.growth), self._seconds
        if form.sparse_error is None:
            if key not in self._lists:
                costs = [jump_costs(trajectory, *key) for trajectory in self._trajectories]
                self._lists[key] = best_lists(np.mean(costs, axis=0))
            return Steps(self._lists[key][max(1, int(count))])
        if form not in self._placed:
            self._placed[form] = Placed(
                self._trajectories,
                *key,
                error=form.sparse_error,
                refresh=seconds.refresh / seconds.dense,
                sparse=seconds.sparse[form.density, form.sparse_mlp] / seconds.dense,
            )
        return self._placed[form].steps(count)

    # Rivals, one choice after the other. The calibration foretells the best forecast; the rest is
    # for generations to tell.

    def first(self, count: int, *, correct: bool = True) -> Form:
        """The form whose forecast drifts least, with so many full steps and nothing sparse."""

        def drift_of(form: Form) -> float:
            full = self.steps(form, count).full
            drifts = [drift(each, form.reuse, form.growth, full) for each in self._trajectories]
            return float(np.mean(drifts))

        forms = [Form(reuse=Reuse(share, after, correct)) for share, after in FORECASTS]
        return min(forms, key=drift_of)

    def of_skips(self, form: Form, count: int) -> Iterator[Form]:
        """Other lists of full steps, and skipped steps that are not corrected."""
        for growth in GROWTHS:
            yield replace(self.first(count), growth=growth)
        yield self.first(count, correct=False)

    def of_sparse_steps(self, form: Form, count: int) -> Iterator[Form]:
        """Sparse steps of other shares of columns, placed by other errors."""
        for density in DENSITIES:
            yield replace(form, sparse_error=SPARSE_ERRORS[0], density=density)
        for error in SPARSE_ERRORS[1:]:
            yield replace(form, sparse_error=error)

    def of_sparse_mlps(self, form: Form, count: int) -> Iterator[Form]:
        """Sparse MLPs, where sparse steps are faster so."""
        seconds = self._seconds.sparse
        fast = seconds.get((form.density, True))
        if form.is_sparse and fast is not None and fast < seconds[form.density, False]:
            yield replace(form, sparse_mlp=True)

"""The schedules to choose from: forms, each of any number of full steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from chipsparse.config import MLPConfig, ScheduleConfig, SparsityConfig
from chipsparse.schedule.schedule import Action, Schedule, list_text
from chipsparse.tuning.jump_costs import Reuse, Trajectory, drift
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
LEAST_FULL_STEPS = 2


@dataclass(frozen=True)
class Form:
    """A schedule but for the number of its full steps."""

    growth: float = GROWTHS[0]  # of errors in the search for its lists, see `Trajectory.weights`
    reuse: Reuse = Reuse()
    density: float = USUAL_DENSITY  # of the columns of sparse steps
    sparse_mlp: bool = False  # True where the MLPs of sparse steps are sparse, too
    # The error that a sparse step leaves behind, see `Placed`; None: nothing is sparse.
    sparse_error: float | None = None

    def config(self, base: SparsityConfig, steps: Steps) -> SparsityConfig:
        """Return the base with this schedule instead of its own, whatever form that has."""
        schedule = ScheduleConfig(
            full_steps=steps.full,
            sparse_steps=steps.sparse or 0.0,
            first_dense_layers=base.schedule.first_dense_layers,
            **vars(self.reuse),
        )
        return with_sparse_mlp(base, self.sparse_mlp).override(
            {"schedule": dataclasses.asdict(schedule), "attention.density": self.density}
        )


def with_sparse_mlp(config: SparsityConfig, sparse: bool) -> SparsityConfig:
    """Return the config with dense MLPs, or with sparse ones of its own or the usual density."""
    if sparse == config.mlp.is_sparse:
        return config
    return config.override({"mlp.density": MLPConfig().density if sparse else "dense"})


@dataclass(frozen=True)
class Candidate:
    """A form with a number of full steps."""

    form: Form  # without sparse steps where none pays
    config: SparsityConfig  # of the generation
    steps: int  # the number of all denoising steps

    @cached_property
    def schedule(self) -> Schedule:
        return Schedule(self.config.schedule, self.steps)

    @property
    def describe(self) -> str:
        text = list_text(self.schedule, sparse=True)
        if self.form.sparse_error is not None:
            mlp = " and sparse MLPs" if self.form.sparse_mlp else ""
            text += f"; {self.form.density:.0%} of the columns{mlp}"
        return f"{text} (list by growth {self.form.growth:g})"


@dataclass(frozen=True)
class ActionSeconds:
    """The times of this model's steps on this machine, all guidance branches together."""

    dense: float
    refresh: float
    sparse: dict[tuple[float, bool], float]  # by density, and by True where MLPs are sparse
    skipped: float
    other: float  # of all but the steps: text, decoding
    measuring: float = 0.0  # of measuring these times, beside the dense generations

    def generation(self, candidate: Candidate) -> float:
        seconds = {
            Action.DENSE: self.dense,
            Action.REFRESH: self.refresh,
            Action.SPARSE: self.sparse[candidate.form.density, candidate.form.sparse_mlp],
            Action.SKIP: self.skipped,
        }
        return self.other + sum(seconds[action] for action in candidate.schedule.actions)


@dataclass
class Forms:
    """The candidates of every form, and the rivals of a form, by the calibration."""

    base: SparsityConfig  # what all candidates have in common, but for the schedule
    trajectories: Sequence[Trajectory]  # one of each calibrating prompt, all equally long
    seconds: ActionSeconds
    _placed: dict[Form, Placed] = field(default_factory=dict, init=False)

    def candidate(self, form: Form, count: float) -> Candidate:
        """Return the best with so many full steps, or of their time where some are sparse."""
        if form not in self._placed:
            seconds = self.seconds
            self._placed[form] = Placed(
                self.trajectories,
                form.reuse,
                form.growth,
                error=form.sparse_error,
                refresh=seconds.refresh / seconds.dense,
                sparse=seconds.sparse[form.density, form.sparse_mlp] / seconds.dense,
            )
        steps = self._placed[form].steps(count)
        if not steps.sparse:
            form = Form(form.growth, form.reuse)
        return Candidate(form, form.config(self.base, steps), self.trajectories[0].steps)

    # Rivals, one choice after the other. The calibration foretells the best forecast; the rest is
    # for generations to tell.

    def first(self, count: int, *, correct: bool = True) -> Form:
        """Return the form whose forecast drifts least, with so many full steps, none sparse."""

        def drift_of(form: Form) -> float:
            full = self.candidate(form, count).config.schedule.full_steps or ()
            drifts = [drift(one, form.reuse, form.growth, full) for one in self.trajectories]
            return float(np.mean(drifts))

        forms = [Form(reuse=Reuse(share, after, correct)) for share, after in FORECASTS]
        return min(forms, key=drift_of)

    def of_skips(self, form: Form, count: int) -> list[Form]:
        """Return other lists of full steps, and skipped steps that are not corrected."""
        grown = [replace(self.first(count), growth=growth) for growth in GROWTHS]
        return [*grown, self.first(count, correct=False)]

    def of_sparse_steps(self, form: Form, count: int) -> list[Form]:
        """Return sparse steps of other shares of columns, and placed by other errors."""
        usual, *errors = SPARSE_ERRORS
        return [
            *(replace(form, sparse_error=usual, density=density) for density in DENSITIES),
            *(replace(form, sparse_error=error) for error in errors),
        ]

    def of_sparse_mlps(self, form: Form, count: int) -> list[Form]:
        """Return sparse MLPs, where sparse steps are faster so."""
        seconds = self.seconds.sparse
        fast = seconds.get((form.density, True))
        if form.sparse_error is None or fast is None or fast >= seconds[form.density, False]:
            return []
        return [replace(form, sparse_mlp=True)]

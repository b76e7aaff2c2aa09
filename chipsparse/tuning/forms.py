"""The schedules to choose from: forms, each of any number of full steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from chipsparse.config import Action, Listed, ScheduleConfig, SparsityConfig
from chipsparse.skip.spread import SHORT_RUN, halved, short_list, spread
from chipsparse.skip.timetable import Run, Schedule
from chipsparse.skip.why import schedule_text
from chipsparse.tuning.jump_costs import Placed, Reuse, Trajectory, drift

# The likeliest first: where there is no time for all, the last ones are left out.
GROWTHS = (1.0, 2.0)
DENSITIES = (0.1, 0.2, 0.3)
# Sparse steps for each full one: as in the named qualities, more of them, and fewer. The last
# ratio is for slower schedules, where few may pay.
SPARSE_PER_FULL = (1.4, 2.2, 0.7)
FORECAST_BESIDE_SPARSE = Reuse(0.5, 0.2)
# Shares, each with the places from which on it begins.
FORECASTS = [
    (share, after)
    for share in (0.5, 0.75, 0.0, 0.25, 1.0)
    for after in ((0.0, 0.25, 0.5) if share else (0.0,))
]
LEAST_FULL_STEPS = 2
SPARSE_MLP = 0.3  # share of the neurons, where a config has none of its own


@dataclass(frozen=True)
class Form:
    """A schedule but for the number of its full steps."""

    growth: float = GROWTHS[0]  # of errors in the search for its lists, see `Trajectory.weights`
    reuse: Reuse = Reuse()
    density: float = DENSITIES[0]  # of the columns of sparse steps
    sparse_mlp: bool = False  # True where the MLPs of sparse steps are sparse, too
    sparse_per_full: float = 0.0  # sparse steps for each full one; 0: nothing is sparse

    def config(self, base: SparsityConfig, full: tuple[int, ...], steps: int) -> SparsityConfig:
        """Return the base with this schedule instead of its own, whatever form that has."""
        count = min(round(self.sparse_per_full * len(full)), steps - len(full))
        sparse = tuple(halved(full, steps, count))
        schedule = ScheduleConfig(Listed(full, sparse), **vars(self.reuse))
        return with_sparse_mlp(base, self.sparse_mlp).override(
            {"schedule": schedule, "attention.density": self.density},
        )


def with_sparse_mlp(config: SparsityConfig, sparse: bool) -> SparsityConfig:
    """Return the config with dense MLPs, or with sparse ones of its own or the usual density."""
    if sparse == config.mlp.is_sparse:
        return config
    return config.override({"mlp.density": SPARSE_MLP if sparse else "dense"})


@dataclass(frozen=True)
class Candidate:
    """A form with a number of full steps."""

    form: Form
    config: SparsityConfig  # of the generation
    steps: int  # the number of all denoising steps

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of all steps."""
        return Schedule(self.config.schedule, Run(self.steps))

    @property
    def describe(self) -> str:
        """The candidate in words."""
        text = schedule_text(self.schedule, sparse=True, corrects=True)
        if not self.form.sparse_per_full:
            return f"{text} (list by growth {self.form.growth:g})"
        mlp = " and sparse MLPs" if self.form.sparse_mlp else ""
        return f"{text}; {self.form.density:.0%} of the columns{mlp}"


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
        """Return the expected seconds of a whole generation with a candidate."""
        seconds = {
            Action.DENSE: self.dense,
            Action.REFRESH: self.refresh,
            Action.SPARSE: self.sparse[candidate.form.density, candidate.form.sparse_mlp],
            Action.SKIP: self.skipped,
        }
        return self.other + sum(seconds[action] for action in candidate.schedule.actions())


@dataclass
class Forms:
    """The candidates of every form, and the rivals of a form, by the calibration."""

    base: SparsityConfig  # what all candidates have in common, but for the schedule
    trajectories: Sequence[Trajectory]  # one of each calibrating prompt, all equally long
    seconds: ActionSeconds
    _placed: dict[Form, Placed] = field(default_factory=dict, init=False)

    def candidate(self, form: Form, count: int) -> Candidate:
        """Return the form with so many full steps.

        A calibrated list costs least where nothing is sparse; else the list is a named quality's.
        """
        steps = self.trajectories[0].steps
        if not form.sparse_per_full:
            if form not in self._placed:
                self._placed[form] = Placed(self.trajectories, form.reuse, form.growth)
            full = self._placed[form].steps(count)
        elif steps <= SHORT_RUN and 2 * count <= steps + 1:
            full = short_list(steps, count)
        else:
            full = spread(steps, count, among_sparse=True)
        return Candidate(form, form.config(self.base, full, steps), steps)

    # Rivals, one choice after the other. The calibration foretells the best forecast; the rest is
    # for generations to tell.

    def first(self, count: int, *, correct: bool = True) -> Form:
        """Return the form whose forecast drifts least, with so many full steps, none sparse."""

        def drift_of(form: Form) -> float:
            full = self.candidate(form, count).schedule.full_steps()
            drifts = [drift(one, form.reuse, form.growth, full) for one in self.trajectories]
            return float(np.mean(drifts))

        forms = [Form(reuse=Reuse(share, after, correct)) for share, after in FORECASTS]
        return min(forms, key=drift_of)

    def of_skips(self, form: Form, count: int) -> list[Form]:
        """Return other lists of full steps, and skipped steps that are not corrected."""
        grown = [replace(self.first(count), growth=growth) for growth in GROWTHS]
        return [*grown, self.first(count, correct=False)]

    def of_sparse_steps(self, form: Form, count: int) -> list[Form]:
        """Return forms with more or fewer sparse steps or columns, where such steps are faster."""
        usual = SPARSE_PER_FULL[0]
        pairs = [(ratio, DENSITIES[0]) for ratio in SPARSE_PER_FULL]
        pairs += [(usual, density) for density in DENSITIES[1:]]
        return [
            Form(reuse=FORECAST_BESIDE_SPARSE, sparse_per_full=ratio, density=density)
            for ratio, density in pairs
            if self.seconds.sparse[density, False] < self.seconds.dense
        ]

    def of_sparse_mlps(self, form: Form, count: int) -> list[Form]:
        """Return sparse MLPs, where sparse steps are faster so."""
        seconds = self.seconds.sparse
        fast = seconds.get((form.density, True))
        if not form.sparse_per_full or fast is None or fast >= seconds[form.density, False]:
            return []
        return [replace(form, sparse_mlp=True)]

"""Which action the schedule gives each denoising step. Pure, printable, comparable."""

from __future__ import annotations

import enum
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from chipsparse.config import Between, ScheduleConfig
from chipsparse.schedule.step_lists import full_count, sparse_between, spread

# As many steps as stand for a number that is not known.
MANY_STEPS = 1000
# Fewer make larger jumps than any share of full steps was made for, unless half of them are full.
FEW_STEPS = 16
# Above a flow shift, the share of steps in full from which correction gains where all others are
# skipped: below, it lost 0.5 to 2 dB on tiny-wan (benchmarks/notes/schedules.md).
LEAST_CORRECTED = ((5.5, 0.28), (4.0, 0.2))
NO_SHARE = (
    "schedule.full_share needs the number of steps, which the pipeline does not tell: all "
    "steps are computed in full"
)
NO_MIDDLE = (
    "the pipeline does not tell the number of steps: behind the last of schedule.full_steps every "
    "other step is sparse, because there is no middle"
)


class Action(str, enum.Enum):
    """What one layer computes at one step.

    DENSE records the LSE, REFRESH also chooses columns and fills the caches, SPARSE
    computes only the kept columns and neurons, SKIP makes its output of those before.
    """

    DENSE = "dense"
    REFRESH = "refresh"
    SPARSE = "sparse"
    SKIP = "skip"

    __str__ = str.__str__


@dataclass(frozen=True)
class Schedule:
    """What a schedule's config means for a number of steps.

    Attributes:
        config: what the user asked for.
        steps: number of denoising steps, or None where the pipeline does not say.
        first: the first of them that runs, as where an image is what it starts from.
        corrects: whether skipped steps are put right, where the config wants it.
    """

    config: ScheduleConfig
    steps: int | None
    first: int = 0
    corrects: bool = True

    @property
    def run(self) -> int | None:
        """The number of steps that run."""
        return None if self.steps is None else self.steps - self.first

    @cached_property
    def full_steps(self) -> tuple[int, ...] | None:
        """The steps that are listed to be computed in full, the first one among them.

        None where none are listed: the schedule has the published form, or gives a share of a
        number of steps that is not known.
        """
        config, steps, run = self.config, self.steps, self.run
        if not config.lists_full:
            return None
        if config.full_steps is not None:
            reached = (step for step in config.full_steps if steps is None or step < steps)
            return tuple(sorted({self.first, *(step for step in reached if step > self.first)}))
        if run is None:
            return None
        assert config.full_share is not None
        count = full_count(run, config.full_share, config.least_full)
        return tuple(self.first + step for step in spread(run, count))

    @property
    def known_steps(self) -> range:
        """The steps, or many of them."""
        return range(self.first, MANY_STEPS if self.steps is None else self.steps)

    def action(self, step: int) -> Action:
        """Return the action of a step, from 0."""
        config = self.config
        if config.actions:
            return Action(config.actions[min(step, len(config.actions) - 1)])
        if self.full_steps is not None:
            return self._listed_action(step, self.full_steps)
        if config.lists_full:  # a share of a number that is not known
            return Action.DENSE
        since_warmup = step - (config.warmup_steps - 1)
        end = MANY_STEPS if self.steps is None else self.steps - config.warmup_steps // 3
        if since_warmup < 0 or step >= end:
            return Action.DENSE
        return Action.SPARSE if since_warmup % config.refresh_every else Action.REFRESH

    def _listed_action(self, step: int, full_steps: tuple[int, ...]) -> Action:
        following = bisect_right(full_steps, step)
        full, between = full_steps[following - 1], self.config.between
        if following < len(full_steps):
            end = full_steps[following]
        elif self.steps is not None:
            end = self.steps
        else:
            end = sys.maxsize
            between = "every_other" if between == "middle" else between
        sparse = self._sparse_between(full, end, between)
        if step == full:
            return Action.REFRESH if sparse and step > self.first else Action.DENSE
        return Action.SPARSE if step in sparse else Action.SKIP

    def _sparse_between(
        self, full: int, end: int, between: Between | tuple[int, ...]
    ) -> Sequence[int]:
        if isinstance(between, str):
            return sparse_between(full, end, between)
        return [step for step in between if full < step < end]

    @cached_property
    def skips_any(self) -> bool:
        """Whether any step is skipped."""
        listed = self.config.actions or self.full_steps is not None
        return bool(listed) and any(self.action(step) is Action.SKIP for step in self.known_steps)

    def forecast_share(self, step: int) -> float:
        """The share of a forecast in the output of a step, if it is skipped; 0: it is held."""
        after = self.config.forecast_after
        begun = after == 0 if self.run is None else step - self.first >= after * self.run
        return self.config.forecast if begun else 0.0

    @property
    def forecasts_any(self) -> bool:
        """Whether skipped outputs may be forecast."""
        return self.skips_any and any(map(self.forecast_share, self.known_steps))

    def why_not_corrected(self, shift: float) -> str | None:
        """Why correction would lose at a flow shift: gaps of skipped steps alone are too long."""
        actions = [self.action(step) for step in self.known_steps] if self.run else []
        computed = len(actions) - actions.count(Action.SKIP)
        least = next((share for above, share in LEAST_CORRECTED if shift > above), 0.0)
        if Action.SPARSE in actions or computed >= least * len(actions):
            return None
        return (
            f"only {computed} of {len(actions)} steps are computed, too few of them for a flow "
            "shift that is so large"
        )

    def notes(self) -> list[str]:
        """What of it cannot be done with this number of steps, a sentence each."""
        if not self.config.lists_full:
            return []
        config, steps = self.config, self.steps
        if steps is None:
            if config.full_share is not None:
                return [NO_SHARE]
            no_middle = config.between == "middle"
            return [NO_MIDDLE] if no_middle else []
        run = steps - self.first
        if config.full_share is not None and run < FEW_STEPS:
            assert self.full_steps is not None
            count = len(self.full_steps)
            if 2 * count >= run:
                return []
            return [
                f"full_share {config.full_share:g} of only {run} steps lists {count} of them: "
                "such shares are made for some 50 steps; list more with full_steps, a larger "
                "full_share or least_full"
            ]
        return []

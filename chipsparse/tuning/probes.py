"""What a calibration looks at: a few steps, ages and budgets that stand for all of them."""

from __future__ import annotations

from dataclasses import dataclass

from chipsparse.cache_kinds import Part

BUDGETS: dict[Part, tuple[float, ...]] = {
    "attention": (0.02, 0.05, 0.1, 0.2, 0.3, 0.5),
    "mlp": (0.05, 0.1, 0.2, 0.3, 0.5),
}
AGES = (1, 2, 4, 8, 16)
ANCHORS = 5
DISTURBED_STEPS = 4
SKIP_AGES = (1, 2, 3, 4)
SAMPLED_GROUPS = 4
HEAD_GROUPS = 4
LAYER_GROUPS = 12
# What it takes beside a dense step, about and in such steps, to choose and to measure at one.
PROBE_COST = 4.0
EARLY = 0.1  # share of the steps behind which the first skip is looked at


@dataclass(frozen=True)
class ProbeSteps:
    """Steps at which a calibration of so many denoising steps measures.

    Attributes:
        steps: of the generation.
        anchors: where columns are chosen and caches filled.
        ages: how many steps after an anchor its errors are measured.
        disturbed: where the errors of layers are passed on, to see what becomes of them.
    """

    steps: int
    anchors: tuple[int, ...]
    ages: tuple[int, ...]
    disturbed: tuple[int, ...]

    @classmethod
    def spread(cls, steps: int) -> ProbeSteps:
        """Evenly spread over a generation.

        Raises:
            ValueError: if it has fewer than four steps: a dense one, a refresh, and two to reuse.
        """
        if steps < 4:
            raise ValueError(f"tuning needs at least 4 denoising steps, got {steps}")
        last = max(1, steps - 3)  # so that what goes wrong behind it has a step to show
        count = min(ANCHORS, last)
        anchors = _spread(1, last, count)
        ages = tuple(age for age in AGES if anchors[0] + age < steps)
        gaps = [later - a for a, later in zip(anchors, (*anchors[1:], steps - 1), strict=True)]
        # Behind an anchor, where its caches have aged, but before the next one takes its place.
        behind = [
            a + max(age for age in ages if age == 1 or age < min(gap, 5))
            for a, gap in zip(anchors, gaps, strict=True)
        ]
        chosen = _spread(0, count - 1, min(DISTURBED_STEPS, count))
        return cls(steps, anchors, ages, tuple(sorted({behind[i] for i in chosen})))

    @property
    def skipped(self) -> tuple[int, ...]:
        """Where a step is skipped, to see what becomes of that.

        Early steps lay the picture out, and behind the last one is nothing: to skip them may cost a
        hundred times more or less than to skip a step between.
        """
        early = max(2, round(EARLY * self.steps))
        first = (early,) if early < self.disturbed[0] else ()
        return (*self.disturbed, self.steps - 1, *first)

    def alive(self, step: int) -> list[int]:
        """Anchors whose caches age at a step."""
        return [a for a in self.anchors if 0 < step - a <= self.ages[-1]]

    def measured(self, step: int) -> list[int]:
        """Anchors whose errors are measured at a step: at the right age, or to be passed on."""
        return [a for a in self.alive(step) if step - a in self.ages]

    def single(self, turn: int, turns: int) -> tuple[int, ...]:
        """Of the disturbed steps those where single layers are, in one of several calibrations."""
        return self.disturbed[turn % len(self.disturbed) :: turns]

    def step_costs(self, turn: int, turns: int) -> list[float]:
        """What every step of one of several calibrations takes, about, in dense steps."""
        single = self.single(turn, turns)
        return [
            1.0
            + (PROBE_COST if step in self.anchors or self.alive(step) else 0.0)
            + (step in self.disturbed)
            + (len(BUDGETS) * LAYER_GROUPS if step in single else 0)
            for step in range(self.steps)
        ]

    def latest(self, step: int) -> int | None:
        """The anchor whose errors are passed on at a step."""
        return max(self.alive(step), default=None)


def _spread(first: int, last: int, count: int) -> tuple[int, ...]:
    """So many whole numbers from first to last, evenly."""
    if count == 1:
        return (first,)
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))

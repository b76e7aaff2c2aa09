"""How far a command of many generations is: one clock for all of it, with the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from chipsparse.cli.progress import PLAIN_LINES_PER_GENERATION, ProgressDisplay, StepDisplay
from chipsparse.cli.progress import clock_text as elapsed_text


@dataclass
class _Work:
    """What is going on.

    Attributes:
        kind: of work; one kind has one rate.
        cost: in dense generations.
        start: when it began, in seconds of the clock.
        step_costs: what its denoising steps take, relative to each other; none: all the same.
        steps_total: how many there are in the generations that were begun.
        steps: how many of them are done, and
        stepped: when the last one was.
    """

    kind: str
    cost: float
    start: float
    step_costs: Sequence[float] = ()
    steps_total: int = 0
    steps: int = 0
    stepped: float = 0.0

    @property
    def done(self) -> float:
        """What is done of its cost."""
        costs = self.step_costs or [1.0] * self.steps_total
        return self.cost * sum(costs[: self.steps]) / sum(costs) if self.steps else 0.0


class WorkProgress:
    """Knows what is planned, and how long such things took so far.

    The kind of a work is its name up to the first comma. Until a kind was measured, the rate of the
    one that was measured last stands for it.
    """

    def __init__(
        self, display: ProgressDisplay, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.display = display
        self._clock = clock
        self._start = clock()
        self._planned: dict[str, float] = {}
        self._rates: dict[str, tuple[float, float]] = {}  # cost and seconds, the latest kind last
        self._open: _Work | None = None

    def plan(self, work: Mapping[str, float]) -> None:
        """Replaces what is planned: names with what each takes, in dense generations."""
        self._planned = dict(work)

    @contextmanager
    def working(self, name: str, *, step_costs: Sequence[float] = ()) -> Iterator[None]:
        """While something is measured; what was not planned is taken to be there already.

        Args:
            step_costs: what each denoising step of its generations takes, in any unit; none: all
                the same.
        """
        cost = self._planned.pop(name, None)
        if cost is None:
            yield
            return
        work = _Work(name.partition(",")[0], cost, self._clock(), step_costs)
        self._open = work
        try:
            yield
        finally:
            self._open = None
        self._rates = self._rates_with(work.kind, work.cost, self._clock() - work.start)

    def seconds_left(self) -> float | None:
        """An estimate; None before anything was measured."""
        rates, left, work = self._rates, 0.0, self._open
        if work is not None:
            if work.done:
                rates = self._rates_with(work.kind, work.done, work.stepped - work.start)
            left += (work.cost - work.done) * _rate(rates, work.kind)
        if not rates:
            return None
        return left + sum(
            cost * _rate(rates, name.partition(",")[0]) for name, cost in self._planned.items()
        )

    def _rates_with(self, kind: str, cost: float, seconds: float) -> dict[str, tuple[float, float]]:
        others = {name: rate for name, rate in self._rates.items() if name != kind}
        before = self._rates.get(kind, (0.0, 0.0))
        return {**others, kind: (before[0] + cost, before[1] + seconds)}

    def clock_text(self) -> str:
        """The time that went by and what is left."""
        return elapsed_text(self._clock() - self._start, self.seconds_left())

    def denoising(
        self, title: str, steps: int, *, plain_lines: int = PLAIN_LINES_PER_GENERATION
    ) -> AbstractContextManager[StepDisplay]:
        """Shows a generation."""
        work = self._open
        before = 0 if work is None else work.steps_total
        if work is not None:
            work.steps_total += steps

        def clock(steps_done: int) -> str:
            if work is not None and before + steps_done > work.steps:
                work.stepped, work.steps = self._clock(), before + steps_done
            return self.clock_text()

        return self.display.denoising(title, steps, plain_lines=plain_lines, clock=clock)

    def stage(self, text: str) -> AbstractContextManager[None]:
        """Shows something else."""
        return self.display.stage(text, clock=lambda _: self.clock_text())

    def tell(self, text: str) -> None:
        """Shows a line that stays."""
        self.display.tell(text)

    def check(self) -> None:
        """Raises where the display wants the work to stop."""
        self.display.check()


def _rate(rates: Mapping[str, tuple[float, float]], kind: str) -> float:
    """Seconds of a dense generation, of this kind or of the latest; 0 where none is known."""
    if not rates:
        return 0.0
    cost, seconds = rates.get(kind) or tuple(rates.values())[-1]
    return seconds / cost

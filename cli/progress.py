"""What the user sees while a command works: a live bar on a terminal, else a few plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
)
from rich.text import Text

from chipsparse.experiments import progress as experiments

if TYPE_CHECKING:
    import torch

PLAIN_LINES_PER_GENERATION = 5

# Says, when so many steps are done, how long a command takes already and what is left.
Clock = Callable[[int], str]


def clock_text(elapsed: float, left: float | None) -> str:
    """A clock with its labels, of seconds that went by and, if known, of those to come."""
    text = f"{duration(elapsed)} elapsed"
    return text if left is None else f"{text}, about {duration(left)} left"


def duration(seconds: float) -> str:
    """Seconds, minutes and hours for people."""
    if round(seconds, 1) < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


class _ClockColumn(ProgressColumn):
    """The clock of the whole command where a task has one, else its own."""

    def render(self, task: Task) -> Text:
        clock: Clock | None = task.fields["clock"]
        if clock is not None:
            return Text(clock(int(task.completed)))
        return Text(clock_text(task.elapsed or 0.0, task.time_remaining))


def silent_display() -> ProgressDisplay:
    """A display that shows nothing: that of a process beside the one that does."""
    return ProgressDisplay(Console(quiet=True, force_terminal=False))


class ProgressDisplay:
    """Stages of a command and denoising steps, on stderr; a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            _ClockColumn(),
            console=self._console,
            transient=True,
        )
        self._live = self._console.is_terminal

    def __enter__(self) -> ProgressDisplay:
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._bar.stop()

    @contextmanager
    def stage(self, text: str, *, clock: Clock | None = None) -> Iterator[None]:
        """Shows that something of unknown length is going on."""
        task: TaskID | None = None
        if self._live:
            task = self._bar.add_task(text, total=None, note="", clock=clock)
        else:
            self.tell(text)
        try:
            yield
        finally:
            if task is not None:
                self._bar.remove_task(task)

    @contextmanager
    def denoising(
        self,
        text: str,
        steps: int,
        *,
        plain_lines: int = PLAIN_LINES_PER_GENERATION,
        clock: Clock | None = None,
    ) -> Iterator[StepDisplay]:
        """Shows the steps of one denoising loop.

        Args:
            plain_lines: how many lines there are at most where there is no bar.
            clock: of the whole command; None: that of the loop.
        """
        bar = self._bar if self._live else None
        display = StepDisplay(bar, self.tell, text, steps, plain_lines, clock)
        try:
            yield display
        finally:
            display.close()

    def check(self) -> None:
        """Asked between steps that are not shown; what can be stopped raises here."""

    def tell(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class StepDisplay(experiments.StepsShown):
    """One denoising loop; call `done` after each step."""

    def __init__(
        self,
        bar: Progress | None,
        tell: Callable[[str], None],
        text: str,
        steps: int,
        plain_lines: int,
        clock: Clock | None,
    ) -> None:
        self._bar, self._tell, self._text, self._steps = bar, tell, text, steps
        self._clock = clock
        self._start = time.perf_counter()
        self._task: TaskID | None = None
        count = min(plain_lines, steps)
        self._plain_steps = {round(steps * (index + 1) / count) for index in range(count)}
        if bar is not None:
            self._task = bar.add_task(text, total=steps, note=f"step 1 of {steps}", clock=clock)

    def done(self, step: int, action: str, latents: torch.Tensor | None = None) -> None:
        """Marks `step` (from 0) as finished, having taken `action` and made `latents`."""
        count = step + 1
        if self._bar is not None and self._task is not None:
            finished = count >= self._steps
            note = "decoding" if finished else f"step {count} of {self._steps} ({action})"
            self._bar.update(self._task, completed=count, note=note)
        elif count in self._plain_steps:
            took = f"{time.perf_counter() - self._start:.1f} s"
            clock = took if self._clock is None else self._clock(count)
            self._tell(f"{self._text}: step {count} of {self._steps} ({action}), {clock}")

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None and self._task is not None:
            self._bar.remove_task(self._task)


# The time that is left of a command of many generations.


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


class WorkProgress(experiments.Progress):
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
        return clock_text(self._clock() - self._start, self.seconds_left())

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

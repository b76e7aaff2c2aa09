"""The progress of a command: a live bar on a terminal, else a few plain lines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, RenderableColumn, SpinnerColumn, TextColumn

from chipsparse.common import stopping
from chipsparse.experiments import progress as experiments
from chipsparse.experiments.progress import StepDone


def clock_text(elapsed: float, left: float | None) -> str:
    """Return the seconds that went by and, where known, those to come, for people."""
    text = f"{duration(elapsed)} elapsed"
    return text if left is None or left < 0.05 else f"{text}, about {duration(left)} left"


def duration(seconds: float) -> str:
    """Return seconds, minutes and hours for people."""
    if round(seconds, 1) < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def silent_display() -> ProgressDisplay:
    """Return a display that shows nothing, such as that of a process beside the first."""
    return ProgressDisplay(Console(quiet=True, force_terminal=False))


class ProgressDisplay(experiments.Progress):
    """Stages and denoising steps of a command, on stderr; a context manager.

    The planned work is measured in dense generations. One rate, of all that was done so far, tells
    how long the rest takes.
    """

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            RenderableColumn(self),  # see `__rich__`
            console=self._console,
            transient=True,
            speed_estimate_period=math.inf,
            get_time=clock,
        )
        self._live = self._console.is_terminal
        self._open_bar = ExitStack()
        self._whole = self._bar.add_task("", total=None, visible=False, note="")
        self._planned: dict[str, float] = {}
        self._open = 0.0  # the rest of the work that is going on
        self._step_costs: Sequence[float] = ()  # of its denoising steps; they sum to its cost

    def __enter__(self) -> ProgressDisplay:
        if self._live:
            self._bar.start()
            # The terminal has no cursor until the bar stops.
            self._open_bar.enter_context(stopping.done_at_least(self._bar.stop))
        return self

    def __exit__(self, *_: object) -> None:
        self._open_bar.close()
        if self._live:
            self._bar.stop()

    def plan(self, work: Mapping[str, float]) -> None:
        """Replace the planned work: names with costs in dense generations."""
        self._planned = dict(work)

    @contextmanager
    def working(self, name: str, *, step_costs: Sequence[float] = ()) -> Iterator[None]:
        """Within: a planned work is done, which moves the bar; others do not move it."""
        cost = self._planned.pop(name, None)
        if cost is None:
            yield
            return
        self._open = cost
        total = sum(step_costs)
        self._step_costs = [cost * part / total for part in step_costs]
        self._bar.advance(self._whole, 0)  # the rate counts from here on
        try:
            yield
            self._bar.advance(self._whole, self._open)
        finally:
            self._open = 0.0
            self._step_costs = ()

    def seconds_left(self) -> float | None:
        """Return an estimate; None before anything was done."""
        rate = self._bar.tasks[0].speed
        return (self._open + sum(self._planned.values())) / rate if rate else None

    def clock_text(self) -> str:
        """Return the elapsed time, and the estimated rest where it is known."""
        return clock_text(self._bar.tasks[0].elapsed or 0.0, self.seconds_left())

    __rich__ = clock_text  # the text behind every bar

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        """Within: a spinner with this text, or one line where there is no terminal."""
        if not self._live:
            self.tell(text)
        task = self._bar.add_task(text, total=None, note="")
        try:
            yield
        finally:
            self._bar.remove_task(task)

    @contextmanager
    def denoising(self, title: str, steps: int, *, plain_lines: int = 5) -> Iterator[StepDone]:
        """Within: a bar of the steps, or at most `plain_lines` lines without a terminal."""
        task = self._bar.add_task(title, total=steps, note=f"step 1 of {steps}")
        count = min(plain_lines, steps)
        printed = {round(steps * (line + 1) / count) for line in range(count)}

        def done(step: int, action: str, *_: object) -> None:
            costs = self._step_costs
            cost = costs[step] if step < len(costs) else self._open / max(1, steps - step)
            self._open -= min(cost, self._open)
            self._bar.advance(self._whole, cost)
            number = step + 1
            note = f"step {number} of {steps} ({action})"
            self._bar.update(task, completed=number, note=note if number < steps else "decoding")
            if number in printed and not self._live:
                self.tell(f"{title}: {note}, {self.clock_text()}")

        try:
            yield done
        finally:
            self._bar.remove_task(task)

    def warn(self, texts: Iterable[str], *, label: str | None = None) -> None:
        """Tell each text once as a warning, about the clip of the label if there is one."""
        prefix = f"{label}: " if label else ""
        for text in dict.fromkeys(texts):
            self.tell(f"chipsparse: warning: {prefix}{text}")

    def tell(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

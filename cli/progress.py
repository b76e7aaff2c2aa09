"""What the user sees while a command works: a live bar on a terminal, else a few plain lines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PLAIN_LINES_PER_GENERATION = 5


class ProgressDisplay:
    """Stages of a command and denoising steps, on stderr; a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
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
    def stage(self, text: str) -> Iterator[None]:
        """Shows that something of unknown length is going on."""
        task: TaskID | None = None
        if self._live:
            task = self._bar.add_task(text, total=None, note="")
        else:
            self._print(text)
        try:
            yield
        finally:
            if task is not None:
                self._bar.remove_task(task)

    @contextmanager
    def denoising(
        self, text: str, steps: int, *, plain_lines: int = PLAIN_LINES_PER_GENERATION
    ) -> Iterator[StepDisplay]:
        """Shows the steps of one denoising loop; at most so many lines where there is no bar."""
        bar = self._bar if self._live else None
        display = StepDisplay(bar, self._console, text, steps, plain_lines)
        try:
            yield display
        finally:
            display.close()

    def tell(self, text: str) -> None:
        """A line that stays."""
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class StepDisplay:
    """One denoising loop; call `done` after each step."""

    def __init__(
        self,
        bar: Progress | None,
        console: Console,
        text: str,
        steps: int,
        plain_lines: int = PLAIN_LINES_PER_GENERATION,
    ) -> None:
        self._bar, self._console, self._text, self._steps = bar, console, text, steps
        self._start = time.perf_counter()
        self._task: TaskID | None = None
        count = min(plain_lines, steps)
        self._plain_steps = {round(steps * (index + 1) / count) for index in range(count)}
        if bar is not None:
            self._task = bar.add_task(text, total=steps, note=f"step 1 of {steps}")

    def done(self, step: int, action: str) -> None:
        """Marks `step` (from 0) as finished, having taken `action`."""
        count = step + 1
        if self._bar is not None and self._task is not None:
            finished = count >= self._steps
            note = "decoding" if finished else f"step {count} of {self._steps} ({action})"
            self._bar.update(self._task, completed=count, note=note)
        elif count in self._plain_steps:
            seconds = time.perf_counter() - self._start
            line = f"{self._text}: step {count} of {self._steps} ({action}), {seconds:.1f} s"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None and self._task is not None:
            self._bar.remove_task(self._task)

"""How far tuning is, with an estimate of the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from chipsparse.cli.progress import ProgressDisplay, StepDisplay
from chipsparse.cli.summary import seconds_text


class TuneProgress:
    """Knows what is planned, and how long such things took so far.

    Args:
        display: shows it.
        clock: gives seconds.
    """

    def __init__(
        self, display: ProgressDisplay, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._display = display
        self._clock = clock
        self._planned: dict[str, float] = {}
        self._done = self._spent = 0.0

    def plan(self, work: Mapping[str, float]) -> None:
        """Replaces what is planned.

        Args:
            work: names with what each takes, in dense generations.
        """
        self._planned = dict(work)

    @contextmanager
    def working(self, name: str) -> Iterator[None]:
        """While something is measured; what was not planned is taken to be there already."""
        start = self._clock()
        yield
        cost = self._planned.pop(name, None)
        if cost is not None:
            self._done += cost
            self._spent += self._clock() - start

    def seconds_left(self) -> float | None:
        """An estimate; None before anything was measured."""
        if not self._done:
            return None
        return sum(self._planned.values()) * self._spent / self._done

    def denoising(self, title: str, steps: int) -> AbstractContextManager[StepDisplay]:
        """Shows a generation."""
        left = self.seconds_left()
        told = "" if left is None else f" (about {seconds_text(left)} left in all)"
        return self._display.denoising(f"{title}{told}", steps, plain_lines=1)

    def stage(self, text: str) -> AbstractContextManager[None]:
        """Shows something else."""
        return self._display.stage(text)

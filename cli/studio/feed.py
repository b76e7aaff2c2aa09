"""What the page is shown while a generation runs, and its wish to stop."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from chipsparse.cli.progress import PLAIN_LINES_PER_GENERATION, Clock, ProgressDisplay, StepDisplay

Way = Literal["sparse", "dense"]
# What the latents of a step show; None where that is not known.
Picture = Callable[[torch.Tensor | None, int], np.ndarray | None]


class Stopped(BaseException):
    """Someone pressed Stop. No `Exception`: nothing went wrong, and nothing is to be said of it."""


@dataclass(frozen=True)
class Run:
    """One of the two generations.

    Attributes:
        planned: the action of each step, as far as it is known beforehand.
        actions: of the steps that are done, from the first on.
    """

    way: Way
    planned: tuple[str, ...]
    actions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shown:
    """One moment.

    Attributes:
        runs: those that began, in their order.
        preview: what the latents show, uint8 ``[T, H, W, 3]``; None where there is nothing yet.
    """

    stage: str
    clock: str = ""
    runs: tuple[Run, ...] = ()
    preview: np.ndarray | None = None


class Feed(ProgressDisplay):
    """Puts a `Shown` wherever something new can be seen.

    Args:
        put: takes them; called by the thread that generates.
    """

    def __init__(self, put: Callable[[Shown], None]) -> None:
        super().__init__(Console(quiet=True, force_terminal=False))
        self._put = put
        self._stop = threading.Event()
        self._picture: Picture = lambda latents, step: None
        self.now = Shown("")

    def stop(self) -> None:
        """Ends the generation at the end of the step, or of what else is going on."""
        self._stop.set()

    def check(self) -> None:
        """See `ProgressDisplay`."""
        if self._stop.is_set():
            raise Stopped

    def show(self, **changes: Any) -> None:
        """Shows the same moment with some of its fields changed."""
        self.now = dataclasses.replace(self.now, **changes)
        self._put(self.now)

    def begin(self, run: Run, picture: Picture) -> None:
        """What `denoising` shows next, of which no step is done."""
        self._picture = picture
        self.now = dataclasses.replace(self.now, runs=(*self.now.runs, run), preview=None)

    @contextmanager
    def stage(self, text: str, *, clock: Clock | None = None) -> Iterator[None]:
        """See `ProgressDisplay`."""
        self.check()
        self.show(stage=text, clock="")
        yield
        self.check()

    @contextmanager
    def denoising(
        self,
        text: str,
        steps: int,
        *,
        plain_lines: int = PLAIN_LINES_PER_GENERATION,
        clock: Clock | None = None,
    ) -> Iterator[StepDisplay]:
        """See `ProgressDisplay`."""
        self.check()
        self.show(stage=f"{text}: step 1 of {steps}")
        yield _Steps(self, text, steps, clock)

    def step_done(
        self, stage: str, clock: str, step: int, action: str, latents: torch.Tensor | None
    ) -> None:
        """Shows a step of the run that began last; raises `Stopped` where that is wished."""
        *before, run = self.now.runs
        run = dataclasses.replace(run, actions=(*run.actions, action))
        shown = self._picture(latents, step)
        self.show(stage=stage, clock=clock, runs=(*before, run), preview=shown)
        self.check()


class _Steps(StepDisplay):
    """One denoising loop, shown in a feed."""

    def __init__(self, feed: Feed, text: str, steps: int, clock: Clock | None) -> None:
        self._feed, self._text, self._steps, self._clock = feed, text, steps, clock

    def done(self, step: int, action: str, latents: torch.Tensor | None = None) -> None:
        """See `StepDisplay`."""
        count = step + 1
        doing = "decoding" if count >= self._steps else f"step {count + 1} of {self._steps}"
        clock = "" if self._clock is None else self._clock(count)
        self._feed.step_done(f"{self._text}: {doing}", clock, step, action, latents)

    def close(self) -> None:
        """Nothing is to be taken away."""

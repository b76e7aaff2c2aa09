"""The position of a transformer call in the denoising loop, read from the pipeline.

A pipeline tells its position in up to three ways: the step index and branch of diffusers'
``cache_context``, the scheduler's list of timesteps, and the timestep of the call itself. The
tracker turns them into a `Place` and notices when a new generation has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

Timesteps: TypeAlias = "torch.Tensor | Sequence[float]"


@dataclass(frozen=True)
class Place:
    """Position of one transformer call."""

    generation: int  # number of the generation since the tracker was made (from 1)
    step: int  # denoising step (from 0)
    branch: str  # guidance branch, such as "cond" or "uncond"
    steps: int | None  # number of steps of this generation where known
    timestep: float | None = None  # from the scheduler's list, where it has one for these steps
    first: int = 0  # step of the generation's first call; above 0 where it starts from an image
    corrects: bool = True  # whether skipped steps can be put right by the scheduler of these steps

    @property
    def time(self) -> float:
        """Its timestep, or else the step: what outputs are forecast by."""
        return float(self.step) if self.timestep is None else self.timestep


class Locator:
    """Follows the transformer calls of one pipeline, over all its experts.

    Another schedule, another number of steps, or a step that does not come after the last one of
    its branch starts a new generation.
    """

    _step: int
    _first: int | None
    _unnamed_calls: int

    def __init__(self) -> None:
        self._generation = -1
        self._start(None, None)  # generation 0: nothing was called yet
        self._finished = True

    def locate(
        self,
        *,
        branch: str | None = None,  # as given by `cache_context`, as are step_index and steps
        step_index: int | None = None,
        steps: int | None = None,
        # Reads the timestep that the transformer is called with; only called where the step index
        # is not given, because it may wait for the device.
        timestep: Callable[[], float] | None = None,
        schedule: Timesteps | None = None,  # the scheduler's; their identity marks one generation
        unnamed_branch: str = "call0",  # of a step's first call where no branch is given
    ) -> Place:
        """Returns the position of the call about to run; `ValueError` where nothing tells it."""
        if steps is None and schedule is not None:
            steps = len(schedule)
        if self._finished or schedule is not self._schedule or steps != self._steps:
            self._start(schedule, steps)
        step = self._step_of(timestep, branch) if step_index is None else step_index
        if branch is None:
            self._unnamed_calls = self._unnamed_calls + 1 if step == self._step else 0
            branch = f"call{self._unnamed_calls}" if self._unnamed_calls else unnamed_branch
        if step <= self._last_step.get(branch, -1):
            self._start(schedule, steps)
            if step_index is None:  # where steps are counted, by its timestep: from this one on
                step = self._step_of(timestep, branch)
        self._step = self._last_step[branch] = step
        if self._first is None:
            self._first = step
        listed = step < len(self._values) == steps
        timestep_of_step = self._values[step] if listed else None
        return Place(self._generation, step, branch, steps, timestep_of_step, self._first)

    def finish(self) -> None:
        """Ends the generation: the next call starts another one, whatever its position."""
        self._finished = True

    def _start(self, schedule: Timesteps | None, steps: int | None) -> None:
        self._generation += 1
        self._finished = False
        self._schedule = schedule
        self._steps = steps
        values: Sequence[float] = ()
        if schedule is not None:
            values = schedule.tolist() if hasattr(schedule, "tolist") else schedule
        self._values = list(values)
        self._last_step: dict[str, int] = {}
        self._timestep: float | None = None
        self._step = -1
        self._first = None
        self._unnamed_calls = 0

    def _step_of(self, read_timestep: Callable[[], float] | None, branch: str | None) -> int:
        """Return the step of a timestep: its index in the schedule, else one more if it is new.

        Rounded schedules may have a timestep several times. It is then the branch's next step.
        """
        if read_timestep is None:
            raise ValueError(
                "cannot tell the denoising step: the pipeline gives neither "
                "cache_context(..., step_index=...) nor a timestep",
            )
        timestep = read_timestep()
        indices = [index for index, value in enumerate(self._values) if value == timestep]
        if indices:
            last_step = -1 if branch is None else self._last_step.get(branch, -1)
            return next((index for index in indices if index > last_step), indices[0])
        if self._timestep is not None and timestep > self._timestep:
            self._start(self._schedule, self._steps)
        is_next = timestep != self._timestep
        self._timestep = timestep
        return self._step + 1 if is_next else self._step

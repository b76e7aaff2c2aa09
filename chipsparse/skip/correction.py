"""Skipped steps put right once the next full step is known.

A skipped step goes on with an output that is held or forecast. The next full step tells what the
outputs between should have been: what the model predicts of the clean latents is taken to change
along a line from one full step to the other. The full step is taken from where the solver leads
with these predictions, which costs no call of the model. What it predicts of the clean latents
follows by the share of them that is no noise: at the start it hardly depends on the latents, at the
end it is them.

Only the difference that the better predictions make in the solver is added to the latents, whatever
else has happened to them. Beside the scheduler a solver of its class goes along two paths, with the
outputs as they were and with better ones; it is linear, so the slope of the line can be known last.

This is the corrector of a predictor-corrector method. UniPC (Zhao et al., "UniPC: a unified
predictor-corrector framework for fast sampling of diffusion models", 2023) has one for the last
step of a solver.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

Kind = Literal["full", "sparse", "reused"]
SOLVERS = (  # classes of diffusers that go on in a straight flow
    "FlowMatchEulerDiscreteScheduler",
    "UniPCMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DEISMultistepScheduler",
)
GIVEN = ("model_output", "timestep", "sample")  # what every step is called with


class Made(NamedTuple):
    """The origin of a denoising step's outputs."""

    step: int  # its number
    kind: Kind  # all computed in full; some sparse; or made from those of earlier steps
    branches: frozenset[str]  # guidance branches that it had
    restarted: bool = False  # whether outputs of earlier steps say nothing about its own


@dataclass
class _Gap:
    """The steps behind a full one, until the next one."""

    made: Made  # of its last step
    begun: int  # number of the full step
    schedule: Any  # the scheduler's timesteps, whose identity tells generations from each other
    level: float  # noise level of the last step that was computed
    clean: torch.Tensor  # what that one predicts of the clean latents, fp32
    solver: Any  # the scheduler's, which goes on from its state with three paths at once
    # fp32 latents [3, ...]: with the outputs as they were; with `clean` as the prediction; and what
    # a slope of 1 of the predictions over the levels adds to that.
    paths: torch.Tensor
    free: torch.Tensor | None  # [B, N, 1], tokens at the step's noise level; None: all
    distance: float  # of the last step's level from that of clean latents, positive
    skips_any: bool = False  # there are steps without a prediction of their own

    def go_on(self, level: float, distance: float, given: dict[str, Any]) -> None:
        """Take the step behind a call that was none in full."""
        _, better, slope = self.paths
        better = (better - self.clean) / distance
        slope = (slope - (level - self.level)) / distance
        outputs = torch.stack([given["model_output"].float(), better, slope])
        stepped = self.solver.step(outputs, given["timestep"], self.paths, return_dict=False)
        self.paths = stepped[0]

    def predict(self, level: float, distance: float, output: torch.Tensor) -> None:
        """Take in the prediction of a computed step: the slope that leads there is known now."""
        clean = self.paths[0] - distance * output.float()
        run = level - self.level
        slope = (clean - self.clean) / run if run else torch.zeros_like(clean)

        def followed(paths: torch.Tensor) -> torch.Tensor:
            return torch.stack([paths[0], paths[1] + slope * paths[2], torch.zeros_like(slope)])

        self.paths = followed(self.paths)
        for slot, key in _kept(self.solver):
            slot[key] = followed(slot[key])
        self.level = level
        self.clean = clean


class CorrectedSteps:
    """The ``step`` of a flow-matching scheduler that puts skipped steps right."""

    def __init__(
        self,
        # Of one of `SOLVERS`, or a subclass, whose solver is linear and deterministic. Its `sigmas`
        # are the noise levels, which fall to 0 or, inverted, rise to 1, and its `step_index` is the
        # number of the next step.
        scheduler: Any,
        step: Callable[..., Any],  # its own, whatever that does besides
        # The origin of the step's outputs; None where it is not known, or nothing is skipped.
        made: Callable[[], Made | None],
        corrected: Callable[[range], None],  # is told the numbers of the steps of each gap
    ) -> None:
        self._scheduler = scheduler
        self._step = step
        self._made = made
        self._corrected = corrected
        self._gap: _Gap | None = None
        self._levels: tuple[Any, int, list[float]] = (None, 0, [])
        self.is_placed = True  # False where the last step told no number: nothing is put right

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = [*GIVEN[: len(args)], *map(str, range(len(GIVEN), len(args)))]
        given = dict(zip(names, args, strict=True)) | kwargs
        gap = self._gap
        self._gap = None
        made = self._made() if given.keys() >= set(GIVEN) else None
        if made is None:
            return self._step(*args, **kwargs)
        tokens = given.get("per_token_timesteps")  # with which outputs point against the flow
        if tokens is not None:
            given["model_output"] = -given["model_output"]
        if gap is not None and not self._goes_on(gap, made, given):
            gap = None
        if gap is not None and made.kind == "full" and gap.skips_any:
            given |= self._put_right(gap, given)
            self._corrected(range(gap.begun + 1, made.step))
        own = given if tokens is None else {**given, "model_output": -given["model_output"]}
        stepped = self._step(*map(own.get, names), **{name: own[name] for name in kwargs})
        step = self._scheduler.step_index
        self.is_placed = step is not None
        if step is None or step >= len(self._scheduler.timesteps):  # not known, or no other comes
            return stepped
        place = self._place(step - 1)
        distance = abs(place[1])
        if distance == 0:  # latents without noise: no prediction tells an output
            return stepped
        if made.kind == "full":
            self._gap = self._begin(made, *place, given, latents_of(stepped))
        elif gap is not None and distance <= gap.distance:  # no line leads back to more noise
            if made.kind == "sparse":
                gap.predict(*place, given["model_output"])
            gap.go_on(*place, given)
            gap.distance = distance
            gap.made = made
            gap.skips_any = gap.skips_any or made.kind == "reused"
            self._gap = gap
        return stepped

    def drop(self) -> None:
        """Free what is held for the gap in progress, which is not put right then."""
        self._gap = None

    def _begin(
        self,
        made: Made,
        level: float,
        distance: float,
        given: dict[str, Any],
        latents: torch.Tensor,
    ) -> _Gap:
        clean = given["sample"].float() - distance * given["model_output"].float()
        solver: Any = object.__new__(solver_class(self._scheduler))  # type: ignore[arg-type]
        for name, value in vars(self._scheduler).items():
            if name != "step":  # the user's own
                vars(solver)[name] = list(value) if isinstance(value, list) else value
        for slot, key in _kept(solver):
            slot[key] = _three(slot[key])
        schedule = self._scheduler.timesteps
        tokens = given.get("per_token_timesteps")
        free = None if tokens is None else (tokens == tokens.max())[..., None]
        paths = _three(latents)
        return _Gap(
            made,
            made.step,
            schedule,
            level,
            clean,
            solver,
            paths,
            free,
            distance=abs(distance),
        )

    def _goes_on(self, gap: _Gap, made: Made, given: dict[str, Any]) -> bool:
        """Return True for the next step of the same generation and branches."""
        return (
            gap.schedule is self._scheduler.timesteps
            and gap.solver.sigmas is self._scheduler.sigmas
            and gap.solver.step_index == self._scheduler.step_index
            and gap.made.branches == made.branches
            and gap.made.step + 1 == made.step
            and not made.restarted
            and gap.paths.shape[1:] == given["sample"].shape
            # Nobody has reset what it keeps.
            and [key for _, key in _kept(gap.solver)] == [key for _, key in _kept(self._scheduler)]
            and (gap.free is None) == (given.get("per_token_timesteps") is None)
        )

    def _put_right(self, gap: _Gap, given: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Put the scheduler's state right; return output and latents of the step behind the gap."""
        output = given["model_output"]
        sample = given["sample"]
        level, distance = self._place(gap.solver.step_index)
        gap.predict(level, distance, output)
        moved = gap.paths[1] - gap.paths[0]
        moved = moved if gap.free is None else gap.free * moved
        # The prediction x - d v moves by 1 - |d| times as much as x, where d is the distance.
        turned = math.copysign(1.0, distance) * moved
        for (slot, key), (other, _) in zip(_kept(self._scheduler), _kept(gap.solver), strict=True):
            slot[key] = _added(slot[key], other[key][1] - other[key][0])
        return {"model_output": _added(output, turned), "sample": _added(sample, moved)}

    def _place(self, step: int) -> tuple[float, float]:
        """Return the noise level of a step, and its distance from the level of clean latents."""
        sigmas = self._scheduler.sigmas
        counted = isinstance(sigmas, torch.Tensor) and not sigmas.is_inference()
        version = sigmas._version if counted else 0
        if self._levels[0] is not sigmas or self._levels[1] != version:
            self._levels = sigmas, version, torch.as_tensor(sigmas).tolist()
        level = self._levels[2][step]
        return level, level - bool(self._scheduler.config.get("invert_sigmas", False))


def _kept(scheduler: Any) -> list[tuple[Any, Any]]:
    """Return where a multistep solver keeps tensors of the latents' size: container and key."""
    held = vars(scheduler)
    outputs = held.get("model_outputs", [])
    slots = [*((outputs, place) for place in range(len(outputs))), (held, "last_sample")]
    return [
        (slot, key)
        for slot, key in slots
        if (slot is outputs or key in held) and slot[key] is not None
    ]


def _three(latents: torch.Tensor) -> torch.Tensor:
    latents = latents.float()
    return torch.stack([latents, latents, torch.zeros_like(latents)])


def _added(tensor: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    return (tensor.float() + change).to(tensor.dtype)


def held_bytes(scheduler: Any, latents: torch.Tensor) -> int:
    """Return the bytes that a gap holds at most, in fp32 tensors of the latents' size."""
    kept = len(getattr(scheduler, "model_outputs", [])) + hasattr(scheduler, "last_sample")
    return 4 * latents.numel() * (1 + 3 * (2 + kept))


def solver_class(scheduler: Any) -> type | None:
    """Return the class of diffusers among `SOLVERS` that a scheduler is of, or None."""
    bases = reversed(type(scheduler).__mro__)
    return next((base for base in bases if base.__name__ in SOLVERS), None)


def latents_of(stepped: Any) -> torch.Tensor:
    """Return the latents of a scheduler's step, in either form of its result."""
    latents: torch.Tensor = stepped.prev_sample if hasattr(stepped, "prev_sample") else stepped[0]
    return latents

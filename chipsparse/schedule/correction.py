"""Skipped steps put right once the next full step is known.

A skipped step goes on with an output that is held or forecast. The next full step tells what the
outputs between should have been: what the model predicts of the clean latents is taken to change
along a line from one full step to the other. So the solver goes from the first of them to the
second once more with these outputs, which costs no call of the model, and the full step is taken
from where that leads. What it predicts of the clean latents follows by the share of them that is no
noise: at the start it hardly depends on the latents, at the end it is them.

This is the corrector of a predictor-corrector method. UniPC (Zhao et al., "UniPC: a unified
predictor-corrector framework for fast sampling of diffusion models", 2023) has one for the last
step of a solver.
"""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

Kind = Literal["full", "sparse", "reused"]


class Made(NamedTuple):
    """How the outputs of a denoising step came about.

    Attributes:
        step: its number.
        kind: all computed in full; some sparse; or made from those of earlier steps.
        branches: guidance branches that it had.
    """

    step: int
    kind: Kind
    branches: frozenset[str]


class Prediction(NamedTuple):
    """What a step predicts of the clean latents.

    Attributes:
        level: noise level of the step, as the scheduler's ``sigmas`` have it.
        clean: fp32, of the latents' shape.
    """

    level: float
    clean: torch.Tensor


@dataclass
class _Gap:
    """What follows a full step until the next one.

    Attributes:
        made: how the full step came about.
        predictions: its own, and those of sparse steps behind it.
        schedule: the scheduler's timesteps, whose identity tells one generation from another.
        state: of the scheduler behind the full step.
        began: the latents there.
        calls: arguments of the solver's steps since, by name.
        reached: the latents behind the last of these.
    """

    made: Made
    predictions: list[Prediction]
    schedule: Any
    state: dict[str, Any]
    began: torch.Tensor
    calls: list[dict[str, Any]] = field(default_factory=list)
    reached: torch.Tensor | None = None

    @property
    def skips_any(self) -> bool:
        """Whether there are steps without a prediction of their own."""
        return len(self.calls) >= len(self.predictions)


class CorrectedSteps:
    """The ``step`` of a flow-matching scheduler that puts skipped steps right.

    Args:
        scheduler: deterministic, with the noise levels in ``sigmas``, which fall to 0 or, inverted,
            rise to 1, and the number of the next step in ``step_index``.
        step: its own step.
        made: tells how the outputs of the denoising step came about; None where that is not known,
            or nothing is skipped in the whole generation.
        corrected: is told each gap that was put right, as numbers of steps.
    """

    def __init__(
        self,
        scheduler: Any,
        step: Callable[..., Any],
        made: Callable[[], Made | None],
        corrected: Callable[[range], None],
    ) -> None:
        self._scheduler, self._step = scheduler, step
        self._made, self._corrected = made, corrected
        # That of the class, whatever stands in the place of its step.
        self._signature = inspect.signature(type(scheduler).step.__get__(scheduler))
        self._gap: _Gap | None = None
        self._levels: tuple[Any, list[float]] = (None, [])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the scheduler's own step."""
        given = dict(self._signature.bind(*args, **kwargs).arguments)
        made, gap = self._made(), self._gap
        if made is None or given.get("per_token_timesteps") is not None:
            self._gap = None
            return self._step(*args, **kwargs)
        if gap is not None and not self._goes_on(gap, made, given["sample"]):
            gap = self._gap = None
        if made.kind == "full":
            return self._full_step(gap, made, given)
        stepped = self._step(**given)
        if gap is not None:
            if made.kind == "sparse":
                gap.predictions.append(self._prediction(given, self._scheduler.step_index - 1))
            gap.calls.append(given)
            gap.reached = latents_of(stepped).clone()  # pipelines may change theirs in place
        return stepped

    def _full_step(self, gap: _Gap | None, made: Made, given: dict[str, Any]) -> Any:
        if gap is not None and gap.skips_any:
            given = given | self._put_right(gap, given)
            self._corrected(range(gap.made.step + 1, made.step))
        stepped = self._step(**given)
        self._gap = _Gap(
            made,
            [self._prediction(given, self._scheduler.step_index - 1)],
            self._scheduler.timesteps,
            state_of(self._scheduler),
            latents_of(stepped).clone(),
        )
        return stepped

    def _goes_on(self, gap: _Gap, made: Made, latents: torch.Tensor) -> bool:
        """Whether a step is the next one of the same generation, of the same branches."""
        return (
            gap.schedule is self._scheduler.timesteps
            and gap.made.branches == made.branches
            and gap.made.step + len(gap.calls) + 1 == made.step
            and gap.began.shape == latents.shape
        )

    def _put_right(self, gap: _Gap, given: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Output and latents of the full step behind a gap, from where the gap should have led."""
        output, sample = given["model_output"], given["sample"]
        scheduler, last = self._scheduler, self._scheduler.step_index
        predictions = [*gap.predictions, self._prediction(given, last)]
        vars(scheduler).update(gap.state)
        # Solvers of several steps mix what they keep with what they get.
        dtype = output.dtype if hasattr(scheduler, "model_outputs") else torch.float32
        latents = gap.began.to(dtype)
        for call in gap.calls:
            distance = self._distance(scheduler.step_index)
            clean = between(predictions, self._level(scheduler.step_index))
            velocity = (latents.float() - clean) / distance
            call = call | {"model_output": velocity.to(dtype), "sample": latents}
            latents = latents_of(type(scheduler).step(scheduler, **call))
        assert gap.reached is not None
        moved = latents.float() - gap.reached.float()
        # The prediction x - d v moves by 1 - |d| times as much as x, where d is the distance.
        turned = math.copysign(1.0, self._distance(last)) * moved
        return {
            "model_output": (output.float() + turned).to(output.dtype),
            "sample": (sample.float() + moved).to(sample.dtype),
        }

    def _prediction(self, given: dict[str, Any], step: int) -> Prediction:
        """What the output of a step, a velocity, says of the clean latents."""
        clean = given["sample"].float() - self._distance(step) * given["model_output"].float()
        return Prediction(self._level(step), clean)

    def _level(self, step: int) -> float:
        sigmas = self._scheduler.sigmas
        if self._levels[0] is not sigmas:
            self._levels = sigmas, torch.as_tensor(sigmas).tolist()
        return self._levels[1][step]

    def _distance(self, step: int) -> float:
        """From the level of clean latents, at which not all schedules end."""
        inverted = self._scheduler.config.get("invert_sigmas", False)
        return self._level(step) - (1.0 if inverted else 0.0)


def between(predictions: Sequence[Prediction], level: float) -> torch.Tensor:
    """What is predicted at a level, along the line from the one before to the one behind it.

    Args:
        predictions: two at least, in the order of their levels, which fall or rise.
        level: between the first one's and the last one's.
    """
    falling = predictions[0].level > predictions[-1].level
    places = [-each.level if falling else each.level for each in predictions]
    place = -level if falling else level
    behind = min(max(1, bisect_right(places, place)), len(places) - 1)
    (old, before), (new, after) = predictions[behind - 1 : behind + 1]
    share = 0.0 if new == old else (level - old) / (new - old)
    return torch.lerp(before, after, share)


def latents_of(stepped: Any) -> torch.Tensor:
    """The latents that a scheduler's step returned, in either of its forms."""
    latents: torch.Tensor = stepped[0] if isinstance(stepped, tuple) else stepped.prev_sample
    return latents


def state_of(scheduler: Any) -> dict[str, Any]:
    """What a scheduler keeps between its steps, which replace tensors and change lists."""
    return {
        name: list(kept) if isinstance(kept, list) else kept
        for name, kept in vars(scheduler).items()
        if name != "step"
    }

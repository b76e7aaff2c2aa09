"""The corrector: goes over skipped steps again once the next full step is known.

A skipped step reuses the last output or extrapolates it. The next full step shows what the outputs
in between should have been. This is the corrector of a predictor-corrector method, over an interval
of several steps. UniPC (Zhao et al., "UniPC: a unified predictor-corrector framework for fast
sampling of diffusion models", 2023) has one for the last step of a solver.

In a straight flow ``x = clean + d v``, where v is the model's output and d is the distance of sigma
from the sigma of clean latents. So each computed output predicts the clean latents: ``x - d v``.
The corrector assumes that this prediction is linear in sigma between two full steps. It is known at
both ends, and hardly changes in between, whereas outputs follow the noise in their latents.

The slope of that line is known only at the second full step, and the solver would have to repeat
the interval with it. It need not: its steps are linear in latents and outputs, so the latents after
the interval are affine in the slope. A copy of the solver advances three `Trajectories` together
with the scheduler. At the full step the slope is the only unknown left, and costs one product.

Two corrections follow. The *latent correction* is the corrected trajectory minus the one as
computed. It is added to the latents of the loop, so edits by callbacks and masks survive. The
*output correction* makes up for the full step's output, which was computed at latents without the
latent correction. The model is not called again: its prediction is taken to move by the fraction
``1 - |d|`` of the latents' move. That fraction of the latents is clean. Pure noise hardly changes
the prediction, and clean latents are their own prediction. With `delta` as the latent correction,
``v = (x - prediction) / d`` moves by ``(delta - (1 - |d|) delta) / d``, which is ``sign(d) delta``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from chipsparse.skip.scheduler import Scheduler, Stepped
from chipsparse.skip.step_log import StepKind, StepOrigin

SOLVERS = (  # classes of diffusers whose steps are linear in a straight flow
    "FlowMatchEulerDiscreteScheduler",
    "UniPCMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DEISMultistepScheduler",
)
STEP_ARGUMENTS = ("model_output", "timestep", "sample")  # of each call of a scheduler's `step`
PER_TOKEN = "per_token_timesteps"  # the argument of a step whose tokens have own timesteps


class StepSigma(NamedTuple):
    """The sigma of a step."""

    value: float
    to_clean: float  # minus the sigma of clean latents: negative if sigmas rise


class Trajectories(NamedTuple):
    """Latents after a step of a skipped interval, by three sequences of outputs."""

    as_computed: torch.Tensor  # by the outputs of the loop
    corrected: torch.Tensor  # by outputs that keep the last computed prediction
    slope_response: torch.Tensor  # the change of `corrected` by a prediction's slope of 1 in sigma

    def with_slope(self, slope: torch.Tensor) -> torch.Tensor:
        """Return them stacked, with a slope in `corrected`, and ready for the next slope."""
        corrected = self.corrected + slope * self.slope_response
        return torch.stack([self.as_computed, corrected, torch.zeros_like(slope)])


@dataclass
class SkippedInterval:
    """The steps after a full step, up to the next full one."""

    origin: StepOrigin  # of its last step
    full_step: int  # index of the full step
    timesteps: Any  # of the scheduler, whose identity tells generations apart
    sigma: float  # of the last computed step
    clean: torch.Tensor  # the clean latents that the last computed step predicts, fp32
    solver: Any  # the scheduler's, which continues from its state with stacked trajectories
    trajectories: torch.Tensor  # `Trajectories` after its last step, stacked: fp32 [3, ...]
    denoised_tokens: torch.Tensor | None  # bool [B, N, 1]: those at the step's sigma; None: all
    sigma_to_clean: float  # of its last step, absolute
    skips_any: bool = False  # a step has no prediction of its own

    def advance(self, sigma: StepSigma, arguments: dict[str, Any]) -> None:
        """Advance the trajectories by one skipped or sparse step.

        A trajectory's output leads from its own latents to its own prediction. The slope response
        has no prediction but the change by a slope of 1: the difference of the sigmas.
        """
        now = Trajectories(*self.trajectories)
        corrected = (now.corrected - self.clean) / sigma.to_clean
        slope_response = (now.slope_response - (sigma.value - self.sigma)) / sigma.to_clean
        outputs = torch.stack([arguments["model_output"].float(), corrected, slope_response])
        stepped = self.solver.step(
            outputs,
            arguments["timestep"],
            self.trajectories,
            return_dict=False,
        )
        self.trajectories = stepped[0]

    def fit_slope(self, sigma: StepSigma, output: torch.Tensor) -> None:
        """Put the slope that leads to a computed step's prediction in the corrected trajectory.

        The solver's history is corrected as well: later steps of a multistep solver read it.
        """
        as_computed = Trajectories(*self.trajectories).as_computed
        clean = as_computed - sigma.to_clean * output.float()
        sigma_span = sigma.value - self.sigma
        # Sigmas may repeat, and a line through one point has no slope.
        slope = (clean - self.clean) / sigma_span if sigma_span else torch.zeros_like(clean)
        self.trajectories = Trajectories(*self.trajectories).with_slope(slope)
        for slot in solver_history_slots(self.solver):
            slot.tensor = Trajectories(*slot.tensor).with_slope(slope)
        self.sigma = sigma.value
        self.clean = clean

    def latent_correction(self) -> torch.Tensor:
        """Return what is to be added to the latents, which is 0 for tokens that do not change."""
        now = Trajectories(*self.trajectories)
        correction = now.corrected - now.as_computed
        return correction if self.denoised_tokens is None else self.denoised_tokens * correction


class _ReadSigmas(NamedTuple):
    """A scheduler's sigmas as numbers, which are read once: reading waits for the device."""

    of: Any
    version: int  # PyTorch's, which counts writes in place
    values: list[float]


class CorrectedSteps:
    """The ``step`` of a flow-matching scheduler that corrects skipped steps."""

    def __init__(
        self,
        # One of `SOLVERS`, or a subclass, whose solver is linear and deterministic. Its `sigmas`
        # fall to 0 or, inverted, rise to 1, and its `step_index` is the index of the next step.
        scheduler: Scheduler,
        step: Callable[..., Any],  # its own, whatever else that does
        # Returns the origin of the step's outputs; None if it is unknown, or nothing is skipped.
        origin: Callable[[], StepOrigin | None],
        corrected: Callable[[range], None],  # is told the steps of each corrected interval
    ) -> None:
        self._scheduler = scheduler
        self._step = step
        self._origin = origin
        self._corrected = corrected
        self._interval: SkippedInterval | None = None
        self._sigmas = _ReadSigmas(None, 0, [])
        self.is_located = True  # False if the scheduler does not count its steps

    def __call__(self, *args: Any, **kwargs: Any) -> Stepped:
        """Step the scheduler, after a correction if this step is full and others were skipped."""
        further = map(str, range(len(STEP_ARGUMENTS), len(args)))
        names = [*STEP_ARGUMENTS[: len(args)], *further]
        arguments = dict(zip(names, args, strict=True)) | kwargs
        interval = self._interval
        self._interval = None
        origin = self._origin() if arguments.keys() >= set(STEP_ARGUMENTS) else None
        if origin is None:
            unchanged: Stepped = self._step(*args, **kwargs)
            return unchanged
        # With timesteps per token, schedulers want outputs that point against the flow.
        negates = arguments.get(PER_TOKEN) is not None
        if negates:
            arguments["model_output"] = -arguments["model_output"]
        if interval is not None and not self._continues(interval, origin, arguments):
            interval = None
        if interval is not None and origin.kind is StepKind.FULL and interval.skips_any:
            arguments |= self._correct(interval, arguments)
            self._corrected(range(interval.full_step + 1, origin.step))
        passed = dict(arguments)
        if negates:
            passed["model_output"] = -passed["model_output"]
        stepped: Stepped = self._step(
            *map(passed.get, names),
            **{name: passed[name] for name in kwargs},
        )
        self._interval = self._interval_after(interval, origin, arguments, stepped)
        return stepped

    def drop(self) -> None:
        """Free the current interval, which stays uncorrected."""
        self._interval = None

    @property
    def has_interval(self) -> bool:
        """True from a full step on, until the interval after it is corrected or dropped."""
        return self._interval is not None

    def _interval_after(
        self,
        interval: SkippedInterval | None,
        origin: StepOrigin,
        arguments: dict[str, Any],
        stepped: Stepped,
    ) -> SkippedInterval | None:
        """Return the interval after a step with this result; None if there is none."""
        step = self._scheduler.step_index
        self.is_located = step is not None
        if step is None or step >= len(self._scheduler.timesteps):  # it was the last step
            return None
        sigma = self._sigma(step - 1)
        if sigma.to_clean == 0:  # latents without noise are their own prediction, for any output
            return None
        if origin.kind is StepKind.FULL:
            return self._begin(origin, sigma, arguments, latents_of(stepped))
        # The line of predictions is one of falling noise. A step back to more noise ends it.
        if interval is None or not abs(sigma.to_clean) <= interval.sigma_to_clean:
            return None
        if origin.kind is StepKind.SPARSE:
            interval.fit_slope(sigma, arguments["model_output"])
        interval.advance(sigma, arguments)
        interval.sigma_to_clean = abs(sigma.to_clean)
        interval.origin = origin
        interval.skips_any = interval.skips_any or origin.kind is StepKind.REUSED
        return interval

    def _begin(
        self,
        origin: StepOrigin,
        sigma: StepSigma,
        arguments: dict[str, Any],
        latents: torch.Tensor,
    ) -> SkippedInterval:
        """Return the interval after a full step, whose trajectories all begin at its latents."""
        clean = arguments["sample"].float() - sigma.to_clean * arguments["model_output"].float()
        solver: Any = object.__new__(solver_class(self._scheduler))  # type: ignore[arg-type]
        for name, value in vars(self._scheduler).items():
            if name != "step":  # the user's own
                vars(solver)[name] = list(value) if isinstance(value, list) else value
        for slot in solver_history_slots(solver):
            slot.tensor = stack_trajectories(slot.tensor)
        tokens = arguments.get(PER_TOKEN)
        return SkippedInterval(
            origin,
            origin.step,
            self._scheduler.timesteps,
            sigma.value,
            clean,
            solver,
            stack_trajectories(latents),
            denoised_tokens=None if tokens is None else (tokens == tokens.max())[..., None],
            sigma_to_clean=abs(sigma.to_clean),
        )

    def _continues(
        self,
        interval: SkippedInterval,
        origin: StepOrigin,
        arguments: dict[str, Any],
    ) -> bool:
        """Return True if this step follows an interval's last one, and nothing was changed."""
        scheduler = self._scheduler
        slots = solver_history_slots(scheduler)
        copied_slots = solver_history_slots(interval.solver)
        return (
            interval.timesteps is scheduler.timesteps
            and interval.solver.sigmas is scheduler.sigmas
            and interval.solver.step_index == scheduler.step_index
            and interval.origin.branches == origin.branches
            and interval.origin.step + 1 == origin.step
            and not origin.restarted
            and interval.trajectories.shape[1:] == arguments["sample"].shape
            # Nobody has reset the solver's history.
            and [slot.key for slot in copied_slots] == [slot.key for slot in slots]
            and (interval.denoised_tokens is None) == (arguments.get(PER_TOKEN) is None)
        )

    def _correct(
        self,
        interval: SkippedInterval,
        arguments: dict[str, Any],
    ) -> dict[str, torch.Tensor]:
        """Correct the scheduler's history; return the corrected arguments of the full step."""
        output = arguments["model_output"]
        sigma = self._sigma(interval.solver.step_index)
        interval.fit_slope(sigma, output)
        latent_correction = interval.latent_correction()
        # See the top of this file.
        output_correction = math.copysign(1.0, sigma.to_clean) * latent_correction
        for slot, copied in zip(
            solver_history_slots(self._scheduler),
            solver_history_slots(interval.solver),
            strict=True,
        ):
            history = Trajectories(*copied.tensor)
            slot.tensor = _sum(slot.tensor, history.corrected - history.as_computed)
        return {
            "model_output": _sum(output, output_correction),
            "sample": _sum(arguments["sample"], latent_correction),
        }

    def _sigma(self, step: int) -> StepSigma:
        sigmas = self._scheduler.sigmas
        has_version = isinstance(sigmas, torch.Tensor) and not sigmas.is_inference()
        version = sigmas._version if has_version else 0
        if self._sigmas.of is not sigmas or self._sigmas.version != version:
            self._sigmas = _ReadSigmas(sigmas, version, torch.as_tensor(sigmas).tolist())
        value = self._sigmas.values[step]
        clean = 1.0 if self._scheduler.config.get("invert_sigmas", False) else 0.0
        return StepSigma(value, value - clean)


@dataclass
class HistorySlot:
    """One tensor of a multistep solver's history, in the list or the attributes that hold it."""

    container: Any
    key: Any  # index of the list, or name of the attribute

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor in it now."""
        tensor: torch.Tensor = self.container[self.key]
        return tensor

    @tensor.setter
    def tensor(self, tensor: torch.Tensor) -> None:
        self.container[self.key] = tensor


def solver_history_slots(scheduler: Scheduler) -> list[HistorySlot]:
    """Return where a multistep solver now has tensors of the latents' size; none for Euler's."""
    attributes = vars(scheduler)
    outputs = attributes.get("model_outputs", [])
    slots = [HistorySlot(outputs, index) for index in range(len(outputs))]
    if "last_sample" in attributes:
        slots.append(HistorySlot(attributes, "last_sample"))
    return [slot for slot in slots if slot.tensor is not None]


def stack_trajectories(latents: torch.Tensor) -> torch.Tensor:
    """Return the stacked `Trajectories` of a full step: no slope has changed anything so far."""
    latents = latents.float()
    return torch.stack(Trajectories(latents, latents, torch.zeros_like(latents)))


def _sum(tensor: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    return (tensor.float() + change).to(tensor.dtype)


def held_bytes(scheduler: Scheduler, latents: torch.Tensor) -> int:
    """Return the bytes that an interval takes at most, in fp32 tensors of the latents' size."""
    history = len(getattr(scheduler, "model_outputs", [])) + hasattr(scheduler, "last_sample")
    return 4 * latents.numel() * (1 + 3 * (2 + history))


def solver_class(scheduler: Scheduler) -> type | None:
    """Return the class of diffusers among `SOLVERS` that a scheduler is of, or None."""
    bases = reversed(type(scheduler).__mro__)
    return next((base for base in bases if base.__name__ in SOLVERS), None)


def latents_of(stepped: Stepped) -> torch.Tensor:
    """Return the latents of a scheduler's step, in either form of its result."""
    return stepped.prev_sample if hasattr(stepped, "prev_sample") else stepped[0]

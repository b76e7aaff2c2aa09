"""Skipped steps of samplers that add noise: the clean sample is reused, not the model's output.

A model's output points at the noise in its latents. A sampler that adds noise replaces a part of
that noise, or all of it, from one step to the next, so the output of an earlier step points at
noise that is gone. The clean sample that the sampler computes of it stays about the same. A skipped
step is therefore given the output that leads from its own latents to the clean sample of the last
computed step, or a little further along the line through the last two. Measured on trained weights:
benchmarks/notes/noisy_samplers.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from chipsparse.skip.correction import GIVEN, Made

# Classes of diffusers by how they compute a clean sample. Those of `STRAIGHT_FLOW` go from noise to
# a clean sample by a straight line, whatever their config says of predictions.
STRAIGHT_FLOW = (
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchLCMScheduler",
    "LTXEulerAncestralRFScheduler",
)
# These add noise to a clean sample of constant size, so that the variance of the latents grows.
GROWING_VARIANCE = ("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler")
# These keep the variance of the latents, by cumulative products at the timesteps of the training.
CONSTANT_VARIANCE = (
    "DDIMScheduler",
    "DDIMParallelScheduler",
    "DDPMScheduler",
    "DDPMParallelScheduler",
    "LCMScheduler",
    "CogVideoXDDIMScheduler",
    "CogVideoXDPMScheduler",
)
# These have a `_sigma_to_alpha_sigma_t`, and do either by their config.
BY_THEIR_SIGMAS = (
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "SASolverScheduler",
)
# Of the noise before, these keep nothing in the latents. What they compute of clean samples jumps
# with the noise, and a line through two of these lost up to 1 dB.
ALL_NOISE_IS_NEW = ("FlowMatchEulerDiscreteScheduler", "FlowMatchLCMScheduler", "LCMScheduler")
# The part of the line through the last two clean samples: a skipped step that is r of their
# distance behind the last one goes on by `LINE` r / (1 + r) of their difference. Without the
# denominator it lost up to 4 dB in the long gaps of few full steps.
LINE = 0.5


class CleanSampleForm(NamedTuple):
    """A sampler's clean sample at one step: ``sample_scale * sample - output_scale * output``."""

    sample_scale: torch.Tensor | float
    output_scale: torch.Tensor | float
    level: torch.Tensor  # the noise in the latents, which falls to 0

    def clean(self, sample: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return the clean sample, in fp32, of latents and the model's output, of one shape."""
        return self.sample_scale * sample.float() - self.output_scale * output.float()

    def output(
        self,
        sample: torch.Tensor,
        clean: torch.Tensor,
        otherwise: torch.Tensor,
    ) -> torch.Tensor:
        """Return the output that leads from latents to a clean sample, in the dtype of `otherwise`.

        Latents without noise are their own clean sample, whatever the output: there it is that of
        `otherwise`.
        """
        scale = torch.as_tensor(self.output_scale, dtype=torch.float32, device=sample.device)
        leading = (self.sample_scale * sample.float() - clean) / scale
        return torch.where(scale == 0, otherwise.float(), leading).to(otherwise.dtype)


class _CleanSample(NamedTuple):
    """What a computed step predicts of the clean sample."""

    level: torch.Tensor  # of the noise in its latents
    tensor: torch.Tensor  # fp32
    is_full: bool  # all of the step was computed


def clean_sample_form(
    scheduler: Any,  # of diffusers
    step: int | None,  # its index; None where the scheduler does not count
    arguments: Mapping[str, Any],  # of the scheduler's `step`, by name
) -> CleanSampleForm | None:
    """Return how a scheduler computes its clean sample at a step; None where that is not known."""
    name = _known_name(scheduler)
    if name is None:
        return None
    config = scheduler.config
    prediction = config.get("prediction_type", "epsilon")
    if name in CONSTANT_VARIANCE:
        timestep = torch.as_tensor(arguments["timestep"]).to(scheduler.alphas_cumprod.device)
        product = scheduler.alphas_cumprod[timestep.long()]
        return _of_prediction(prediction, product**0.5, (1 - product) ** 0.5)
    if step is None:
        return None
    tokens = arguments.get("per_token_timesteps")
    if tokens is not None:
        level = (tokens / config.num_train_timesteps)[..., None]
        return CleanSampleForm(1.0, level, level)
    sigma = torch.as_tensor(scheduler.sigmas[step])
    if name in STRAIGHT_FLOW:
        distance = sigma - 1 if config.get("invert_sigmas") else sigma
        return CleanSampleForm(1.0, distance, distance.abs())
    if name in BY_THEIR_SIGMAS:
        return _of_prediction(prediction, *scheduler._sigma_to_alpha_sigma_t(sigma))
    if prediction == "epsilon":
        return CleanSampleForm(1.0, sigma, sigma)
    if prediction == "v_prediction":
        variance = sigma**2 + 1
        return CleanSampleForm(1 / variance, sigma / variance**0.5, sigma)
    return None


def _known_name(scheduler: Any) -> str | None:
    """Return the class of diffusers that a scheduler is of, or derived from; None for others."""
    known = {*STRAIGHT_FLOW, *GROWING_VARIANCE, *CONSTANT_VARIANCE, *BY_THEIR_SIGMAS}
    return next((base.__name__ for base in type(scheduler).__mro__ if base.__name__ in known), None)


def _of_prediction(
    prediction: str,
    signal: torch.Tensor,
    noise: torch.Tensor,
) -> CleanSampleForm | None:
    """Return the form for latents ``signal * clean + noise * (normal noise)``."""
    if prediction == "epsilon":
        return CleanSampleForm(1 / signal, noise / signal, noise)
    if prediction == "v_prediction":
        return CleanSampleForm(signal, noise, noise)
    if prediction == "sample":
        return CleanSampleForm(0.0, -1.0, noise)
    if prediction == "flow_prediction":
        return CleanSampleForm(1.0, noise, noise)
    return None


class NoisySteps:
    """The ``step`` of a scheduler, which reuses the clean sample at skipped steps if it adds noise.

    Whether noise is added is seen by the random numbers that a step draws, or is given: options,
    arguments and subclasses decide it, and it may begin and end within a generation.
    """

    def __init__(
        self,
        scheduler: Any,
        step: Callable[..., Any],  # its own, whatever that does besides
        parameters: Sequence[str],  # names of those of `step`, in their order
        # The origin of the step's outputs; None where it is not known, or nothing is skipped.
        origin: Callable[[], Made | None],
        # Is told of each computed step that adds noise whether its clean sample is known.
        noted: Callable[[Any, bool], None],
    ) -> None:
        self._scheduler = scheduler
        self._step = step
        self._parameters = parameters
        self._origin = origin
        self._noted = noted
        self._computed: list[_CleanSample] = []  # of the last computed steps, two at most
        self.adds_noise = False  # the last step did

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        origin = self._origin()
        arguments = dict(zip(self._parameters, args, strict=False)) | kwargs
        if origin is None or not arguments.keys() >= set(GIVEN):
            self.drop()
            return self._step(*args, **kwargs)
        sample = arguments["sample"]
        output = arguments["model_output"]
        if origin.kind == "reused":
            output = self._reused(sample, output, arguments)
            if "model_output" in kwargs:
                kwargs["model_output"] = output
            else:
                position = self._parameters.index("model_output")
                args = (*args[:position], output, *args[position + 1 :])
        generators = _generators(arguments, sample.device)
        before = [generator.get_state() for generator in generators]
        stepped = self._step(*args, **kwargs)
        drawn = any(
            not torch.equal(generator.get_state(), state)
            for generator, state in zip(generators, before, strict=True)
        )
        self.adds_noise = drawn or _is_given_noise(self._scheduler, arguments)
        if not self.adds_noise:
            self._computed.clear()
        elif origin.kind != "reused":
            self._keep(sample, output, arguments, origin)
        return stepped

    def drop(self) -> None:
        """Free the clean samples: the generation is over."""
        self._computed.clear()
        self.adds_noise = False

    def _keep(
        self,
        sample: torch.Tensor,
        output: torch.Tensor,
        arguments: Mapping[str, Any],
        origin: Made,
    ) -> None:
        """Keep the clean sample of a computed step, which the scheduler has counted."""
        counted = getattr(self._scheduler, "step_index", None)
        step = None if counted is None else counted - 1
        # An output with more channels than the latents has a variance, too.
        is_whole = output.shape == sample.shape
        form = clean_sample_form(self._scheduler, step, arguments) if is_whole else None
        before = [] if origin.restarted else self._computed[-1:]
        self._computed = []
        if form is not None:
            tensor = form.clean(sample, output)
            clean = _CleanSample(form.level, tensor, origin.kind == "full")
            self._computed = [*before, clean]
        self._noted(self._scheduler, form is not None)

    def _reused(
        self,
        sample: torch.Tensor,
        output: torch.Tensor,
        arguments: Mapping[str, Any],
    ) -> torch.Tensor:
        """Return the output that leads to the clean sample; the given one where none is known."""
        if not self._computed or self._computed[-1].tensor.shape != sample.shape:
            return output
        step = getattr(self._scheduler, "step_index", None)
        form = clean_sample_form(self._scheduler, step, arguments)
        if form is None:
            return output
        return form.output(sample, self._continued(form.level), output)

    def _continued(self, level: torch.Tensor) -> torch.Tensor:
        """Return the clean sample for a noise level behind that of the last computed step."""
        *before, last = self._computed
        has_line = (
            bool(before)
            and all(clean.is_full for clean in self._computed)
            and before[0].tensor.shape == last.tensor.shape
            and _known_name(self._scheduler) not in ALL_NOISE_IS_NEW
        )
        if not has_line:
            return last.tensor
        distance = (level - last.level) / (last.level - before[0].level)
        # Levels that are equal, or do not go on in one direction, have no line.
        goes_on = (distance > 0) & distance.isfinite()
        part = torch.where(goes_on, LINE * distance / (1 + distance), 0.0)
        return last.tensor + part * (last.tensor - before[0].tensor)


def _generators(arguments: Mapping[str, Any], device: torch.device) -> list[torch.Generator]:
    """Return what a step may draw its noise from: PyTorch's own generators, and given ones."""
    given = arguments.get("generator")
    generators = [torch.default_generator]
    if given is not None:
        generators += given if isinstance(given, (list, tuple)) else [given]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    return generators


def _is_given_noise(scheduler: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether a step's noise is an argument, or of a sampler with generators of its own."""
    given = arguments.get("variance_noise")
    return given is not None or getattr(scheduler, "noise_sampler", None) is not None


def clean_bytes(latents: torch.Tensor) -> int:
    """Return the bytes of the clean samples that are kept over skipped steps, two at most."""
    return 2 * 4 * latents.numel()


def step_parameters(scheduler: Any) -> tuple[str, ...]:
    """Return the names of the parameters of a scheduler's `step`, in the order of pipelines.

    A `step` of the user's may name them otherwise, or take anything: pipelines call it as that of
    the class of diffusers which it stands for.
    """
    own = [base for base in type(scheduler).__mro__ if base.__module__.startswith("diffusers.")]
    step = next((vars(base)["step"] for base in own if "step" in vars(base)), None)
    if step is not None:
        return tuple(inspect.signature(step).parameters)[1:]
    try:
        names = tuple(inspect.signature(scheduler.step).parameters)
    except ValueError:  # written in C
        return GIVEN
    return names if set(names) >= set(GIVEN) else GIVEN

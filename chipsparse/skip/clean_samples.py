"""Skipped steps of samplers that add noise: the clean sample is reused, not the model's output.

A model's output points at the noise in its latents. A sampler that adds noise replaces a part of
that noise, or all of it, from one step to the next, so the output of an earlier step points at
noise that is gone. The clean sample that the sampler computes from the output stays about the same.
So a skipped step is given another output: the one that leads from its own latents to the clean
sample of the last computed step. Between full steps it leads a little further, along the line
through their clean samples. Measured on trained weights: benchmarks/notes/noisy_samplers.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from chipsparse.skip.correction import PER_TOKEN, STEP_ARGUMENTS
from chipsparse.skip.scheduler import Scheduler, Stepped
from chipsparse.skip.step_log import StepKind, StepOrigin

# Classes of diffusers, by how they compute a clean sample. The first ones go from noise to a clean
# sample in a straight line, whatever prediction type their config has.
STRAIGHT_FLOW = (
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchLCMScheduler",
    "LTXEulerAncestralRFScheduler",
)
# Latents are a clean sample of constant size plus noise, so their variance grows with the noise.
GROWING_VARIANCE = ("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler")
# Latents have a constant variance, by cumulative products at the timesteps of the training.
CONSTANT_VARIANCE = (
    "DDIMScheduler",
    "DDIMParallelScheduler",
    "DDPMScheduler",
    "DDPMParallelScheduler",
    "LCMScheduler",
    "CogVideoXDDIMScheduler",
    "CogVideoXDPMScheduler",
)
# Latents are of either kind, by the config: `_sigma_to_alpha_sigma_t` has both scales.
BY_THEIR_SIGMAS = (
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "SASolverScheduler",
)
# Each step replaces all noise in the latents. Clean samples jump with the noise, and a line through
# two of them lost up to 1 dB.
ALL_NOISE_IS_NEW = ("FlowMatchEulerDiscreteScheduler", "FlowMatchLCMScheduler", "LCMScheduler")
# The line through the last two clean samples, damped. If the sigma of a skipped step is r times
# their difference of sigmas after the last one, `LINE` r / (1 + r) of the clean samples' difference
# is added. Without the denominator it lost up to 4 dB in the long intervals of few full steps.
LINE = 0.5


class CleanSampleForm(NamedTuple):
    """A sampler's clean sample at one step: ``sample_scale * sample - output_scale * output``."""

    sample_scale: torch.Tensor | float
    output_scale: torch.Tensor | float
    sigma: torch.Tensor  # the noise in the latents, which falls to 0

    def clean(self, sample: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return the clean sample, in fp32, by latents and the model's output, of one shape."""
        return self.sample_scale * sample.float() - self.output_scale * output.float()

    def output(
        self,
        sample: torch.Tensor,
        clean: torch.Tensor,
        otherwise: torch.Tensor,
    ) -> torch.Tensor:
        """Return the output that leads from latents to a clean sample, in the dtype of `otherwise`.

        Latents without noise are their own clean sample, by any output: there it is `otherwise`.
        """
        scale = torch.as_tensor(self.output_scale, dtype=torch.float32, device=sample.device)
        leading = (self.sample_scale * sample.float() - clean) / scale
        return torch.where(scale == 0, otherwise.float(), leading).to(otherwise.dtype)


class _CleanSample(NamedTuple):
    """The clean sample that a computed step predicts."""

    sigma: torch.Tensor  # the noise in its latents
    tensor: torch.Tensor  # fp32
    is_full: bool  # the step was computed in full


def clean_sample_form(
    scheduler: Scheduler,  # of diffusers
    step: int | None,  # its index; None if the scheduler does not count
    arguments: Mapping[str, Any],  # of the scheduler's `step`, by name
) -> CleanSampleForm | None:
    """Return how a scheduler computes its clean sample at a step; None if that is not known."""
    name = _known_name(scheduler)
    if name is None:
        return None
    config = scheduler.config
    prediction = config.get("prediction_type", "epsilon")
    if name in CONSTANT_VARIANCE:
        timestep = torch.as_tensor(arguments["timestep"]).to(scheduler.alphas_cumprod.device)
        product = scheduler.alphas_cumprod[timestep.long()]
        return _form_of_prediction(prediction, product**0.5, (1 - product) ** 0.5)
    if step is None:
        return None
    tokens = arguments.get(PER_TOKEN)
    if tokens is not None:
        token_sigmas = (tokens / config.num_train_timesteps)[..., None]
        return CleanSampleForm(1.0, token_sigmas, token_sigmas)
    sigma = torch.as_tensor(scheduler.sigmas[step])
    if name in STRAIGHT_FLOW:
        sigma_to_clean = sigma - 1 if config.get("invert_sigmas") else sigma
        return CleanSampleForm(1.0, sigma_to_clean, sigma_to_clean.abs())
    if name in BY_THEIR_SIGMAS:
        return _form_of_prediction(prediction, *scheduler._sigma_to_alpha_sigma_t(sigma))
    if prediction == "epsilon":
        return CleanSampleForm(1.0, sigma, sigma)
    if prediction == "v_prediction":
        variance = sigma**2 + 1
        return CleanSampleForm(1 / variance, sigma / variance**0.5, sigma)
    return None


def _known_name(scheduler: Scheduler) -> str | None:
    """Return the class of diffusers that a scheduler is of, or derived from; None for others."""
    known = {*STRAIGHT_FLOW, *GROWING_VARIANCE, *CONSTANT_VARIANCE, *BY_THEIR_SIGMAS}
    return next((base.__name__ for base in type(scheduler).__mro__ if base.__name__ in known), None)


def _form_of_prediction(
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

    A step adds noise if it draws random numbers, or is given some. Options, arguments and
    subclasses decide that, and it may change within a generation.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        step: Callable[..., Any],  # its own, whatever else that does
        parameters: Sequence[str],  # the names of the parameters of `step`, in their order
        # Returns the origin of the step's outputs; None if it is unknown, or nothing is skipped.
        origin: Callable[[], StepOrigin | None],
        # Is told at each computed step that adds noise whether its clean sample is known.
        noted: Callable[[Scheduler, bool], None],
    ) -> None:
        self._scheduler = scheduler
        self._step = step
        self._parameters = parameters
        self._origin = origin
        self._noted = noted
        self._computed: list[_CleanSample] = []  # of the last computed steps, two at most
        self.adds_noise = False  # the last step added noise

    def __call__(self, *args: Any, **kwargs: Any) -> Stepped:
        """Step the scheduler, at a skipped step with the output that leads to the clean sample."""
        origin = self._origin()
        arguments = dict(zip(self._parameters, args, strict=False)) | kwargs
        if origin is None or not arguments.keys() >= set(STEP_ARGUMENTS):
            self.drop()
            unchanged: Stepped = self._step(*args, **kwargs)
            return unchanged
        sample = arguments["sample"]
        output = arguments["model_output"]
        if origin.kind is StepKind.REUSED:
            output = self._reused(sample, output, arguments)
            if "model_output" in kwargs:
                kwargs["model_output"] = output
            else:
                position = self._parameters.index("model_output")
                args = (*args[:position], output, *args[position + 1 :])
        generators = _generators(arguments, sample.device)
        before = [generator.get_state() for generator in generators]
        stepped: Stepped = self._step(*args, **kwargs)
        drawn = any(
            not torch.equal(generator.get_state(), state)
            for generator, state in zip(generators, before, strict=True)
        )
        self.adds_noise = drawn or _is_given_noise(self._scheduler, arguments)
        if not self.adds_noise:
            self._computed.clear()
        elif origin.kind is not StepKind.REUSED:
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
        origin: StepOrigin,
    ) -> None:
        """Keep the clean sample of a computed step, after which the scheduler was stepped."""
        counted = getattr(self._scheduler, "step_index", None)
        step = None if counted is None else counted - 1
        # An output with more channels than the latents also predicts a variance.
        is_whole = output.shape == sample.shape
        form = clean_sample_form(self._scheduler, step, arguments) if is_whole else None
        before = [] if origin.restarted else self._computed[-1:]
        self._computed = []
        if form is not None:
            tensor = form.clean(sample, output)
            clean = _CleanSample(form.sigma, tensor, origin.kind is StepKind.FULL)
            self._computed = [*before, clean]
        self._noted(self._scheduler, form is not None)

    def _reused(
        self,
        sample: torch.Tensor,
        output: torch.Tensor,
        arguments: Mapping[str, Any],
    ) -> torch.Tensor:
        """Return the output that leads to the clean sample; the given one if none is known."""
        if not self._computed or self._computed[-1].tensor.shape != sample.shape:
            return output
        step = getattr(self._scheduler, "step_index", None)
        form = clean_sample_form(self._scheduler, step, arguments)
        if form is None:
            return output
        return form.output(sample, self._continued(form.sigma), output)

    def _continued(self, sigma: torch.Tensor) -> torch.Tensor:
        """Return the clean sample for a sigma after that of the last computed step."""
        *before, last = self._computed
        has_line = (
            bool(before)
            and all(clean.is_full for clean in self._computed)
            and before[0].tensor.shape == last.tensor.shape
            and _known_name(self._scheduler) not in ALL_NOISE_IS_NEW
        )
        if not has_line:
            return last.tensor
        ratio = (sigma - last.sigma) / (last.sigma - before[0].sigma)
        # Sigmas that are equal, or turn round, have no line.
        has_ratio = (ratio > 0) & ratio.isfinite()
        fraction = torch.where(has_ratio, LINE * ratio / (1 + ratio), 0.0)
        return last.tensor + fraction * (last.tensor - before[0].tensor)


def _generators(arguments: Mapping[str, Any], device: torch.device) -> list[torch.Generator]:
    """Return the generators that a step may draw noise from: PyTorch's own, and given ones."""
    given = arguments.get("generator")
    generators = [torch.default_generator]
    if given is not None:
        generators += given if isinstance(given, (list, tuple)) else [given]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    return generators


def _is_given_noise(scheduler: Scheduler, arguments: Mapping[str, Any]) -> bool:
    """Return whether a step's noise is an argument, or the scheduler has generators of its own."""
    given = arguments.get("variance_noise")
    return given is not None or getattr(scheduler, "noise_sampler", None) is not None


def clean_bytes(latents: torch.Tensor) -> int:
    """Return the bytes of the clean samples that are kept over skipped steps, two at most."""
    return 2 * 4 * latents.numel()


def step_parameters(scheduler: Scheduler) -> tuple[str, ...]:
    """Return the names of the parameters of a scheduler's `step`, in the order of pipelines.

    A `step` of the user's may have other names, or take any arguments. Pipelines call it like the
    one of its base class in diffusers.
    """
    bases = [base for base in type(scheduler).__mro__ if base.__module__.startswith("diffusers.")]
    step = next((vars(base)["step"] for base in bases if "step" in vars(base)), None)
    if step is not None:
        return tuple(inspect.signature(step).parameters)[1:]
    try:
        names = tuple(inspect.signature(scheduler.step).parameters)
    except ValueError:  # written in C
        return STEP_ARGUMENTS
    return names if set(names) >= set(STEP_ARGUMENTS) else STEP_ARGUMENTS

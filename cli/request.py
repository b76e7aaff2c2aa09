"""One generation, resolved from the options before any weight is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import ImageOps
from PIL.Image import Image, Resampling

from chipsparse.cli import plan as planning
from chipsparse.cli.errors import UserError, results_alone, user_errors
from chipsparse.cli.model.description import (
    ModelDescription,
    choose_device,
    choose_dtype,
    describe_model,
    quiet_libraries,
)
from chipsparse.cli.model.loading import load_pipeline
from chipsparse.cli.model.lora import load_loras
from chipsparse.cli.model.schedulers import choose_scheduler
from chipsparse.cli.model.weights import weights_digest
from chipsparse.cli.options import GenerateOptions, GenerationOptions, check_serves, is_here
from chipsparse.cli.progress import ProgressDisplay, silent_display
from chipsparse.cli.ranks import Rank
from chipsparse.cli.settings import (
    GenerationSettings,
    latent_sizes,
    resolve_settings,
    unused_defaults,
)
from chipsparse.cli.views.names import name_of
from chipsparse.cli.views.units import sharing_text
from chipsparse.common.machine import device_name, package_version
from chipsparse.common.version import __version__
from chipsparse.experiments.clips import ClipMaker, step_costs
from chipsparse.pipelines.registry import FAMILIES
from chipsparse.profiles import profile as profiles
from chipsparse.profiles.tuned_range import digest, outside

if TYPE_CHECKING:
    from chipsparse.parallel.degrees import Parallel
    from chipsparse.pipelines.call import Pipeline

PACKAGES = ("diffusers", "transformers", "triton")
IN_PYTHON = "generate has nothing for it; use it in Python"


@dataclass(frozen=True)
class Place:
    """The model of a command, and where and in what it computes."""

    model: ModelDescription
    device: torch.device
    dtype: torch.dtype
    here: bool = True  # this machine has the device
    parallel: Parallel | None = None  # None for one process

    @property
    def dtype_name(self) -> str:
        """The dtype as options and records write it, such as bfloat16."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class Request(Place):
    """A generation that was resolved."""

    options: GenerationOptions
    profile: profiles.Profile | None  # None where the unpatched model runs without one
    settings: GenerationSettings
    image: Image | None  # that it starts from, in the size that is made
    scheduler: Any | None  # that replaces the model's own
    first: int  # step that is computed first, more than 0 from an image
    steps: int  # that are computed
    planned: planning.PlannedGeneration | None  # None where the model's own code decides
    too_few_steps: str | None  # why nothing will run sparse, if that is known by now

    @property
    def generate_options(self) -> GenerateOptions:
        """The options, where they are those of ``generate``."""
        assert isinstance(self.options, GenerateOptions)
        return self.options

    @property
    def step_costs(self) -> list[float]:
        """The cost of each computed step, relative to the others; empty where not known."""
        return [] if self.planned is None else step_costs(self.planned.plan, first=self.first)

    @cached_property
    def out_of_range(self) -> list[str]:
        """The differences from the generations that the profile was tuned for."""
        profile = self.profile
        if profile is None or profile.tuned is None or self.options.dense:
            return []
        config = {"transformer_config": digest(self.model.transformer_config)}
        return outside(profile.tuned, self.tuned_facts | config)

    @property
    def tuned_facts(self) -> dict[str, Any]:
        """The part of a profile's range that is not the model; no device that is not here."""
        values = self.settings.model_dump(exclude={"max_sequence_length"})
        values |= {"flow_shift": self.options.flow_shift, "dtype": self.dtype_name}
        return values | ({"device": device_name(self.device)} if self.here else {})

    @cached_property
    def warnings(self) -> list[str]:
        """The sentences to be read before anything is computed."""
        profile = self.profile
        texts = [self.too_few_steps]
        if profile is not None:
            texts += [profile.instead, *unused_defaults(self.model, profile)]
        if profile is not None and profile.is_general and not self.options.dense:
            texts.append(
                f"there is no profile for the model class {self.model.transformer_class}: "
                f"{profile.quality} is made for no model in particular",
            )
        if profile is not None and self.out_of_range:
            texts.append(
                f"{profile.source} was tuned for other generations than this one "
                f"({'; '.join(self.out_of_range)}): its quality and speed were not measured here",
            )
        return [text for text in texts if text is not None]

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The facts that all clips have in common; none of them tells whose machine it was."""
        return {
            "model": name_of(self.model.location),
            "pipeline_class": self.model.pipeline_class.__name__,
            "transformer_class": self.model.transformer_class,
            "transformer_config": digest(self.model.transformer_config),
            "settings": self.settings.model_dump(),
            "flow_shift": self.options.flow_shift,
            "device": device_name(self.device),
            "dtype": self.dtype_name,
            "sharing": "" if self.parallel is None else sharing_text(self.parallel),
            "versions": {
                "chipsparse": __version__,
                "torch": str(torch.__version__),
                **{name: package_version(name) for name in PACKAGES},
            },
        }

    @property
    def measured_with(self) -> dict[str, Any]:
        """The same for a results file, by names without groups, and with the digest of weights."""
        facts = dict(self.facts)
        groups = facts.pop("settings") | facts.pop("versions")
        return {**facts, **groups, "weights": weights_digest(self.model)}

    def pipeline_call(self, prompt: str) -> dict[str, Any]:
        """Return all arguments of the pipeline's call for a prompt, generator left out."""
        values = {
            "prompt": prompt,
            "negative_prompt": self.options.negative_prompt,
            "image": self.image,
            "strength": self.options.strength,
        }
        if values["negative_prompt"] is None and (self.settings.true_cfg_scale or 0) > 1:
            values["negative_prompt"] = ""  # without one, such a pipeline leaves guidance out
        given = {name: value for name, value in values.items() if value is not None}
        return {**given, **self.settings.call_arguments()}

    def maker(self, display: ProgressDisplay, *, plain_lines: int = 5) -> ClipMaker:
        """Return what makes clips of this request, for experiments."""
        steps = self.settings.num_inference_steps
        return ClipMaker(self.load, self.pipeline_call, steps, display, plain_lines)

    def load(self) -> Pipeline:
        """Return the pipeline with its scheduler and LoRAs, on the device."""
        pipe = load_pipeline(
            self.model,
            device=self.device,
            dtype=self.dtype,
            scheduler=self.scheduler,
        )
        if self.options.loras:
            load_loras(pipe, self.options.loras)
        return pipe


@contextmanager
def quiet_display(*, debug: bool, shown: bool = True) -> Iterator[ProgressDisplay]:
    """Give the display of a command; keep libraries quiet and the standard output free."""
    progress = ProgressDisplay() if shown else silent_display()
    with results_alone(), progress as display, quiet_libraries(debug=debug):
        yield display


@contextmanager
def working(options: GenerationOptions, rank: Rank) -> Iterator[tuple[Place, ProgressDisplay]]:
    """Look the model up, and give it with the display of the command."""
    with quiet_display(debug=options.debug, shown=rank.writes) as display:
        device = rank.device(choose_device(options.device))
        yield place_on(device, options, display, parallel=rank.parallel), display


def place_on(
    device: torch.device,
    options: GenerationOptions,
    display: ProgressDisplay,
    *,
    here: bool = True,
    parallel: Parallel | None = None,
) -> Place:
    """Return what the files of ``--model`` say, to be computed on a device; raise `UserError`."""
    options.check_budgets(on_gpu=device.type == "cuda")
    location = str(profiles.bundled_model()) if options.model is None else options.model
    text = f"looking up {location} on the Hugging Face hub"
    with nullcontext() if is_here(location) else display.stage(text):
        model = describe_model(location)
    return Place(model, device, choose_dtype(options.dtype, device), here, parallel)


def resolve(
    options: GenerationOptions,
    place: Place,
    *,
    instead: str | None = IN_PYTHON,
    optional: bool | None = None,
) -> Request:
    """Return the generation that the options ask for; raise `UserError`.

    ``instead`` is the way out where the pipeline cannot run on a prompt; None leaves that
    unchecked. ``optional``: there may be no profile; None: where the unpatched model runs.
    """
    model = place.model if options.image is None else place.model.from_image()
    if instead is not None:
        _check_inputs(options, model, instead)
    optional = options.dense if optional is None else optional
    profile = choose_profile(options, model, optional=optional)
    defaults = profiles.GenerationDefaults() if profile is None else profile.generation
    image = options.input_image()
    settings = resolve_settings(options, model, defaults)
    if image is not None:
        size = (settings.width or image.width, settings.height or image.height)
        image = ImageOps.fit(image, size, Resampling.LANCZOS)
    sparse = not options.dense and instead is not None
    scheduler = choose_scheduler(model, options, sparse=sparse)
    strength = options.strength or model.default("strength")

    def first_step(steps: int) -> int:
        if image is None or strength is None:
            return 0
        return int(max(steps - min(steps * strength, steps), 0))  # as diffusers has it

    planned = too_few = None
    known = model.transformer_class in FAMILIES and None not in latent_sizes(settings, model)
    if profile is not None and known:
        planned = planning.plan_generation(settings, model, profile)
    planning.check_sharing(model, planned, place.parallel)
    if planned is not None and not options.dense:
        too_few = planning.too_few_steps(planned.plan, first_step)
    if too_few is not None and options.strict:
        raise UserError(too_few)
    if planned is not None and place.device.type == "cpu" and instead is not None:
        planning.check_memory(planned, settings.num_frames, model, place.dtype)
    first = first_step(settings.num_inference_steps)
    return Request(
        **{**vars(place), "model": model},
        options=options,
        profile=profile,
        settings=settings,
        image=image,
        scheduler=scheduler,
        first=first,
        steps=planning.called_steps(settings, model) - first,
        planned=planned,
        too_few_steps=too_few,
    )


def _check_inputs(options: GenerationOptions, model: ModelDescription, instead: str) -> None:
    """Raise `UserError`, with a way out, where the pipeline cannot run on prompt and image."""
    name = model.pipeline_class.__name__
    if options.strength is not None and not model.accepts("strength"):
        raise UserError(f"{name} has no strength; leave --strength out")
    missing = model.needed_arguments() - {"prompt"}
    if options.image is None and missing == {"image"}:
        way = "give one with --image" if instead is IN_PYTHON else instead
        raise UserError(f"{name} starts from an image; {way}")
    if options.image is not None:
        missing -= {"image"}
    if missing:
        raise UserError(f"{name} also needs {', '.join(sorted(missing))}; {instead}")
    if model.lacks_text_encoder():
        raise UserError(
            f"{model.location} has no text encoder, so {name} cannot read a prompt; {instead}",
        )


# The profile.


def choose_profile(
    options: GenerationOptions,
    model: ModelDescription,
    *,
    optional: bool = False,
) -> profiles.Profile | None:
    """Return the profile of ``--config`` or of the model: its ``--quality``, with memory budgets.

    Where there is none: None if that is ``optional``, else `UserError`.
    """
    kind = model.transformer_class
    own = Path(model.location) / profiles.MODEL_PROFILE_NAME
    with user_errors(ValueError):
        if options.config is not None:
            profile = profiles.load_profile(options.config)
        elif kind in profiles.profile_classes() or own.exists():
            profile = profiles.find_profile(model.location, kind, experts=model.experts)
        elif options.quality is not None:
            profile = profiles.default_profile()
        elif optional:
            return None
        else:
            raise UserError(
                f"there is no profile for the model class {kind} (chipsparse models lists those "
                f"that have one); give one with --config, or --quality {profiles.DEFAULT_QUALITY}, "
                "which is made for no model in particular",
            )
        profile = profile.for_steps(options.steps, experts=model.experts)
        if options.quality is not None:
            profile = profile.of_quality(options.quality)
        check_serves(profile, kind, model.location)
        return profile.override(options.memory_budgets())

"""Everything about a generation that is settled before any weight is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from PIL.Image import Image

import chipsparse
from chipsparse.cli.command_line import command_words, settled_values
from chipsparse.cli.commands.generate import GenerateOptions
from chipsparse.cli.errors import UserError
from chipsparse.cli.generate.series import Item
from chipsparse.cli.generation.input_image import fitted, size_like
from chipsparse.cli.media.write import check_kind
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.model.schedulers import choose_scheduler
from chipsparse.cli.planning import profile_range
from chipsparse.cli.planning.planned import PlannedGeneration, called_steps, planned_if_known
from chipsparse.cli.planning.request import (
    check_prompt_is_enough,
    choose_profile,
    device_and_dtype,
    look_up,
)
from chipsparse.cli.planning.room import check_room
from chipsparse.cli.planning.settings import (
    GenerationSettings,
    resolve_settings,
    size_multiples,
    unused_defaults,
    usual_size,
)
from chipsparse.cli.planning.sparse_steps import too_few_steps
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.ranks.sharing import check_sharing
from chipsparse.experiments.work_share import step_costs
from chipsparse.parallel.degrees import Parallel
from chipsparse.pipelines.registry import ADAPTERS
from chipsparse.profiles.profile import GenerationDefaults, Profile

IN_PYTHON = "generate has nothing for it; use it in Python"


@dataclass(frozen=True)
class Job:
    """What `prepare` settled.

    Attributes:
        profile: what is computed; None where the unpatched model runs, and has none.
        image: that it starts from, in the size that is made; None without ``--image``.
        scheduler: that replaces the model's own; None: it stays.
        steps: that are computed: not all of the schedule where an image is given.
        planned: what the configs tell of it; None where the model's own code decides.
        step_costs: what each of them takes, relative to the others; none where that is not known.
        too_few_steps: why nothing will run sparse, if that is known by now.
        out_of_range: what the profile was not tuned for; nothing where it is not used.
    """

    options: GenerateOptions
    device: torch.device
    dtype: torch.dtype
    model: ModelDescription
    profile: Profile | None
    settings: GenerationSettings
    image: Image | None
    scheduler: Any | None
    steps: int
    planned: PlannedGeneration | None
    step_costs: list[float]
    too_few_steps: str | None
    out_of_range: list[str]

    @property
    def warnings(self) -> list[str]:
        """What to know before the generation begins, one sentence each."""
        instead = None if self.profile is None else self.profile.instead
        found = [each for each in (instead, self.too_few_steps) if each is not None]
        if self.profile is not None and self.profile.is_general and not self.options.dense:
            found.append(
                f"there is no profile for the model class {self.model.transformer_class}: "
                f"{self.profile.quality} is made for no model in particular"
            )
        if self.profile is not None:
            found += unused_defaults(self.model, self.profile)
        if self.out_of_range:
            assert self.profile is not None
            found.append(profile_range.sentence(self.profile, self.out_of_range))
        steps = self.settings.num_inference_steps
        warnings = (lora.steps_warning(steps) for lora in self.options.loras)
        return [*found, *(each for each in warnings if each is not None)]

    @property
    def image_arguments(self) -> dict[str, Any]:
        """What the pipeline's call gets about the image that it starts from."""
        found = {"image": self.image, "strength": self.options.strength}
        return {name: value for name, value in found.items() if value is not None}

    def as_json(self, item: Item, warnings: list[str] | None = None) -> dict[str, Any]:
        """The request part of `--json` and of the report, with ``warnings`` about this clip."""
        options = self.options
        return {
            "chipsparse": chipsparse.__version__,
            "mode": options.mode,
            "prompt": item.prompt,
            "negative_prompt": options.negative_prompt,
            "image": None if options.image is None else str(options.image),
            "strength": options.strength,
            "model": self.model.location,
            "loras": [{"file": str(lora.file), "scale": lora.scale} for lora in options.loras],
            "scheduler": None if options.scheduler is None else type(self.scheduler).__name__,
            "flow_shift": options.flow_shift,
            "pipeline_class": self.model.pipeline_class.__name__,
            "transformer_class": self.model.transformer_class,
            "profile": None if self.profile is None else self.profile.source,
            "quality": None if self.profile is None else self.profile.quality,
            "out_of_range": self.out_of_range,
            "warnings": [*self.warnings, *(warnings or [])],
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "seed": item.seed,
            "fps": options.fps,
            "settings": dataclasses.asdict(self.settings),
            "command": self.command(item),
        }

    def command(self, item: Item) -> list[str]:
        """The words of the command that makes it again, whatever profile or device is here."""
        settled = {
            "prompt": item.prompt,
            "prompts": None,
            "num": None,
            "seed": item.seed,
            "output": item.output,
            "report": item.report,
            **settled_values(self.settings, self.device, self.dtype, self.options.gpus),
        }
        if self.settings.num_frames is None:
            settled["fps"] = None
        return command_words("generate", self.options, settled)


def prepare(options: GenerateOptions, display: ProgressDisplay) -> Job:
    """Settles a generation; raises `UserError`."""
    device, dtype = device_and_dtype(options)
    return settle(options, look_up(options, display), device, dtype)


def check_options_shared(
    options: GenerateOptions, parallel: Parallel, display: ProgressDisplay
) -> None:
    """Raises `UserError` where so many processes cannot share it; loads no weight."""
    check_shared(prepare(options, display), parallel)


def check_shared(job: Job, parallel: Parallel | None) -> None:
    """Raises `UserError` where so many processes cannot share the generation of a job."""
    if parallel is not None and job.options.dense:
        raise UserError("several processes share the sparse run, which --dense leaves out")
    check_sharing(job.model, job.planned, parallel)


def settle(
    options: GenerateOptions, model: ModelDescription, device: torch.device, dtype: torch.dtype
) -> Job:
    """Settles a generation with a model whose files were read; raises `UserError`."""
    if options.image is not None:
        model = model.from_image()
    _check_inputs(options, model)
    profile = choose_profile(options, model, optional=options.dense)
    defaults = GenerationDefaults() if profile is None else profile.generation
    settings = resolve_settings(options, model, defaults)
    sized, image = options, None
    if options.input_image is not None:
        sized, image = _sized(options, options.input_image, settings, model)
        settings = resolve_settings(sized, model, defaults)
    video = model.accepts("num_frames")
    for item in options.items:
        check_kind(item.output, video=video)
    scheduler = choose_scheduler(
        model, options.scheduler, sparse=not options.dense, flow_shift=options.flow_shift
    )
    begin = _first_step(options, model)
    first = begin(settings.num_inference_steps)
    planned = planned_if_known(sized, model, profile)
    too_few = None
    if planned is not None and not options.dense:
        too_few = too_few_steps(planned.plan, begin)
    if too_few is not None and options.strict:
        raise UserError(too_few)
    if planned is not None and device.type == "cpu":
        check_room(planned, model, dtype)
    out_of_range = []
    if profile is not None and not options.dense:
        out_of_range = profile_range.out_of_range(
            profile, model, settings, device, dtype, flow_shift=options.flow_shift
        )
    return Job(
        options=options,
        device=device,
        dtype=dtype,
        model=model,
        profile=profile,
        settings=settings,
        image=image,
        scheduler=scheduler,
        steps=called_steps(settings, model) - first,
        planned=planned,
        step_costs=step_costs(planned.plan, first=first) if planned is not None else [],
        too_few_steps=too_few,
        out_of_range=out_of_range,
    )


def _check_inputs(options: GenerateOptions, model: ModelDescription) -> None:
    if options.strength is not None and not model.accepts("strength"):
        name = model.pipeline_class.__name__
        raise UserError(f"{name} has no strength; leave --strength out")
    if options.image is None and model.needed_arguments() - {"prompt"} == {"image"}:
        raise UserError(
            f"{model.pipeline_class.__name__} starts from an image; give one with --image"
        )
    given = frozenset() if options.image is None else frozenset({"image"})
    check_prompt_is_enough(model, IN_PYTHON, given=given)


def _sized(
    options: GenerateOptions, image: Image, settings: GenerationSettings, model: ModelDescription
) -> tuple[GenerateOptions, Image]:
    """The options with height and width, and the image in that size."""
    adapter = ADAPTERS.get(model.transformer_class)
    default = None if adapter is None else adapter.default_latents
    height, width = size_like(
        image,
        asked=(options.height, options.width),
        usual=usual_size(settings, model, default=default) or (image.height, image.width),
        multiples=size_multiples(model),
    )
    return dataclasses.replace(options, height=height, width=width), fitted(image, (height, width))


def _first_step(options: GenerateOptions, model: ModelDescription) -> Callable[[int], int]:
    """The step that the pipeline begins with, of so many: later the more an image is to remain."""
    strength = options.strength or model.default("strength")
    if options.image is None or strength is None:
        return lambda _: 0
    return lambda steps: int(max(steps - min(steps * strength, steps), 0))  # as diffusers has it

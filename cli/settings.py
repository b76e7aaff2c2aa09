"""The settings of one generation, and the sizes that a model can make.

Each setting comes from the options, else from the profile, else from the pipeline's own defaults.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from chipsparse.cli.errors import UserError
from chipsparse.cli.generate.record import Settings
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.options import GenerationOptions, option_name
from chipsparse.common.bounded import Index
from chipsparse.pipelines.model_sizes import (
    Size,
    check_sizes,
    frame_chunks,
    size_multiples,
    vae_factors,
)
from chipsparse.pipelines.registry import FAMILIES
from chipsparse.profiles.profile import GenerationDefaults, Profile

if TYPE_CHECKING:
    from PIL.Image import Image

ALIKE = ("height", "width", "guidance_scale", "negative_prompt")  # in options and in pipelines
OPTION_OF = {name: option_name(name) for name in ALIKE}
OPTION_OF |= {"num_frames": "--frames", "num_inference_steps": "--steps"}


class GenerationSettings(Settings):
    """The settings that a pipeline is called with; None where it has no such argument or decides.

    Nothing is checked here: options and profiles were.
    """

    num_inference_steps: Index

    def call_arguments(self) -> dict[str, Any]:
        """Return the arguments for the pipeline's call; the pipeline decides the others."""
        return self.model_dump(exclude_none=True)


def resolve_settings(
    options: GenerationOptions,
    model: ModelDescription,
    defaults: GenerationDefaults,
) -> GenerationSettings:
    """Return each value from the options, else the profile, else the pipeline's own default.

    The shape of an image to start from decides the size as far as the options do not. Raises
    `UserError` where the pipeline has no such argument, or the model cannot make such a size.
    """
    asked = {
        "height": options.height,
        "width": options.width,
        "num_frames": options.frames,
        "num_inference_steps": options.steps,
        guidance_argument(model): options.guidance_scale,
        "negative_prompt": options.negative_prompt,
    }
    pipeline = model.pipeline_class.__name__
    for name, value in asked.items():
        if value is not None and not model.accepts(name):
            raise UserError(f"{pipeline} has no {name}; leave {OPTION_OF[name]} out")
    values: dict[str, Any] = {}
    for name in GenerationSettings.model_fields:
        candidates = (asked.get(name), getattr(defaults, name), model.default(name))
        value = next((candidate for candidate in candidates if candidate is not None), None)
        values[name] = value if model.accepts(name) else None
    if not isinstance(values["num_inference_steps"], int):
        raise UserError(f"{pipeline} has no default for --steps; give --steps")
    settings = GenerationSettings.model_construct(**values)
    image = options.input_image()
    if image is not None:
        space, _ = vae_factors(model.vae_config)
        _, rows, columns = latent_sizes(settings, model)
        usual = image.height, image.width
        if rows is not None and columns is not None:
            usual = rows * space, columns * space
        height, width = size_like(image, options, usual, size_multiples(model))
        settings = settings.model_copy(update={"height": height, "width": width})
    if options.negative_prompt is not None:
        _check_guided(settings, model)
    check_sizes(settings, model)
    return settings


def unused_defaults(model: ModelDescription, profile: Profile) -> list[str]:
    """Return one sentence about the settings of a profile that the pipeline lacks, if any."""
    given = {n: v for n, v in dataclasses.asdict(profile.generation).items() if v is not None}
    unused = [f"generation.{n} ({v})" for n, v in given.items() if not model.accepts(n)]
    pipeline = model.pipeline_class.__name__
    return [f"{profile.source}: {pipeline} has no use for {', '.join(unused)}"] if unused else []


# Guidance.


def guidance_argument(model: ModelDescription) -> str:
    """Return the argument of the pipeline's call that ``--guidance-scale`` is for.

    A model that takes no guidance scale is given the classifier-free one.
    """
    embeds = model.transformer_config.get("guidance_embeds", True)
    return "true_cfg_scale" if model.accepts("true_cfg_scale") and not embeds else "guidance_scale"


def guiding_argument(model: ModelDescription) -> str | None:
    """Return the argument that, above 1, turns classifier-free guidance on; None: nothing does."""
    if model.has_guider:
        return "guidance_scale"
    family = FAMILIES.get(model.transformer_class)
    if family is not None:
        return family.guidance.argument
    return "true_cfg_scale" if model.accepts("true_cfg_scale") else "guidance_scale"


def _check_guided(settings: GenerationSettings, model: ModelDescription) -> None:
    """Raise `UserError` where a generation is known to have no classifier-free guidance."""
    argument = guiding_argument(model)
    scale = 0.0 if argument is None else getattr(settings, argument)
    if scale is None or scale > 1:
        return
    way = f"set generation.{argument} in a profile"
    if argument is None:
        way = "leave it out"
    elif argument == guidance_argument(model):
        way = "raise --guidance-scale"
    raise UserError(f"--negative-prompt has no effect without classifier-free guidance; {way}")


# Height, width and frames.


def size_like(image: Image, options: GenerationOptions, usual: Size, multiples: Size) -> Size:
    """Return the height and width to make of an image: its shape, unless the options say otherwise.

    A height or a width alone fixes the other by the shape. Where there is neither, there are as
    many pixels as of the ``usual`` size. Rounds to multiples of ``multiples``.
    """

    def rounded(length: float, multiple: int) -> int:
        return max(1, round(length / multiple)) * multiple

    shape = image.width / image.height
    height = options.height
    width = options.width
    if height is None and width is None:
        wide = math.sqrt(usual[0] * usual[1] * shape)
        return rounded(wide / shape, multiples[0]), rounded(wide, multiples[1])
    if height is None:
        assert width is not None
        return rounded(width / shape, multiples[0]), width
    return height, rounded(height * shape, multiples[1]) if width is None else width


def latent_sizes(
    settings: GenerationSettings,
    model: ModelDescription,
) -> tuple[int, int | None, int | None]:
    """Return frames, rows and columns of the latents; None where only the pipeline's code says."""
    config = model.transformer_config  # of CogVideoX, whose pipelines read their defaults there
    space, _ = vae_factors(model.vae_config)
    family = FAMILIES.get(model.transformer_class)
    default = None if family is None else family.default_latents
    usual = config.get("sample_frames", 1) if model.accepts("num_frames") else 1
    height = settings.height
    width = settings.width
    return (
        frame_chunks(model.vae_config).latents_of(settings.num_frames or usual),
        config.get("sample_height", default) if height is None else height // space,
        config.get("sample_width", default) if width is None else width // space,
    )

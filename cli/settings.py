"""From options, profile and pipeline defaults to the settings of one generation, checked."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chipsparse.cli.errors import UserError
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.options import GenerationOptions
from chipsparse.layout import Grid
from chipsparse.pipelines.registry import ADAPTERS
from chipsparse.profiles.profile import GenerationDefaults, Profile

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE_MULTIPLE = 16  # what diffusers' pipelines ask of every height and width
OPTION_OF = {
    "height": "--height",
    "width": "--width",
    "num_frames": "--frames",
    "num_inference_steps": "--steps",
    "guidance_scale": "--guidance-scale",
    "negative_prompt": "--negative-prompt",
}


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of one generation; None where the pipeline has no such argument or decides."""

    height: int | None
    width: int | None
    num_frames: int | None
    num_inference_steps: int
    guidance_scale: float | None
    true_cfg_scale: float | None
    max_sequence_length: int | None

    def call_arguments(self) -> dict[str, Any]:
        """The arguments to pass to the pipeline."""
        return {name: v for name, v in dataclasses.asdict(self).items() if v is not None}

    def pipeline_call(self, prompt: str, *, negative_prompt: str | None = None) -> dict[str, Any]:
        """All arguments of a call that makes this prompt's clip, generator left out."""
        arguments = {"prompt": prompt, **self.call_arguments()}
        if negative_prompt is not None:
            arguments["negative_prompt"] = negative_prompt
        elif (self.true_cfg_scale or 0) > 1:
            arguments["negative_prompt"] = ""  # without one, such a pipeline leaves guidance out
        return arguments


def resolve_settings(
    options: GenerationOptions,
    model: ModelDescription,
    defaults: GenerationDefaults,
    image: Image | None = None,
) -> GenerationSettings:
    """Return each value from the options, else the profile, else the pipeline's own default.

    Args:
        image: that it starts from, whose shape decides the size as far as the options do not.

    Raises:
        UserError: the pipeline has no such argument, or the model cannot make such a size.
    """
    asked: dict[str, Any] = {
        "height": options.height,
        "width": options.width,
        "num_frames": options.frames,
        "num_inference_steps": options.steps,
        "guidance_scale": None,
        "true_cfg_scale": None,
        "max_sequence_length": None,
    }
    asked[guidance_argument(model)] = options.guidance_scale
    for name, value in {**asked, "negative_prompt": options.negative_prompt}.items():
        if value is not None and not model.accepts(name):
            raise UserError(
                f"{model.pipeline_class.__name__} has no {name}; leave {OPTION_OF[name]} out"
            )
    values: dict[str, Any] = {}
    for name, value in asked.items():
        candidates = (value, getattr(defaults, name), model.default(name))
        chosen = next((candidate for candidate in candidates if candidate is not None), None)
        values[name] = chosen if model.accepts(name) else None
    if not isinstance(values["num_inference_steps"], int):
        raise UserError(f"{model.pipeline_class.__name__} has no default for --steps; give --steps")
    if image is not None:
        own = (image.height, image.width)
        usual = usual_size(GenerationSettings(**values), model)
        values["height"], values["width"] = size_like(
            image,
            asked=(options.height, options.width),
            usual=usual or own,
            multiples=size_multiples(model),
        )
    settings = GenerationSettings(**values)
    if options.negative_prompt is not None:
        _check_guided(settings, model)
    check_sizes(settings, model)
    return settings


def size_like(
    image: Image,
    *,
    asked: tuple[int | None, int | None],
    usual: tuple[int, int],
    multiples: tuple[int, int],
) -> tuple[int, int]:
    """Return the height and width to make of an image: its shape, unless others are asked for.

    Args:
        asked: height and width that the user typed; one alone fixes the other by the shape.
        usual: what the profile or the pipeline makes, which fixes how many pixels there are where
            neither is asked for.
        multiples: of which height and width must be.
    """

    def rounded(length: float, multiple: int) -> int:
        return max(1, round(length / multiple)) * multiple

    shape = image.width / image.height
    height, width = asked
    if height is None and width is None:
        wide = math.sqrt(usual[0] * usual[1] * shape)
        return rounded(wide / shape, multiples[0]), rounded(wide, multiples[1])
    if height is None:
        return rounded(asked[1] / shape, multiples[0]), asked[1]  # type: ignore[operator, return-value]
    return height, rounded(height * shape, multiples[1]) if width is None else width


def guiding_argument(model: ModelDescription) -> str | None:
    """The argument of the pipeline's call that, above 1, turns classifier-free guidance on."""
    adapter = ADAPTERS.get(model.transformer_class)
    if model.has_guider:
        return "guidance_scale"
    if adapter is None:
        return "true_cfg_scale" if model.accepts("true_cfg_scale") else "guidance_scale"
    return adapter.guidance_argument


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


def unused_defaults(model: ModelDescription, profile: Profile) -> list[str]:
    """Return one sentence about the settings of a profile that the pipeline lacks, if any."""
    values = dataclasses.asdict(profile.generation).items()
    unused = [
        f"generation.{name} ({value})"
        for name, value in values
        if value is not None and not model.accepts(name)
    ]
    where, pipeline = profile.source, model.pipeline_class.__name__
    return [f"{where}: {pipeline} has no use for {', '.join(unused)}"] if unused else []


def guidance_argument(model: ModelDescription) -> str:
    """The argument of the pipeline's call that ``--guidance-scale`` is for.

    A model that takes no guidance scale is given the classifier-free one.
    """
    embeds = model.transformer_config.get("guidance_embeds", True)
    return "true_cfg_scale" if model.accepts("true_cfg_scale") and not embeds else "guidance_scale"


def check_sizes(settings: GenerationSettings, model: ModelDescription) -> None:
    """Raise `UserError` for a size that the model cannot do, naming the nearest that it can."""
    chunks, (time, *patches) = frame_chunks(model.vae_config), pixels_of_patch(model)
    longest = model.transformer_config.get("rope_max_seq_len")
    for name, patch, multiple in zip(
        ("height", "width"), patches, size_multiples(model), strict=True
    ):
        largest = longest * patch // multiple * multiple if longest else None
        _check(name, settings, multiple, 0, largest)
    if chunks.frames > 1:
        largest = chunks.frames_of(longest * time) if longest else None
        _check("num_frames", settings, chunks.frames, chunks.first, largest)


def size_multiples(model: ModelDescription) -> tuple[int, int]:
    """Return of which the height and the width of its frames must be multiples."""
    _, height, width = pixels_of_patch(model)
    return math.lcm(SIZE_MULTIPLE, height), math.lcm(SIZE_MULTIPLE, width)


def pixels_of_patch(model: ModelDescription) -> tuple[int, int, int]:
    """Return the latent frames, pixel rows and pixel columns that one token stands for."""
    space, _ = vae_factors(model.vae_config)
    time, height, width = patch_sizes(model.transformer_config)
    channels = model.vae_config.get("latent_channels", 0)
    single = model.transformer_config.get("patch_size") == 1
    # As FLUX does, the pipeline joins 2x2 latents to a token before the transformer.
    packs = single and model.transformer_config.get("in_channels") == 4 * channels > 0
    return time, (1 + packs) * space * height, (1 + packs) * space * width


def _check(
    name: str, settings: GenerationSettings, multiple: int, rest: int, largest: int | None
) -> None:
    """Raise `UserError` for a size that is no multiple plus a rest, or too large."""
    option, size = OPTION_OF[name], getattr(settings, name)
    if size is None:
        return
    if largest is not None and size > largest:
        raise UserError(f"{option} {size} is too large for this model; the largest is {largest}")
    if size >= 1 and size % multiple == rest % multiple:
        return
    smallest = rest or multiple
    below = (size - rest) // multiple * multiple + rest
    nearest = [n for n in (below, below + multiple) if n >= smallest]
    choices = " or ".join(str(n) for n in nearest if largest is None or n <= largest)
    form = f"a multiple of {multiple}" + (f" plus {rest}" if rest else "")
    raise UserError(
        f"{option} {size} does not fit this model, which needs {form}; use {choices or smallest}"
    )


def latent_sizes(settings: GenerationSettings, model: ModelDescription) -> Grid:
    """Return the frames, rows and columns of the latents; raise `UserError`."""
    rows, columns = _latent_sides(settings, model)
    if rows is None or columns is None:
        option = "--height" if rows is None else "--width"
        raise UserError(
            f"{model.pipeline_class.__name__} has no default for {option}; give {option}"
        )
    own = model.transformer_config
    frames = own.get("sample_frames", 1) if model.accepts("num_frames") else 1
    chunks = frame_chunks(model.vae_config)
    return chunks.latents_of(settings.num_frames or frames), rows, columns


def usual_size(settings: GenerationSettings, model: ModelDescription) -> tuple[int, int] | None:
    """Return the height and width in pixels; None where only the pipeline's code says."""
    space, _ = vae_factors(model.vae_config)
    rows, columns = _latent_sides(settings, model)
    return None if rows is None or columns is None else (rows * space, columns * space)


def _latent_sides(
    settings: GenerationSettings, model: ModelDescription
) -> tuple[int | None, int | None]:
    space, _ = vae_factors(model.vae_config)
    own = model.transformer_config  # of CogVideoX, whose pipelines read their defaults there
    adapter = ADAPTERS.get(model.transformer_class)
    default = None if adapter is None else adapter.default_latents
    rows, columns = (
        own.get(name, default) if size is None else size // space
        for name, size in (("sample_height", settings.height), ("sample_width", settings.width))
    )
    return rows, columns


@dataclass(frozen=True)
class FrameChunks:
    """How a VAE makes latent frames of a video's: some of the first ones, then chunk by chunk.

    Attributes:
        first: the first frames.
        frames: of every chunk behind them.
        latent_first: what it makes of the first ones.
        latents: what it makes of a chunk.
    """

    first: int
    frames: int
    latent_first: int = 1
    latents: int = 1

    def latents_of(self, frames: int) -> int:
        """Latent frames of a video."""
        chunks = (frames - self.first) // self.frames
        return max(1, chunks * self.latents + self.latent_first)

    def frames_of(self, latents: int) -> int:
        """The most frames of a video that has at most so many latent ones."""
        return (latents - self.latent_first) // self.latents * self.frames + self.first


def frame_chunks(config: dict[str, Any]) -> FrameChunks:
    """Return how a VAE with this config makes latent frames."""
    _, time = vae_factors(config)
    clip = config.get("clip_length")  # of MiniMax-H3: it encodes clips, and drops the last latents
    if clip is None:
        return FrameChunks(1, time)
    latents = -(-clip // time)
    return FrameChunks(latents, clip, latents - config["token_drop"], latents)


def vae_factors(config: dict[str, Any]) -> tuple[int, int]:
    """Return by how much the VAE shrinks space and time."""
    space = config.get("scale_factor_spatial") or config.get("spatial_compression_ratio")
    time = config.get("scale_factor_temporal") or config.get("temporal_compression_ratio")
    stages = config.get("temperal_downsample")
    if "spatial_expansions" in config:
        space, time = (math.prod(config[f"{name}_expansions"]) for name in ("spatial", "temporal"))
    if "spatial_downsample_factors" in config:
        space, time = (
            math.prod(config[f"{name}_downsample_factors"]) for name in ("spatial", "temporal")
        )
    scalings = config.get("spatio_temporal_scaling")  # of LTX-Video: stages that shrink both
    if scalings:
        both = 2 ** sum(map(bool, scalings))
        space, time = space or config["patch_size"] * both, time or config["patch_size_t"] * both
    if space is None:
        blocks = config.get("block_out_channels")
        space = 2 ** len(stages) if stages else 2 ** (len(blocks) - 1) if blocks else 1
    if time is None:
        time = 2 ** sum(bool(stage) for stage in stages) if stages else 1
    return int(space), int(time)


def patch_sizes(config: dict[str, Any]) -> tuple[int, int, int]:
    """Return the transformer's patch in time, height and width."""
    patch = config.get("patch_size") or 1
    if isinstance(patch, int):
        return int(config.get("patch_size_t") or 1), patch, patch
    if len(patch) == 2:
        return 1, int(patch[0]), int(patch[1])
    return int(patch[0]), int(patch[1]), int(patch[2])

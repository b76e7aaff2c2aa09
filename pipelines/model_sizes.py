"""The sizes that a model can make, from the configs of its transformer and its VAE alone.

Nothing here needs torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from chipsparse.common.errors import UserError

Size = tuple[int, int]  # height and width
SIZE_MULTIPLE = 16  # what diffusers' pipelines ask of every height and width
SIZE_OPTIONS = {"height": "--height", "width": "--width", "num_frames": "--frames"}


class Sizes(Protocol):
    """The sizes of a generation; None is not checked."""

    @property
    def height(self) -> int | None:
        """The height in pixels."""

    @property
    def width(self) -> int | None:
        """The width in pixels."""

    @property
    def num_frames(self) -> int | None:
        """The number of frames."""


class Configs(Protocol):
    """A model whose configs are known."""

    @property
    def transformer_config(self) -> dict[str, Any]:
        """The config of the transformer."""

    @property
    def vae_config(self) -> dict[str, Any]:
        """The config of the VAE; empty without one."""


def check_sizes(settings: Sizes, model: Configs) -> None:
    """Raise `UserError` for a size that the model cannot do, with the nearest that it can."""
    chunks = frame_chunks(model.vae_config)
    (time, *patches) = pixels_of_patch(model)
    longest = model.transformer_config.get("rope_max_seq_len")
    # Of each size: the number that it is to be a multiple of, plus a rest, and the largest.
    rules: dict[str, tuple[int, int, float]] = {}
    sides = zip(("height", "width"), patches, size_multiples(model), strict=True)
    for name, patch, multiple in sides:
        rules[name] = multiple, 0, longest * patch // multiple * multiple if longest else math.inf
    if chunks.frames > 1:
        most = chunks.frames_of(longest * time) if longest else math.inf
        rules["num_frames"] = chunks.frames, chunks.first, most
    for name, (multiple, rest, most) in rules.items():
        option = SIZE_OPTIONS[name]
        size = getattr(settings, name)
        if size is None:
            continue
        if size > most:
            raise UserError(f"{option} {size} is too large for this model; the largest is {most}")
        if size >= 1 and size % multiple == rest % multiple:
            continue
        smallest = rest or multiple
        below = (size - rest) // multiple * multiple + rest
        nearest = [n for n in (below, below + multiple) if smallest <= n <= most]
        form = f"a multiple of {multiple}" + (f" plus {rest}" if rest else "")
        fits = " or ".join(map(str, nearest or [smallest]))
        raise UserError(f"{option} {size} does not fit this model, which needs {form}; use {fits}")


def size_multiples(model: Configs) -> Size:
    """Return the numbers of which the height and the width of a frame must be multiples."""
    _, height, width = pixels_of_patch(model)
    return math.lcm(SIZE_MULTIPLE, height), math.lcm(SIZE_MULTIPLE, width)


def pixels_of_patch(model: Configs) -> tuple[int, int, int]:
    """Return the latent frames, pixel rows and pixel columns of one token."""
    space, _ = vae_factors(model.vae_config)
    config = model.transformer_config
    time, height, width = patch_sizes(config)
    channels = model.vae_config.get("latent_channels", 0)
    # As FLUX does, the pipeline packs 2x2 latents into a token before the transformer.
    packs = config.get("patch_size") == 1 and config.get("in_channels") == 4 * channels > 0
    side = 2 * space if packs else space
    return time, side * height, side * width


@dataclass(frozen=True)
class FrameChunks:
    """The way of a VAE from frames to latent frames: some first ones, then chunk by chunk."""

    first: int  # the first frames
    frames: int  # of every chunk behind them
    latent_first: int = 1  # latent frames of the first ones
    latents: int = 1  # latent frames of a chunk

    def latents_of(self, frames: int) -> int:
        """Return the latent frames of a video, at least 1; an incomplete chunk has none."""
        chunks = (frames - self.first) // self.frames
        return max(1, chunks * self.latents + self.latent_first)

    def frames_of(self, latents: int) -> int:
        """Return the most frames of a video that has at most this number of latent ones."""
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
    for kind in ("expansions", "downsample_factors"):
        if f"spatial_{kind}" in config:
            space, time = (math.prod(config[f"{axis}_{kind}"]) for axis in ("spatial", "temporal"))
    scalings = config.get("spatio_temporal_scaling")  # of LTX-Video: stages that shrink both
    if scalings:
        both = 2 ** sum(map(bool, scalings))
        space = space or config["patch_size"] * both
        time = time or config["patch_size_t"] * both
    stages = config.get("temperal_downsample") or ()
    blocks = config.get("block_out_channels") or [1]
    space = space or 2 ** (len(stages) or len(blocks) - 1)
    return int(space), int(time or 2 ** sum(map(bool, stages)))


def patch_sizes(config: dict[str, Any]) -> tuple[int, int, int]:
    """Return the transformer's patch in time, height and width."""
    patch = config.get("patch_size") or 1
    if isinstance(patch, int):
        patch = [config.get("patch_size_t") or 1, patch, patch]
    time, height, width = [1, *patch] if len(patch) == 2 else patch
    return int(time), int(height), int(width)

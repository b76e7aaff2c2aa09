"""A model family for the tests that all adapters pass, and what families are made of."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from torch.utils._pytree import tree_map

from tests import tiny_models
from tests.tiny_models import LATENT_CHANNELS, TEXT_DIM, quiet, random, seeded, strong


@dataclass(frozen=True)
class Family:
    """A tiny random-weight pipeline of the real classes, and calls that it must run."""

    name: str
    make: Callable[[], Any]  # a new pipeline on the CPU in fp32, the same weights at every call
    # Arguments for a small picture, prompts embedded or as text; the tests give steps, generator
    # and output type.
    call: Mapping[str, Any]
    # Further calls by name, as changes: "odd size", "batch", "guided", "one frame", ...
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()  # parts of sentences that the report may say of them
    kinds: int = 1  # of repeated blocks: one compiled graph for each
    dense_parts: tuple[str, ...] = ()  # "attention", "mlp": never sparse here
    # Only its calls are tested, in slow tests; its adapter is another family's, too.
    brief: bool = False
    # Variants whose attention runs dense, and what the report says of each.
    masked: Mapping[str, str] = field(default_factory=dict)
    unpatched_steps: int = 0  # first ones of a generation, that run as without chipsparse
    result: Callable[[Any], Any] = itemgetter(0)  # what is compared, of what the pipeline returns


def streams(results):
    """All tensors that a pipeline returns, in a row."""
    parts = [each[0] if isinstance(each, list) else each for each in results]
    return torch.cat([part.flatten().cpu() for part in parts if part is not None])


def of_class(pipeline_class, **components):
    """A pipeline of this class for embedded prompts: components that are not given are None."""
    names = inspect.signature(pipeline_class).parameters.values()
    missing = [each.name for each in names if each.default is each.empty]
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return quiet(pipeline_class(**{**dict.fromkeys(missing), "scheduler": scheduler, **components}))


def wan_like(pipeline_class, **components):
    """A pipeline of this class with the tiny tokenizer, text encoder and VAE of Wan."""
    parts = {
        "tokenizer": tiny_models.tiny_tokenizer(),
        "text_encoder": tiny_models.tiny_text_encoder(),
        "vae": tiny_models.tiny_wan_vae(),
    }
    return of_class(pipeline_class, **{**parts, **components})


def wan_prompts(tokens=16):
    """Embedded prompts: as text, these pipelines want ftfy to clean it."""
    return {
        "prompt_embeds": random(1, tokens, TEXT_DIM, seed=3),
        "negative_prompt_embeds": random(1, tokens, TEXT_DIM, seed=4),
    }


def picture(seed, width, height):
    pixels = random(height, width, 3, seed=seed).sigmoid() * 255
    return Image.fromarray(pixels.to(torch.uint8).numpy())


HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}  # of most transformers

# Loops around a transformer, for models whose own pipelines need much besides it.

VAE = {"scale_factor_spatial": 8, "scale_factor_temporal": 4}
IMAGE_VAE = {"spatial_compression_ratio": 8, "temporal_compression_ratio": 1}
VIDEO = {"height": 64, "width": 48, "num_frames": 9}
ODD = {"height": 48, "width": 80, "num_frames": 5}
IMAGE = {"height": 128, "width": 96}
ODD_IMAGE = {"height": 80, "width": 112}
# Variants of most of these loops.
USUAL = {"odd size": ODD, "batch": {"batch": 2}}
USUAL_IMAGES = {"odd size": ODD_IMAGE, "batch": {"batch": 2}}


def of_branch(latents, branch, *shape):
    """Numbers ``[B, *shape]`` that differ between guidance branches and not between samples."""
    ones = [1] * len(shape)
    return random(1, *shape, seed=len(branch)).repeat(len(latents), *ones)


def image_tokens(channels):
    """The shape of packed latents ``[B, N, C]`` of an image."""

    def shape(*, height, width, batch=1, **_):
        return batch, (height // 16) * (width // 16), channels

    return shape


def video_latents(*, height, width, num_frames, batch=1, **_):
    """The shape of latents ``[B, C, F, H, W]``, by the arguments of a loop."""
    return batch, LATENT_CHANNELS, (num_frames - 1) // 4 + 1, height // 8, width // 8


class Loop:
    """Calls a transformer as its pipeline does, without what encodes and decodes.

    Its arguments are made of the latents, the timestep ``[B]``, the branch and the arguments of the
    loop, and of these the latents' shape ``[B, ...]``. The velocity is taken from what it returns.
    """

    def __init__(self, transformer, arguments, shape, vae_config, velocity=lambda out, _: out[0]):
        self.transformer = transformer
        self.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        self.vae = SimpleNamespace(config=vae_config)
        self.components = {"transformer": transformer, "scheduler": self.scheduler}
        self._arguments = arguments
        self._shape = shape
        self._velocity = velocity

    def to(self, device, dtype):
        """Moves the transformer, which calls follow."""
        self.transformer.to(device, dtype)
        return self

    def _moved(self, value):
        """A tensor where the transformer is; vectors, such as timesteps, keep their dtype."""
        if not isinstance(value, torch.Tensor):
            return value
        wide = value.is_floating_point() and value.dim() > 1
        return value.to(self.transformer.device, self.transformer.dtype if wide else None)

    @torch.no_grad()
    def __call__(self, *, num_inference_steps, generator, branches=("cond", "uncond"), **call):
        """The latents after so many steps, in a tuple."""
        latents = self._moved(torch.randn(self._shape(**call), generator=generator))
        self.scheduler.set_timesteps(num_inference_steps)
        for timestep in self.scheduler.timesteps:
            found = [self._call(name, latents, timestep, call) for name in branches]
            velocity = 1.5 * found[0] - 0.5 * found[-1]
            latents = self.scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        return (latents,)

    def _call(self, branch, latents, timestep, call):
        named = hasattr(self.transformer, "cache_context")
        context = self.transformer.cache_context(branch) if named else contextlib.nullcontext()
        arguments = self._arguments(latents, timestep.expand(len(latents)), branch, **call)
        arguments = tree_map(self._moved, arguments)
        with context:
            return self._velocity(self.transformer(**arguments, return_dict=False), latents)


def video_loop(model_class, arguments, **config):
    """A loop around a transformer of this class for the latents of a video."""
    return Loop(strong(seeded(model_class, **config)), arguments, video_latents, VAE)

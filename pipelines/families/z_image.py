"""Z-Image (``ZImageTransformer2DModel``): base and turbo."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from chipsparse.layout import Grid, LayerKind
from chipsparse.pipelines.call_reader import Arguments
from chipsparse.pipelines.denoising_loop import largest, value_passed_as
from chipsparse.pipelines.family import Family
from chipsparse.pipelines.family_facts import (
    Config,
    ModuleNames,
    Sharing,
    SparseParts,
    TextPlace,
    TimestepFacts,
)
from chipsparse.pipelines.feed_forward_forms import MLPParts
from chipsparse.pipelines.separate_lengths import SeparateLengths
from chipsparse.pipelines.token_grids import patched
from chipsparse.pipelines.token_order import TokenOrder

MULTIPLE = 32  # of tokens, to which the model pads images and prompts
TIMESTEPS = 1000  # pipelines pass how far they are from the last one, as a share
CONTROL_SAMPLES = "controlnet_block_samples"


def padded(tokens: int) -> int:
    """Return a number of tokens with the padding that the model gives them."""
    return math.ceil(tokens / MULTIPLE) * MULTIPLE


class ZImageReader(SeparateLengths):
    """Reads lists of images ``[C, F, H, W]`` and of prompts."""

    def grids(self, arguments: Arguments) -> tuple[Grid, ...]:
        """Return the grid of an image, of which all have one size."""
        _, frames, rows, columns = arguments["x"][0].shape
        patch = arguments.get("patch_size", 2)
        frame_patch = arguments.get("f_patch_size", 1)
        return patched((frames, rows, columns), (frame_patch, patch, patch))

    def text_tokens(self, arguments: Arguments) -> int:
        """Return the length of the longest prompt."""
        return max(map(len, arguments["cap_feats"]))

    def latents(self, arguments: Arguments) -> torch.Tensor:
        """Return the images as a batch; several images in a sample or several sizes are refused."""
        images = arguments["x"]
        if not all(isinstance(image, torch.Tensor) for image in images):
            raise ValueError(
                "chipsparse does not serve Z-Image Omni, whose samples are lists of images; call "
                "chipsparse.disable(pipe) first",
            )
        shapes = {tuple(image.shape) for image in images}
        if len(shapes) > 1:
            raise ValueError(
                f"the images of a call must have one size, got {sorted(shapes)}; call the "
                "pipeline once for each size",
            )
        return torch.stack(images) if len(images) > 1 else images[0][None]

    def prompt_lengths(self, arguments: Arguments) -> list[int]:
        """Return the lengths of prompts with padding."""
        return [padded(len(text)) for text in arguments["cap_feats"]]

    def needs_mask(self, arguments: Arguments) -> bool:
        """Return whether prompts differ in length."""
        return len(set(self.prompt_lengths(arguments))) > 1

    def scheduled_timestep(self, timestep: Any, schedule: Any) -> float:
        """Return the scheduler's value; pipelines pass how far they are from the last one."""
        value = value_passed_as(timestep, schedule, lambda v: (TIMESTEPS - v) / TIMESTEPS)
        return TIMESTEPS - largest(timestep) * TIMESTEPS if value is None else value


class ZImageOrder(TokenOrder):
    """Orders tokens where the model cuts patches, and restores where it makes an image of them."""

    def install(self) -> None:
        """Wrap both methods."""
        super().install()
        self.replace_method("patchify_and_embed", self._patchify)
        self.replace_method("unpatchify", self._unpatchify)

    def _patchify(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Order patches and their positions; padding stays after them."""
        images, texts, sizes, places, *rest = stock(*args, **kwargs)
        images, places = (
            [self.ordered_beside_text(sample, 0) for sample in samples]
            for samples in (images, places)
        )
        return (images, texts, sizes, places, *rest)

    def _unpatchify(
        self,
        stock: Callable[..., Any],
        samples: list[torch.Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self.session.tile_order is not None:
            _, inverse = self.session.tile_order
            samples = [sample.index_select(0, inverse.to(sample.device)) for sample in samples]
        return stock(samples, *args, **kwargs)

    def order_inputs(self, arguments: Arguments) -> None:
        """Order what a ControlNet adds to each layer."""
        samples = arguments.get(CONTROL_SAMPLES)
        if samples is not None:
            arguments[CONTROL_SAMPLES] = {
                layer: self.ordered_beside_text(sample, 1) for layer, sample in samples.items()
            }


def kinds(config: Config) -> tuple[LayerKind, ...]:
    """The kind of the main layers."""
    return (LayerKind("layer", config["n_layers"], int(config["dim"] / 3 * 8), mlp_linears=3),)


def grids(config: Config, latents: Grid) -> tuple[Grid, ...]:
    """The grid of one image."""
    patch = config["all_patch_size"][0]
    return patched(latents, (config["all_f_patch_size"][0], patch, patch))


def padding_and_text(_config: Config, grids: tuple[Grid, ...], text_tokens: int) -> int:
    """The tokens after the image: its padding, and the prompt with its own."""
    return -math.prod(*grids) % MULTIPLE + padded(text_tokens)


# Joint attention and feed-forward layers of the main layers; those that refine stay dense. Images
# come as a list. After the image in the sequence stands its padding, then the prompt with its own:
# all these columns are kept, as text. Samples whose prompts are padded to other lengths are called
# separately.
Z_IMAGE = Family(
    transformer_class="ZImageTransformer2DModel",
    title="Z-Image: text and image to image, inpainting, ControlNet (not Omni)",
    sparse=SparseParts(
        attention="joint attention of the main layers",
        mlp="feed-forward (gated) of all tokens",
    ),
    modules=ModuleNames(
        blocks=("layers",),
        attention="attention",
        mlp="feed_forward",
        mlp_parts=MLPParts("w3", "w2", "w1"),
    ),
    kinds=kinds,
    grids=grids,
    default_latents=128,
    text=TextPlace(counted=padding_and_text),
    timestep=TimestepFacts("t"),
    sharing=Sharing(
        why_whole="layers before the joint ones see the image or the text alone, and stay as they "
        "are",
    ),
    reader=ZImageReader,
    tokens=ZImageOrder,
)

"""Fibo 2 (``BriaFibo2Transformer2DModel``): text to image, editing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from chipsparse.layout import Grid, LayerKind
from chipsparse.pipelines.call_reader import Arguments, CallReader, remembered
from chipsparse.pipelines.family import Family
from chipsparse.pipelines.family_facts import (
    Config,
    ModuleNames,
    PerToken,
    Sharing,
    SparseParts,
    TextPlace,
    TimestepFacts,
)
from chipsparse.pipelines.feed_forward_forms import MLPParts
from chipsparse.pipelines.token_grids import patch_of, patched, reorder_patches
from chipsparse.pipelines.token_order import TokenOrder

MASK = "encoder_attention_mask"
IMAGES = "context_latents"


def kinds(config: Config) -> tuple[LayerKind, ...]:
    """The kind of the main blocks."""
    width = config["dim"] * 8 // 3 // 64 * 64
    return (LayerKind("layer", config["n_layers"], width, mlp_linears=3),)


def gist_tokens(config: Config, _grids: tuple[Grid, ...], text_tokens: int) -> int:
    """The tokens that the model makes of a prompt."""
    return max(_gist_counts(config, [text_tokens]))


class BriaFibo2Reader(CallReader):
    """Reads images to edit besides the latents, and prompts that differ in length."""

    _lengths_of = remembered(lambda mask: mask.sum(dim=1).tolist())

    def grids(self, arguments: Arguments) -> tuple[Grid, ...]:
        """Return the grid of the latents ``[B, C, H, W]``, then those of the images to edit."""
        patch = patch_of(self.model.config)
        images = [arguments["hidden_states"], *(arguments.get(IMAGES) or ())]
        return tuple(grid for item in images for grid in patched((1, *item.shape[2:]), patch))

    def text_tokens(self, arguments: Arguments) -> int:
        """Return the length of the longest prompt."""
        return max(self._text_lengths(arguments))

    def _text_lengths(self, arguments: Arguments) -> list[int]:
        mask = arguments.get(MASK)
        if mask is not None:
            return self._lengths_of(mask)
        states = arguments["encoder_hidden_states"]
        return [states.shape[2]] * len(states)

    def dense_because(self, arguments: Arguments) -> str | None:
        """Return the reason of prompts whose gists differ in length."""
        counts = _gist_counts(self.model.config, self._text_lengths(arguments))
        if min(counts) == max(counts):
            return None
        return (
            f"the prompts of the batch have gists of {min(counts)} to {max(counts)} tokens, so the "
            "shorter ones need a mask"
        )


class BriaFibo2Order(TokenOrder):
    """Orders the patches of each image before the model sees them, and ids where it makes them."""

    def install(self) -> None:
        """Wrap the method that makes position ids."""
        super().install()
        self.replace_method("create_coordinate_grid", self._places)

    def order_inputs(self, arguments: Arguments) -> None:
        """Order the patches of the latents and of the images to edit."""
        images = [arguments["hidden_states"], *(arguments.get(IMAGES) or ())]
        patch = patch_of(self.model.config)
        for image, latents in enumerate(images):
            if (order := self.grid_order(image)) is not None:
                images[image] = reorder_patches(latents[:, :, None], patch, order)[:, :, 0]
        arguments["hidden_states"], *others = images
        if others:
            arguments[IMAGES] = others

    def _places(
        self,
        stock: Callable[..., Any],
        size: Any,
        start: Any = None,
        device: Any = None,
    ) -> torch.Tensor:
        """Return ids ``[1, H, W, 3]`` with those of an image's tokens in their order."""
        ids: torch.Tensor = stock(size, start, device)
        image = (start or (0,))[0] - self.model.config.max_num_gist_tokens - 1
        order = self.grid_order(image) if image >= 0 else None
        if order is None:
            return ids
        return ids.flatten(0, 2).index_select(0, order.to(ids.device)).view_as(ids)


# Attention and feed-forward layers of the main blocks; those that refine stay dense. Gist tokens,
# which the model makes of the prompt, stand before the image in the sequence; their columns are
# kept, as text. Images to edit stand after the image and have grids of their own.
BRIA_FIBO2 = Family(
    transformer_class="BriaFibo2Transformer2DModel",
    title="Fibo 2: text to image, editing",
    sparse=SparseParts(
        attention="self-attention of the main blocks, to the gist of the prompt too",
        mlp="feed-forward (gated) of all tokens in the main blocks",
    ),
    modules=ModuleNames(
        blocks=("layers",),
        attention="attention",
        mlp="feed_forward",
        mlp_parts=MLPParts("w3", "w2", "w1"),
        last="final_layer",
    ),
    kinds=kinds,
    default_latents=128,
    text=TextPlace("first", counted=gist_tokens),
    timestep=TimestepFacts(scale=1000),
    per_token=PerToken(drops_last_grids=True),
    sharing=Sharing(
        why_whole="blocks before the main ones see the image or the text alone, and stay as they "
        "are",
    ),
    reader=BriaFibo2Reader,
    tokens=BriaFibo2Order,
)


def _gist_counts(config: Config, text_lengths: list[int]) -> list[int]:
    # Only releases that have the model have this module.
    from diffusers.models.transformers.transformer_bria_fibo2 import compute_gist_count

    return compute_gist_count(
        text_lengths,
        min_gist=config["min_num_gist_tokens"],
        max_gist=config["max_num_gist_tokens"],
        gist_step=config["gist_step"],
        min_text_len=config["gist_min_text_len"],
        max_text_len=config["gist_max_text_len"],
    )

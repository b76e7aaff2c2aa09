"""Fibo 2 (``BriaFibo2Transformer2DModel``): text to image, editing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from chipsparse.layout import Grid, LayerKind, ModelLayout
from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.pipelines.feed_forward_forms import MLPParts
from chipsparse.pipelines.tensor_facts import remembered
from chipsparse.pipelines.token_grids import patch_of, patched, reorder_patches

MASK = "encoder_attention_mask"
IMAGES = "context_latents"


class BriaFibo2Adapter(ModelAdapter):
    """Attention and feed-forward layers of the main blocks; those that refine stay dense.

    Gist tokens, which the model makes of the prompt, stand before the image in the sequence; their
    columns are kept, as text. Images to edit stand behind the image and have grids of their own.
    The patches of each image are put in order before the model sees them, and its position ids
    where the model makes them; the image is in raster order again before the final layer.
    """

    transformer_class = "BriaFibo2Transformer2DModel"
    families = "Fibo 2: text to image, editing"
    sparse_attention = "self-attention of the main blocks, to the gist of the prompt too"
    sparse_mlp = "feed-forward (gated) of all tokens in the main blocks"
    why_whole = "blocks before the main ones see the image or the text alone, and stay as they are"
    default_latents = 128
    timestep_scale = 1000
    block_list = "layers"
    attention_name = "attention"
    mlp_name = "feed_forward"
    mlp_parts = MLPParts("w3", "w2", "w1")
    text_place = "first"
    drops_last_grids = True
    last_name = "final_layer"

    _lengths_of = remembered(lambda mask: mask.sum(dim=1).tolist())

    @classmethod
    def kinds(cls, config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
        width = config["dim"] * 8 // 3 // 64 * 64
        return (LayerKind("layer", config["n_layers"], width, mlp_linears=3),)

    @classmethod
    def sizes(
        cls,
        config: Mapping[str, Any],
        *,
        grids: tuple[Grid, ...],
        text_tokens: int,
        batch: int,
    ) -> ModelLayout:
        gist = max(_gist_counts(config, [text_tokens]))
        return super().sizes(config, grids=grids, text_tokens=gist, batch=batch)

    def called_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...]:
        """That of the latents ``[B, C, H, W]``, then those of the images to edit."""
        patch = patch_of(self._model.config)
        images = [arguments["hidden_states"], *(arguments.get(IMAGES) or ())]
        return tuple(grid for item in images for grid in patched((1, *item.shape[2:]), patch))

    def text_tokens(self, arguments: dict[str, Any]) -> int:
        return max(self._text_lengths(arguments))

    def _text_lengths(self, arguments: dict[str, Any]) -> list[int]:
        mask = arguments.get(MASK)
        if mask is not None:
            return self._lengths_of(mask)
        states = arguments["encoder_hidden_states"]
        return [states.shape[2]] * len(states)

    def why_attention_is_dense(self, arguments: dict[str, Any]) -> str | None:
        counts = _gist_counts(self._model.config, self._text_lengths(arguments))
        if min(counts) == max(counts):
            return None
        return (
            f"the prompts of the batch have gists of {min(counts)} to {max(counts)} tokens, so the "
            "shorter ones need a mask"
        )

    # Tile order.

    def install_tile_order(self) -> None:
        super().install_tile_order()
        self.replace_method("create_coordinate_grid", self._places)

    def order_inputs(self, arguments: dict[str, Any]) -> None:
        images = [arguments["hidden_states"], *(arguments.get(IMAGES) or ())]
        patch = patch_of(self._model.config)
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
        """The ids of an image's tokens ``[1, H, W, 3]`` in their order; those of the gist as is."""
        ids: torch.Tensor = stock(size, start, device)
        image = (start or (0,))[0] - self._model.config.max_num_gist_tokens - 1
        order = self.grid_order(image) if image >= 0 else None
        if order is None:
            return ids
        return ids.flatten(0, 2).index_select(0, order.to(ids.device)).view_as(ids)


def _gist_counts(config: Mapping[str, Any], text_lengths: list[int]) -> list[int]:
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

"""Z-Image (``ZImageTransformer2DModel``): base and turbo."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from chipsparse.layout import Grid, LayerKind, ModelLayout
from chipsparse.pipelines.denoising_loop import largest, value_passed_as
from chipsparse.pipelines.feed_forward_forms import MLPParts
from chipsparse.pipelines.separate_lengths import SeparateLengths
from chipsparse.pipelines.token_grids import patched

MULTIPLE = 32  # of tokens, to which the model pads images and prompts
TIMESTEPS = 1000  # pipelines pass how far they are from the last one, as a share
CONTROL_SAMPLES = "controlnet_block_samples"


class ZImageAdapter(SeparateLengths):
    """Joint attention and feed-forward layers of the main layers; those that refine stay dense.

    Images come as a list. Behind the image in the sequence stands its padding, then the prompt with
    its own: all these columns are kept, as text. Samples whose prompts are padded to other lengths
    are called separately. The image tokens are put in order where the model cuts an image into
    patches and gives them places, and in raster order again where it makes an image of patches.
    """

    transformer_class = "ZImageTransformer2DModel"
    families = "Z-Image: text and image to image, inpainting, ControlNet (not Omni)"
    sparse_attention = "joint attention of the main layers"
    sparse_mlp = "feed-forward (gated) of all tokens"
    why_whole = "layers before the joint ones see the image or the text alone, and stay as they are"
    default_latents = 128
    timestep_argument = "t"
    block_list = "layers"
    attention_name = "attention"
    mlp_name = "feed_forward"
    mlp_parts = MLPParts("w3", "w2", "w1")

    @classmethod
    def kinds(cls, config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
        return (LayerKind("layer", config["n_layers"], int(config["dim"] / 3 * 8), mlp_linears=3),)

    @classmethod
    def grids(cls, config: Mapping[str, Any], latents: Grid) -> tuple[Grid, ...]:
        patch = config["all_patch_size"][0]
        return patched(latents, (config["all_f_patch_size"][0], patch, patch))

    @classmethod
    def sizes(
        cls,
        config: Mapping[str, Any],
        *,
        grids: tuple[Grid, ...],
        text_tokens: int,
        batch: int,
    ) -> ModelLayout:
        others = -math.prod(*grids) % MULTIPLE + padded(text_tokens)
        return super().sizes(config, grids=grids, text_tokens=others, batch=batch)

    def called_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...]:
        """The grids of images ``[C, F, H, W]`` of one size."""
        _, frames, rows, columns = arguments["x"][0].shape
        patch = arguments.get("patch_size", 2)
        frame_patch = arguments.get("f_patch_size", 1)
        return patched((frames, rows, columns), (frame_patch, patch, patch))

    def text_tokens(self, arguments: dict[str, Any]) -> int:
        return max(map(len, arguments["cap_feats"]))

    def latents(self, arguments: dict[str, Any]) -> torch.Tensor:
        """The images as a batch; several images in a sample, or several sizes, are refused."""
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

    def prompt_lengths(self, arguments: dict[str, Any]) -> list[int]:
        return [padded(len(text)) for text in arguments["cap_feats"]]

    def needs_mask(self, arguments: dict[str, Any]) -> bool:
        return len(set(self.prompt_lengths(arguments))) > 1

    def scheduled_timestep(self, timestep: Any, schedule: Any) -> float:
        value = value_passed_as(timestep, schedule, lambda v: (TIMESTEPS - v) / TIMESTEPS)
        return TIMESTEPS - largest(timestep) * TIMESTEPS if value is None else value

    def held_output(self, result: Any) -> torch.Tensor:
        return torch.stack(result[0])

    def wrap_output(self, output: torch.Tensor, arguments: dict[str, Any]) -> Any:
        return super().wrap_output(list(output.unbind(0)), arguments)

    # Tile order.

    def install_tile_order(self) -> None:
        super().install_tile_order()
        self.replace_method("patchify_and_embed", self._patchify)
        self.replace_method("unpatchify", self._unpatchify)

    def _patchify(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Patches and their places; padding stays behind them."""
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

    def order_inputs(self, arguments: dict[str, Any]) -> None:
        samples = arguments.get(CONTROL_SAMPLES)
        if samples is not None:
            arguments[CONTROL_SAMPLES] = {
                layer: self.ordered_beside_text(sample, 1) for layer, sample in samples.items()
            }


def padded(tokens: int) -> int:
    """So many tokens with the padding that the model gives them."""
    return math.ceil(tokens / MULTIPLE) * MULTIPLE

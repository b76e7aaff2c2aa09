"""Qwen-Image (``QwenImageTransformer2DModel``): from text, from images, and in layers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from chipsparse.layout import Grid
from chipsparse.pipelines.padded_text import leading_tokens
from chipsparse.pipelines.processors import ProcessorTaggingAdapter
from chipsparse.pipelines.tensor_facts import remembered
from chipsparse.pipelines.token_grids import fitting

TEXT, TEXT_MASK = "encoder_hidden_states", "encoder_hidden_states_mask"


def valid_length(mask: torch.Tensor) -> int | None:
    """The leading text tokens that are valid in all samples of a mask ``[B, T]``, not 0 for those.

    Waits for the device. None where samples have different lengths, a token between others is
    masked, or all are.
    """
    lengths = leading_tokens(mask)
    return lengths[0] or None if lengths and len(set(lengths)) == 1 else None


class QwenImageAdapter(ProcessorTaggingAdapter):
    """Joint attention and image feed-forward layers of every block; the text's stay dense.

    Text tokens stand before the image tokens; their columns are always kept. A prompt mask is
    avoided where anything is sparse: what it masks is cut off, if that is the same for all samples.
    """

    transformer_class = "QwenImageTransformer2DModel"
    families = "Qwen-Image: text and image to image, inpainting, editing, ControlNet"
    sparse_attention = "joint attention"
    sparse_mlp = "feed-forward of the image tokens"
    shares_tokens = True
    guidance_argument = "true_cfg_scale"
    default_latents = 128
    timestep_scale = 1000
    mlp_name = "img_mlp"
    mlp_sees_text = False
    text_place = "first"
    cuts_at_blocks = True
    needs_text = True  # its rotary embedding takes no empty text
    token_patch = (1, 2, 2)
    rotary_name = "pos_embed"
    last_name = "norm_out"
    token_arguments = MappingProxyType({"hidden_states": 1, "controlnet_block_samples": 1})

    _length_of = remembered(valid_length)

    def called_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...]:
        tokens = arguments["hidden_states"].shape[1]
        return fitting(image_grids(arguments["img_shapes"]), tokens)

    def text_tokens(self, arguments: dict[str, Any]) -> int:
        length = self._valid_length(arguments)
        return super().text_tokens(arguments) if length is None else length

    @classmethod
    def why_not_split(cls, config: Mapping[str, Any]) -> str | None:
        if not config.get("zero_cond_t", False):
            return super().why_not_split(config)
        return "it modulates the tokens of its reference images otherwise (zero_cond_t)"

    def why_attention_is_dense(self, arguments: dict[str, Any]) -> str | None:
        if arguments.get(TEXT_MASK) is None or self._valid_length(arguments) is not None:
            return None
        return "the text is masked otherwise than by one length for all samples of a call"

    def needs_mask(self, arguments: dict[str, Any]) -> bool:
        return arguments.get(TEXT_MASK) is not None and not self._cuts_text(arguments)

    def masks_text(self, arguments: dict[str, Any]) -> bool:
        return self._valid_length(arguments) is not None

    def _cuts_text(self, arguments: dict[str, Any]) -> bool:
        ours = self.session.attends or self.split is not None
        return ours and self.masks_text(arguments)

    def _valid_length(self, arguments: dict[str, Any]) -> int | None:
        mask = arguments.get(TEXT_MASK)
        return None if mask is None else self._length_of(mask)

    def order_inputs(self, arguments: dict[str, Any]) -> None:
        if self._cuts_text(arguments):
            arguments[TEXT] = arguments[TEXT][:, : self._valid_length(arguments)]
            arguments[TEXT_MASK] = None
        super().order_inputs(arguments)

    def ordered_rotary(
        self, _module: Any, _args: Any, output: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        image, text = output
        state = self.session.state
        if state is None or not self.moves_tokens:
            return output
        if image.shape[0] != state.plan.layout.grid_tokens:  # the model says what does not fit
            return output
        return self.ordered(image, 0), self.own_text(text, 0)


def image_grids(shapes: Any) -> tuple[Grid, ...]:
    """The grids of one sample, from what pipelines pass as ``img_shapes``.

    For each sample those are its images or its one image, (frames, rows, columns); or one for all.
    """
    first = shapes[0] if isinstance(shapes, list) else shapes
    return tuple(tuple(shape) for shape in (first if isinstance(first, list) else [first]))

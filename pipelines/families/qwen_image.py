"""Qwen-Image (``QwenImageTransformer2DModel``), in layers too, and Qwen-Image 2.1."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from chipsparse.layout import Grid
from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.pipelines.bridge import LayerCall
from chipsparse.pipelines.feed_forward_forms import MLPParts
from chipsparse.pipelines.padded_text import leading_tokens
from chipsparse.pipelines.processors import ProcessorTaggingAdapter
from chipsparse.pipelines.tensor_facts import remembered
from chipsparse.pipelines.token_grids import fitting
from chipsparse.skip.position import StepContext
from chipsparse.sparse.layers.state import StepState

TEXT = "encoder_hidden_states"
TEXT_MASK = "encoder_hidden_states_mask"
CACHE_MODE = "kv_cache_mode"
NO_CACHE = (
    "nothing runs sparse: Qwen-Image 2.1 computes its prompt at every step; leave use_kv_cache on"
)


def image_grids(shapes: Any) -> tuple[Grid, ...]:
    """The grids of one sample, from what pipelines pass as ``img_shapes``.

    For each sample those are its images or its one image, (frames, rows, columns); or one for all.
    """
    first = shapes[0] if isinstance(shapes, list) else shapes
    return tuple(tuple(shape) for shape in (first if isinstance(first, list) else [first]))


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
        self,
        _module: Any,
        _args: Any,
        output: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        image, text = output
        plan = self.session.plan
        # Of other sizes the model says what does not fit.
        fits = plan is not None and len(image) == plan.layout.grid_tokens
        if not (fits and self.moves_tokens):
            return output
        return self.ordered(image, 0), self.own_text(text, 0)


class QwenImage21Adapter(ModelAdapter):
    """Attention and feed-forward layers of the image's tokens, behind keys of the prompt.

    The pipeline's first step fills a cache with keys and values of the prompt and of reference
    images, which no later step changes. It runs as without chipsparse, and the second is the first
    that records. From then on layers see the image's tokens alone, and its queries meet the keys of
    the cache besides their own: those columns stand first, as text, and are always kept. The ops
    want as many queries as keys, so zeros stand for the queries of the prompt.
    """

    transformer_class = "QwenImage21Transformer2DModel"
    families = "Qwen-Image 2.1, turbo too: text to image, editing"
    sparse_attention = "the image's, to the prompt and itself; the first step is the model's own"
    sparse_mlp = "feed-forward (gated) of the image tokens"
    why_whole = "its first step, which keeps keys of the prompt, runs as without chipsparse"
    guidance_argument = "true_cfg_scale"
    timestep_scale = 1000
    mlp_name = "img_mlp"
    mlp_parts = MLPParts("proj", "out", "gate_layer", "activation_fn")
    mlp_sees_text = False
    mlp_linears = 3
    text_place = "first"  # keys of the prompt and of reference images
    rotary_name = "pos_embed"
    last_name = "norm_out"

    _is_all_valid = remembered(lambda mask: bool(mask.all()))

    @classmethod
    def grids(cls, config: Mapping[str, Any], latents: Grid) -> tuple[Grid, ...]:
        """That of one image; latents are not cut into patches."""
        return (latents,)

    def called_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...]:
        return (tuple(arguments["img_shapes"][0][-1]),)

    def text_tokens(self, arguments: dict[str, Any]) -> int:
        return arguments["kv_cache"].get_layer(0).get()[0].shape[1]

    def why_attention_is_dense(self, arguments: dict[str, Any]) -> str | None:
        """A mask that leaves something out; modular pipelines always pass one."""
        mask = arguments.get(TEXT_MASK)
        if mask is None or self._is_all_valid(mask):
            return None
        return "the prompts of the batch differ in length, so the shorter ones need a mask"

    # The first step.

    def knows(self, context: StepContext, arguments: dict[str, Any]) -> bool:
        """Return whether a call reads the keys of the prompt that an earlier one has kept."""
        return bool(arguments.get(CACHE_MODE) == "cached")

    def observe(self, context: StepContext, arguments: dict[str, Any]) -> None:
        if context.step == 0:
            self.reset()
        if arguments.get(CACHE_MODE) is None:
            self.session.report.run_dense(NO_CACHE)
        for site in self.feed_forward_sites:
            site.run_as(None)

    def _not_captured_reason(self) -> str | None:
        return "the host reads where in the sequence images are"

    # As many queries as keys.

    def attention(self, layer: int) -> LayerCall:
        """The layer's attention, with queries of zeros for the keys that are kept."""
        return partial(self._behind_kept_keys, super().attention(layer))

    def _behind_kept_keys(
        self,
        attend: LayerCall,
        state: StepState | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        kept = key.shape[2] - query.shape[2]
        output = attend(state, F.pad(query, (0, 0, kept, 0)), key, value, **options)
        return output[:, :, kept:]

    # Tile order.

    def order_inputs(self, arguments: dict[str, Any]) -> None:
        if not self.needs_mask(arguments):
            arguments[TEXT_MASK] = None
        arguments["hidden_states"] = self.ordered_beside_text(arguments["hidden_states"], 1)

    def ordered_rotary(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return self.ordered_beside_text(output, 0)

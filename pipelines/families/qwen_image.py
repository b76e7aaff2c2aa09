"""Qwen-Image (``QwenImageTransformer2DModel``), in layers too, and Qwen-Image 2.1."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from chipsparse.layout import Grid
from chipsparse.pipelines.call_reader import Arguments, CallReader, remembered
from chipsparse.pipelines.family import Family
from chipsparse.pipelines.family_facts import (
    AttentionFacts,
    Config,
    GuidanceFacts,
    ModuleNames,
    Patches,
    PerToken,
    SameBlocks,
    Sharing,
    SparseParts,
    TextPlace,
    TimestepFacts,
)
from chipsparse.pipelines.feed_forward_forms import MLPParts
from chipsparse.pipelines.ops import LayerCall
from chipsparse.pipelines.padded_text import leading_tokens
from chipsparse.pipelines.token_grids import fitting
from chipsparse.pipelines.token_order import TokenOrder
from chipsparse.reasons.reason import nothing_sparse
from chipsparse.skip.position import Place
from chipsparse.sparse.layers.state import OpenCall

TEXT = "encoder_hidden_states"
TEXT_MASK = "encoder_hidden_states_mask"
CACHE_MODE = "kv_cache_mode"
NO_CACHE = "Qwen-Image 2.1 computes its prompt at every step", "leave use_kv_cache on"


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


class QwenImageReader(CallReader):
    """Reads packed latents with ``img_shapes``, and prompt masks."""

    _length_of = remembered(valid_length)

    def grids(self, arguments: Arguments) -> tuple[Grid, ...]:
        """Return the grids of the images."""
        tokens = arguments["hidden_states"].shape[1]
        return fitting(image_grids(arguments["img_shapes"]), tokens)

    def text_tokens(self, arguments: Arguments) -> int:
        """Return the length of the text, without padding where all samples have one length."""
        length = self.valid_length(arguments)
        return super().text_tokens(arguments) if length is None else length

    def dense_because(self, arguments: Arguments) -> str | None:
        """Return the reason of masks that leave no single length."""
        if arguments.get(TEXT_MASK) is None or self.valid_length(arguments) is not None:
            return None
        return "the text is masked otherwise than by one length for all samples of a call"

    def needs_mask(self, arguments: Arguments) -> bool:
        """Return whether a call has a mask, and text that is not cut."""
        return arguments.get(TEXT_MASK) is not None and not self.cuts_text(arguments)

    def masks_text(self, arguments: Arguments) -> bool:
        """Return whether the text can be cut instead of masked."""
        return self.valid_length(arguments) is not None

    def cuts_text(self, arguments: Arguments) -> bool:
        """Return whether the text of the open call is cut."""
        return self.is_ours and self.masks_text(arguments)

    def valid_length(self, arguments: Arguments) -> int | None:
        """Return the one length of all samples' text, if a mask names it."""
        mask = arguments.get(TEXT_MASK)
        return None if mask is None else self._length_of(mask)


class QwenImageOrder(TokenOrder):
    """Cuts the text, and orders the rotary embedding of the image."""

    reader: QwenImageReader

    def order_inputs(self, arguments: Arguments) -> None:
        """Cut the text instead of masking it, and order the image."""
        if self.reader.cuts_text(arguments):
            arguments[TEXT] = arguments[TEXT][:, : self.reader.valid_length(arguments)]
            arguments[TEXT_MASK] = None
        super().order_inputs(arguments)

    def ordered_rotary(
        self,
        _module: Any,
        _args: Any,
        output: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Order the image's part, and cut the text's."""
        image, text = output
        plan = self.session.plan
        # Of other sizes the model says what does not fit.
        fits = plan is not None and len(image) == plan.layout.grid_tokens
        if not (fits and self.moves_tokens):
            return output
        return self.ordered(image, 0), self.own_text(text, 0)


def why_not_shared(config: Config) -> str | None:
    """Return the reason of models that modulate references otherwise."""
    if config.get("zero_cond_t", False):
        return "it modulates the tokens of its reference images otherwise (zero_cond_t)"
    return None


# Joint attention and image feed-forward layers of every block; the text's stay dense. Text tokens
# stand before the image tokens; their columns are always kept. A prompt mask is avoided where
# anything is sparse: what it masks is cut off, if that is the same for all samples.
QWEN_IMAGE = Family(
    transformer_class="QwenImageTransformer2DModel",
    title="Qwen-Image: text and image to image, inpainting, editing, ControlNet",
    sparse=SparseParts(attention="joint attention", mlp="feed-forward of the image tokens"),
    modules=ModuleNames(mlp="img_mlp", rotary="pos_embed", last="norm_out"),
    kinds=SameBlocks(mlp_sees_text=False),
    grids=Patches((1, 2, 2)),
    default_latents=128,
    attention=AttentionFacts("processor"),
    # Its rotary embedding takes no empty text.
    text=TextPlace("first", cut_at_blocks=True, needed=True),
    guidance=GuidanceFacts("true_cfg_scale"),
    timestep=TimestepFacts(scale=1000),
    per_token=PerToken({"hidden_states": 1, "controlnet_block_samples": 1}),
    sharing=Sharing(tokens=True, why_not=why_not_shared),
    reader=QwenImageReader,
    tokens=QwenImageOrder,
)


class QwenImage21Reader(CallReader):
    """Reads calls that keep keys and values of the prompt, or read them.

    The pipeline's first step fills a cache with keys and values of the prompt and of reference
    images, which no later step changes. It runs as without chipsparse, and the second is the first
    that records. From then on layers see the image's tokens alone.
    """

    _is_all_valid = remembered(lambda mask: bool(mask.all()))

    def grids(self, arguments: Arguments) -> tuple[Grid, ...]:
        """Return the grid of the image."""
        return (tuple(arguments["img_shapes"][0][-1]),)

    def text_tokens(self, arguments: Arguments) -> int:
        """Return the number of keys in the cache."""
        return arguments["kv_cache"].get_layer(0).get()[0].shape[1]

    def dense_because(self, arguments: Arguments) -> str | None:
        """Return the reason of a mask that leaves something out; modular pipelines pass one."""
        mask = arguments.get(TEXT_MASK)
        if mask is None or self._is_all_valid(mask):
            return None
        return "the prompts of the batch differ in length, so the shorter ones need a mask"

    def knows(self, place: Place, arguments: Arguments) -> bool:
        """Return whether a call reads the keys of the prompt that an earlier one has kept."""
        return bool(arguments.get(CACHE_MODE) == "cached")

    def observe(self, place: Place, arguments: Arguments) -> bool:
        """Report pipelines that keep nothing."""
        if arguments.get(CACHE_MODE) is None:
            self.session.report.add(nothing_sparse("model.no_cache", *NO_CACHE))
        return True

    def why_not_captured(self) -> str | None:
        """Return what the host reads at each step."""
        return "the host reads where in the sequence images are"


class QwenImage21Order(TokenOrder):
    """Orders the image, whose queries meet the keys of the cache besides their own.

    The columns of the cache come first, as text, and are always kept. The ops want one query for
    each key, so the queries of the prompt are zeros.
    """

    def around(self, attend: LayerCall) -> LayerCall:
        """Return the layer's attention, with queries of zeros for the keys that are kept."""
        return partial(self._after_kept_keys, super().around(attend))

    def _after_kept_keys(
        self,
        attend: LayerCall,
        state: OpenCall | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        kept = key.shape[2] - query.shape[2]
        output = attend(state, F.pad(query, (0, 0, kept, 0)), key, value, **options)
        return output[:, :, kept:]

    def order_inputs(self, arguments: Arguments) -> None:
        """Order the image's tokens, and drop masks that leave nothing out."""
        if not self.reader.needs_mask(arguments):
            arguments[TEXT_MASK] = None
        arguments["hidden_states"] = self.ordered_beside_text(arguments["hidden_states"], 1)

    def ordered_rotary(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Order the image's part."""
        return self.ordered_beside_text(output, 0)


def whole_latents(_config: Config, latents: Grid) -> tuple[Grid, ...]:
    """The grid of one image; latents are not cut into patches."""
    return (latents,)


# Attention and feed-forward layers of the image's tokens, after keys of the prompt.
QWEN_IMAGE_21 = Family(
    transformer_class="QwenImage21Transformer2DModel",
    title="Qwen-Image 2.1, turbo too: text to image, editing",
    sparse=SparseParts(
        attention="the image's, to the prompt and itself; the first step is the model's own",
        mlp="feed-forward (gated) of the image tokens",
    ),
    modules=ModuleNames(
        mlp="img_mlp",
        mlp_parts=MLPParts("proj", "out", "gate_layer", "activation_fn"),
        rotary="pos_embed",
        last="norm_out",
    ),
    kinds=SameBlocks(mlp_sees_text=False, mlp_linears=3),
    grids=whole_latents,
    text=TextPlace("first"),  # keys of the prompt and of reference images
    guidance=GuidanceFacts("true_cfg_scale"),
    timestep=TimestepFacts(scale=1000),
    sharing=Sharing(
        why_whole="its first step, which keeps keys of the prompt, runs as without chipsparse",
    ),
    reader=QwenImage21Reader,
    tokens=QwenImage21Order,
)

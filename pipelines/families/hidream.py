"""HiDream-I1 (``HiDreamImageTransformer2DModel``): text to image, with a mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.transformers.transformer_hidream_image import apply_rope

from chipsparse.layout import Grid, LayerKind
from chipsparse.pipelines.call_reader import Arguments, CallReader
from chipsparse.pipelines.family import Family
from chipsparse.pipelines.family_facts import (
    AttentionFacts,
    Config,
    GuidanceFacts,
    ModuleNames,
    Sharing,
    SparseParts,
    TextPlace,
    TimestepFacts,
    channels,
)
from chipsparse.pipelines.feed_forward import FeedForwardModule, FeedForwardSite
from chipsparse.pipelines.feed_forward_forms import MLPParts
from chipsparse.pipelines.processors import DispatchingProcessor, dispatch, split_heads
from chipsparse.pipelines.token_grids import patched
from chipsparse.pipelines.token_order import TokenOrder

TEXTS = 3  # in each block's sequence: of T5, of Llama's last layer and of one for the block
MULTIPLE = 256  # of neurons
PATCH = 2  # of released models; the class has no default


class HiDreamProcessor(DispatchingProcessor):
    """Attention of the image and, in double blocks, the text after it with weights of its own."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        hidden_states_masks: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        image_rotary_emb: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """``[B, N, C]``, or the image's and the text's."""
        if self._parallel_config is None:  # no tag
            stated = (hidden_states, hidden_states_masks, encoder_hidden_states, image_rotary_emb)
            return super().__call__(attn, *stated, *args, **kwargs)  # type: ignore[misc]
        assert image_rotary_emb is not None
        query, key, value = self._states(attn, hidden_states, "")
        if hidden_states_masks is not None:
            key = key * hidden_states_masks[:, :, None, None]
        if encoder_hidden_states is not None:
            text = self._states(attn, encoder_hidden_states, "_t")
            query, key, value = (
                torch.cat(pair, dim=1) for pair in zip((query, key, value), text, strict=True)
            )
        query, key = apply_rope(query, key, image_rotary_emb)
        output = dispatch(self, query, key, value).to(query.dtype)
        if encoder_hidden_states is None:
            return attn.to_out(output)
        image, behind = output.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], 1)
        return attn.to_out(image), attn.to_out_t(behind)

    @staticmethod
    def _states(attn: Any, states: torch.Tensor, end: str) -> tuple[torch.Tensor, ...]:
        """Query, key and value ``[B, N, H, D]``, normalized over all heads together."""
        query, key = (
            getattr(attn, f"{name}_rms_norm{end}")(getattr(attn, f"to_{name}{end}")(states))
            for name in ("q", "k")
        )
        value = getattr(attn, f"to_v{end}")(states)
        return tuple(split_heads(part.to(states.dtype), attn) for part in (query, key, value))


def neurons(width: int) -> int:
    """Neurons of a gated layer that has two thirds of a width, rounded up."""
    return math.ceil(int(2 * width / 3) / MULTIPLE) * MULTIPLE


def shared_expert(block: Any, names: ModuleNames) -> FeedForwardSite:
    """The feed-forward layer of a block that all tokens pass."""
    if hasattr(block.ff_i, "shared_experts"):
        return FeedForwardModule(block.ff_i, "shared_experts", names.mlp_parts)
    return FeedForwardModule(block, "ff_i", names.mlp_parts)


def kinds(config: Config) -> tuple[LayerKind, ...]:
    """The kinds of double and single blocks; routed experts count as more linears."""
    width = channels(config)
    experts = config["num_routed_experts"]
    count = neurons(4 * width)
    projections = 4
    if experts > 0:
        routed = 3 * count * config["num_activated_experts"]
        count = neurons(2 * width)
        projections = 4 + math.ceil(routed / width)
    return (
        LayerKind("double", config["num_layers"], count, False, 3, projections),
        LayerKind("single", config["num_single_layers"], count, True, 3, projections),
    )


def grids(config: Config, latents: Grid) -> tuple[Grid, ...]:
    """The grids of one image, and of its padding where it is not square."""
    patch = config["patch_size"] or PATCH
    (grid,) = patched(latents, (1, patch, patch))
    longest = math.prod(config["max_resolution"]) // patch**2
    padding = 0 if latents[1] == latents[2] else longest - math.prod(grid)
    return (grid, (1, 1, padding)) if padding > 0 else (grid,)


def planned_text(text_tokens: int, _latents: Grid) -> int:
    """The text tokens of all encoders."""
    return TEXTS * text_tokens


class HiDreamReader(CallReader):
    """Reads the texts of both encoders."""

    def text_tokens(self, arguments: Arguments) -> int:
        """Return the text tokens in a block's sequence."""
        names = ("encoder_hidden_states_t5", "encoder_hidden_states_llama3")
        t5, llama = (arguments[name].shape[-2] for name in names)
        return int(t5 + (TEXTS - 1) * llama)

    def latents(self, arguments: Arguments) -> torch.Tensor:
        """Return the images, which must not be patches."""
        images = super().latents(arguments)
        if images.ndim != 4:
            raise ValueError(
                "hidden_states must be images [B, C, H, W], not patches; call "
                "chipsparse.disable(pipe) first to pass those",
            )
        return images

    def notes(self, arguments: Arguments) -> list[str]:
        """Return a note on routed experts."""
        experts = self.model.config.num_routed_experts
        if experts == 0 or not (self.session.caching and self.session.config.mlp.is_sparse):
            return []
        return [f"the {experts} routed experts of each layer run dense: each step chooses anew"]

    def why_not_captured(self) -> str | None:
        """Return what the host reads at each step."""
        return "the host reads the size of images and how many tokens each expert gets"


class HiDreamOrder(TokenOrder):
    """Orders tokens where the model cuts patches, and restores where it makes an image of them."""

    def install(self) -> None:
        """Wrap both methods; there are no modules to hook."""
        self.replace_method("patchify", self._patchify)
        self.replace_method("unpatchify", self._unpatchify)

    def _patchify(self, stock: Callable[..., Any], *args: Any) -> Any:
        """Order patches and their positions; the mask of the padding after them is unchanged."""
        patches, masks, sizes, places = stock(*args)
        return self.ordered(patches, 1), masks, sizes, self.ordered(places, 1)

    def _unpatchify(self, stock: Callable[..., Any], tokens: torch.Tensor, *args: Any) -> Any:
        return stock(self.restored(tokens), *args)


# Joint attention of all blocks; of the feed-forward layers the expert that all tokens pass. The
# text stands after the image, and its columns are always kept. An image that is not square is
# padded; the model makes zeros of the padding's keys, which attention goes on to see: they are a
# grid of their own.
HIDREAM = Family(
    transformer_class="HiDreamImageTransformer2DModel",
    title="HiDream-I1, distilled too: text to image",
    sparse=SparseParts(
        attention="joint attention of double and single blocks",
        mlp="the shared expert (gated): of the image tokens in double blocks, of all in single "
        "ones; routed experts are left",
    ),
    modules=ModuleNames(
        blocks=("double_stream_blocks", "single_stream_blocks"),
        inner="block",
        attention="attn1",
        mlp_parts=MLPParts("w3", "w2", "w1"),
    ),
    feed_forward=shared_expert,
    kinds=kinds,
    grids=grids,
    default_latents=128,
    attention=AttentionFacts("processor", processors={"HiDreamAttnProcessor": HiDreamProcessor}),
    text=TextPlace(planned=planned_text),
    guidance=GuidanceFacts(in_batch=True),
    timestep=TimestepFacts("timesteps"),
    sharing=Sharing(
        why_whole="it cuts images into tokens itself, and has text of its own in each block",
    ),
    reader=HiDreamReader,
    tokens=HiDreamOrder,
)

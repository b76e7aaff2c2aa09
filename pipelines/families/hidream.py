"""HiDream-I1 (``HiDreamImageTransformer2DModel``): text to image, with a mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from diffusers.models.transformers.transformer_hidream_image import apply_rope

from chipsparse.layout import Grid, LayerKind
from chipsparse.pipelines.feed_forward import FeedForwardModule, FeedForwardSite
from chipsparse.pipelines.feed_forward_forms import MLPParts
from chipsparse.pipelines.processors import (
    DispatchingProcessor,
    ProcessorTaggingAdapter,
    dispatch,
    split_heads,
)
from chipsparse.pipelines.token_grids import patched

TEXTS = 3  # in each block's sequence: of T5, of Llama's last layer and of one for the block
MULTIPLE = 256  # of neurons
PATCH = 2  # of released models; the class has no default


class HiDreamProcessor(DispatchingProcessor):
    """Attention of the image and, in double blocks, the text behind it with weights of its own."""

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


class HiDreamAdapter(ProcessorTaggingAdapter):
    """Joint attention of all blocks; of the feed-forward layers the expert that all tokens pass.

    Behind the image stands the text, whose columns are always kept. An image that is not square is
    padded; the model makes zeros of the padding's keys, which attention goes on to see: they are a
    grid of their own. The image tokens are put in order where the model cuts patches, and in raster
    order again where it makes an image of them.
    """

    transformer_class = "HiDreamImageTransformer2DModel"
    families = "HiDream-I1, distilled too: text to image"
    sparse_attention = "joint attention of double and single blocks"
    sparse_mlp = (
        "the shared expert (gated): of the image tokens in double blocks, of all in single ones; "
        "routed experts are left"
    )
    why_whole = "it cuts images into tokens itself, and has text of its own in each block"
    guides_in_batch = True
    default_latents = 128
    timestep_argument = "timesteps"
    attention_name = "attn1"
    mlp_parts = MLPParts("w3", "w2", "w1")
    own_processors = MappingProxyType({"HiDreamAttnProcessor": HiDreamProcessor})

    def blocks(self) -> list[Any]:
        model = self._model
        return [outer.block for outer in (*model.double_stream_blocks, *model.single_stream_blocks)]

    def feed_forwards(self) -> list[FeedForwardSite]:
        return [
            FeedForwardModule(block.ff_i, "shared_experts", self.mlp_parts)
            if hasattr(block.ff_i, "shared_experts")
            else FeedForwardModule(block, "ff_i", self.mlp_parts)
            for block in self.blocks()
        ]

    @classmethod
    def kinds(cls, config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
        """Double and single blocks; routed experts count as so many linears more."""
        channels = cls.channels(config)
        experts = config["num_routed_experts"]
        width = neurons(4 * channels)
        projections = 4
        if experts > 0:
            routed = 3 * width * config["num_activated_experts"]
            width = neurons(2 * channels)
            projections = 4 + math.ceil(routed / channels)
        return (
            LayerKind("double", config["num_layers"], width, False, 3, projections),
            LayerKind("single", config["num_single_layers"], width, True, 3, projections),
        )

    @classmethod
    def grids(cls, config: Mapping[str, Any], latents: Grid) -> tuple[Grid, ...]:
        """That of one image, and of its padding where it is not square."""
        patch = config["patch_size"] or PATCH
        (grid,) = patched(latents, (1, patch, patch))
        longest = math.prod(config["max_resolution"]) // patch**2
        padding = 0 if latents[1] == latents[2] else longest - math.prod(grid)
        return (grid, (1, 1, padding)) if padding > 0 else (grid,)

    @classmethod
    def planned_text(cls, text_tokens: int, latents: Grid) -> int:
        return TEXTS * text_tokens

    def text_tokens(self, arguments: dict[str, Any]) -> int:
        names = ("encoder_hidden_states_t5", "encoder_hidden_states_llama3")
        t5, llama = (arguments[name].shape[-2] for name in names)
        return int(t5 + (TEXTS - 1) * llama)

    def latents(self, arguments: dict[str, Any]) -> torch.Tensor:
        images = super().latents(arguments)
        if images.ndim != 4:
            raise ValueError(
                "hidden_states must be images [B, C, H, W], not patches; call "
                "chipsparse.disable(pipe) first to pass those",
            )
        return images

    def notes(self, arguments: dict[str, Any]) -> list[str]:
        experts = self._model.config.num_routed_experts
        if experts == 0 or not (self.session.caching and self.session.config.mlp.is_sparse):
            return []
        return [f"the {experts} routed experts of each layer run dense: each step chooses anew"]

    def _not_captured_reason(self) -> str | None:
        return "the host reads the size of images and how many tokens each expert gets"

    # Tile order.

    def install_tile_order(self) -> None:
        self.replace_method("patchify", self._patchify)
        self.replace_method("unpatchify", self._unpatchify)

    def _patchify(self, stock: Callable[..., Any], *args: Any) -> Any:
        """Patches and their places; the mask, of the padding behind them, stays as it is."""
        patches, masks, sizes, places = stock(*args)
        return self.ordered(patches, 1), masks, sizes, self.ordered(places, 1)

    def _unpatchify(self, stock: Callable[..., Any], tokens: torch.Tensor, *args: Any) -> Any:
        return stock(self.restored(tokens), *args)


def neurons(width: int) -> int:
    """Neurons of a gated layer that has two thirds of a width, rounded up."""
    return math.ceil(int(2 * width / 3) / MULTIPLE) * MULTIPLE

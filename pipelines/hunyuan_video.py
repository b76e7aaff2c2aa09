"""HunyuanVideo (``HunyuanVideoTransformer3DModel``), SkyReels, and FramePack's variant of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from chipsparse.layout import Grid, LayerKind, ModelLayout
from chipsparse.pipelines.feed_forward import (
    FeedForwardModule,
    FeedForwardSite,
    ParallelFeedForward,
)
from chipsparse.pipelines.history import HistoryAdapter
from chipsparse.pipelines.padded_text import PaddedTextAdapter, patch_of, token_grid

TOKEN_REPLACE = "token_replace"


class HunyuanVideoAdapter(PaddedTextAdapter):
    """Joint attention and video feed-forward layers of all blocks; double blocks come first.

    Text columns are always kept, and the text's feed-forward layers in the double blocks stay
    dense. The text is cut before the token refiner: its attention and its pooled mean leave padding
    out as well, and the model counts what is valid and takes that many tokens from the first on.
    Where an image replaces the tokens of the first frame ("token replace"), the blocks modulate
    the first tokens otherwise, so those of the first frame stay in front of the others.
    """

    transformer_class = "HunyuanVideoTransformer3DModel"
    families = "HunyuanVideo: text and image to video; SkyReels"
    sparse_attention = "joint attention of double and single blocks"
    sparse_mlp = "feed-forward of the video tokens in double blocks, of all tokens in single ones"
    shared_mlp_kinds = frozenset({"single"})
    shares_tokens = True
    guidance_argument = "true_cfg_scale"
    announces_guidance = False
    least_text = 1  # its blocks count the text from the end of the sequence

    @classmethod
    def why_not_split(cls, config: Mapping[str, Any]) -> str | None:
        """Blocks modulate the tokens of a replaced first frame otherwise, by their place."""
        if config["image_condition_type"] != TOKEN_REPLACE:
            return super().why_not_split(config)
        return "it modulates the tokens of the first frame apart (token replace)"

    def self_attentions(self) -> list[Any]:
        """``attn`` of every block."""
        return [block.attn for block in self._double_blocks + self._single_blocks]

    def feed_forwards(self) -> list[FeedForwardSite]:
        """``ff`` of the double blocks, then what the single blocks run beside their attention."""
        return [
            *(FeedForwardModule(block, "ff") for block in self._double_blocks),
            *(ParallelFeedForward(block) for block in self._single_blocks),
        ]

    @classmethod
    def planned_layout(
        cls, config: Mapping[str, Any], *, latents: Grid, text_tokens: int = 0, batch: int = 1
    ) -> ModelLayout:
        """Sizes for latents of this size; a prompt without padding."""
        frames, rows, columns = token_grid(config, latents)
        grids: tuple[Grid, ...] = ((frames, rows, columns),)
        if config["image_condition_type"] == TOKEN_REPLACE and frames > 1:
            grids = ((1, rows, columns), (frames - 1, rows, columns))
        heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
        width = int(heads * head_dim * config["mlp_ratio"])
        return ModelLayout(
            kinds=(
                LayerKind("double", config["num_layers"], width, mlp_sees_text=False),
                LayerKind("single", config["num_single_layers"], width),
            ),
            heads=heads,
            head_dim=head_dim,
            batch=batch,
            grids=grids,
            text_tokens=text_tokens,
        )

    @property
    def _double_blocks(self) -> list[Any]:
        return list(self._model.transformer_blocks)

    @property
    def _single_blocks(self) -> list[Any]:
        return list(self._model.single_transformer_blocks)


class FramePackAdapter(HistoryAdapter, HunyuanVideoAdapter):
    """As HunyuanVideo, behind earlier frames in patches of three sizes; sections are generations.

    The embedding of an image stands before the text, and counts as text.
    """

    transformer_class = "HunyuanVideoFramepackTransformer3DModel"
    families = "HunyuanVideo FramePack: image to video, section by section"
    sparse_mlp = (
        "feed-forward of the video tokens, earlier frames included, in double blocks, of all "
        "tokens in single ones"
    )
    present_indices = "indices_latents"
    history: ClassVar[Mapping[str, tuple[int, int]]] = MappingProxyType(
        {
            "latents_clean": (1, 2),
            "latents_history_2x": (2, 2),
            "latents_history_4x": (4, 16),
        }
    )

    @classmethod
    def patch(cls, config: Mapping[str, Any], factor: int) -> Grid:
        """Fixed in the model's code for earlier frames."""
        if factor == 1:
            return patch_of(config)
        return factor, 2 * factor, 2 * factor

    def kept_text(self, arguments: dict[str, Any]) -> dict[str, int]:
        """As `PaddedTextAdapter`, with the image's tokens."""
        return {**super().kept_text(arguments), "image_embeds": arguments["image_embeds"].shape[1]}

    def install_tile_order(self) -> None:
        """Hooks the inputs, the present frames' rotary embedding and the output norm."""
        model, add = self._model, self._patches.add_hook
        add(model.register_forward_pre_hook(self._prepare_inputs, with_kwargs=True))
        add(model.register_forward_pre_hook(self._note_indices, with_kwargs=True))
        add(model.rope.register_forward_hook(self._order_present, with_kwargs=True))
        add(model.norm_out.register_forward_pre_hook(self.restore_order))

    def ordered_places(self, output: Any, order: torch.Tensor) -> Any:
        """Of cosines and sines, both ``[N, D]``."""
        return tuple(part.index_select(0, order.to(part.device)) for part in output)

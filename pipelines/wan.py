"""Wan 2.1 and 2.2 (``WanTransformer3DModel``), with one expert or two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from chipsparse.layout import Grid, LayerKind, ModelLayout
from chipsparse.pipelines.adapter import ModelAdapter, tagged
from chipsparse.pipelines.feed_forward import FeedForwardModule, FeedForwardSite

ATTENTION_ARGUMENTS = ("hidden_states", "encoder_hidden_states", "attention_mask", "rotary_emb")
PROJECTIONS = 6  # q, k, v and out of self-attention; q and out of cross-attention


class WanAdapter(ModelAdapter):
    """Self-attention (``attn1``) and feed-forward layers of every block; cross-attention is left.

    The tokens are put in order behind the patch embedding and in raster order again before the
    output norm; the rotary embeddings and the per-token timestep embeddings of Wan 2.2 TI2V follow.
    None of these hooks is inside a transformer block.
    """

    transformer_class = "WanTransformer3DModel"
    families = "Wan 2.1 and 2.2, with one expert or two: text, image and video to video"
    sparse_attention = "self-attention; cross-attention is left"
    shares_tokens = True
    shares_guidance = True

    def blocks(self) -> list[Any]:
        """The transformer blocks, in layer order."""
        return list(self._model.blocks)

    def self_attentions(self) -> list[Any]:
        """``attn1`` of every block."""
        return [block.attn1 for block in self.blocks()]

    def feed_forwards(self) -> list[FeedForwardSite]:
        """``ffn`` of every block."""
        return [FeedForwardModule(block, "ffn") for block in self.blocks()]

    @classmethod
    def planned_layout(
        cls, config: Mapping[str, Any], *, latents: Grid, text_tokens: int = 0, batch: int = 1
    ) -> ModelLayout:
        """Sizes for latents of this size; text tokens are in cross-attention only."""
        frames, rows, columns = (
            size // patch for size, patch in zip(latents, config["patch_size"], strict=True)
        )
        return ModelLayout(
            kinds=cls.kinds(config),
            heads=config["num_attention_heads"],
            head_dim=config["attention_head_dim"],
            batch=batch,
            grids=cls.grids((frames, rows, columns)),
        )

    @classmethod
    def kinds(cls, config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
        """The kinds of `blocks`, in the same order."""
        return (
            LayerKind("block", config["num_layers"], config["ffn_dim"], projections=PROJECTIONS),
        )

    @classmethod
    def grids(cls, tokens: Grid) -> tuple[Grid, ...]:
        """What is put in order by itself: the whole video of so many frames, rows and columns."""
        return (tokens,)

    def layout(self, arguments: dict[str, Any]) -> ModelLayout:
        """Sizes for latents ``[B, C, F, H, W]``."""
        batch, _, frames, rows, columns = arguments["hidden_states"].shape
        return self.planned_layout(self._model.config, latents=(frames, rows, columns), batch=batch)

    @staticmethod
    def tag_attention(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Passes the tag as the attention mask, which a Wan block never sets."""
        return tagged(module, args, kwargs, ATTENTION_ARGUMENTS)

    def install_tile_order(self) -> None:
        """Hooks patch embedding, rotary embedding, timestep embedding and output norm."""
        model, add = self._model, self._patches.add_hook
        add(model.patch_embedding.register_forward_hook(self._order_latents))
        add(model.rope.register_forward_hook(self._order_rotary))
        add(model.condition_embedder.register_forward_hook(self._order_timesteps))
        add(model.norm_out.register_forward_pre_hook(self.restore_order))

    def _order_latents(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        tokens = self.ordered(output.flatten(2), 2)
        # A piece of the sequence has no frames; the model flattens what it gets.
        return tokens.view(output.shape) if self.split is None else tokens

    def _order_rotary(
        self, _module: Any, _args: Any, output: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        return tuple(self.ordered(part, 1) for part in output)

    def _order_timesteps(self, _module: Any, _args: Any, output: tuple[Any, ...]) -> Any:
        temb, projection, *rest = output
        if projection.ndim == 2:  # one timestep for all tokens
            return output
        return (temb, self.ordered(projection, 1), *rest)

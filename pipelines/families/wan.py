"""Wan 2.1 and 2.2 (``WanTransformer3DModel``), with one expert or two."""

from __future__ import annotations

from typing import Any

import torch

from chipsparse.pipelines.adapter import ModelAdapter


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
    block_list = "blocks"
    attention_name = "attn1"
    mlp_name = "ffn"
    projections = 6  # q, k, v and out of self-attention; q and out of cross-attention
    text_place = "cross-attention"
    rotary_dim = 1
    embedding_name = "patch_embedding"
    rotary_name = "rope"
    last_name = "norm_out"

    def install_tile_order(self) -> None:
        super().install_tile_order()
        self.hook_output("condition_embedder", self._order_timesteps)

    def order_embedded(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        tokens = self.ordered(output.flatten(2), 2)
        # A piece of the sequence has no frames; the model flattens what it gets.
        return tokens.view(output.shape) if self.split is None else tokens

    def _order_timesteps(self, _module: Any, _args: Any, output: tuple[Any, ...]) -> Any:
        temb, projection, *rest = output
        if projection.ndim == 2:  # one timestep for all tokens
            return output
        return (temb, self.ordered(projection, 1), *rest)

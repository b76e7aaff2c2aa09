"""Wan 2.1 and 2.2 (``WanTransformer3DModel``), with one expert or two."""

from __future__ import annotations

from typing import Any

import torch

from chipsparse.pipelines.family import Family
from chipsparse.pipelines.family_facts import (
    ModuleNames,
    PerToken,
    SameBlocks,
    Sharing,
    SparseParts,
    TextPlace,
)
from chipsparse.pipelines.token_order import TokenOrder


class WanOrder(TokenOrder):
    """Orders tokens after the patch embedding, and in raster order again before the output norm.

    The rotary embeddings and the per-token timestep embeddings of Wan 2.2 TI2V follow.
    """

    def install(self) -> None:
        """Hook the embedding of timesteps, too."""
        super().install()
        self.hook_output("condition_embedder", self._order_timesteps)

    def order_embedded(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Order ``[B, C, F, H, W]``."""
        tokens = self.ordered(output.flatten(2), 2)
        # A piece of the sequence has no frames; the model flattens what it gets.
        return tokens.view(output.shape) if self.split is None else tokens

    def _order_timesteps(self, _module: Any, _args: Any, output: tuple[Any, ...]) -> Any:
        temb, projection, *rest = output
        if projection.ndim == 2:  # one timestep for all tokens
            return output
        return (temb, self.ordered(projection, 1), *rest)


# Self-attention (``attn1``) and feed-forward layers of every block run sparse.
WAN = Family(
    transformer_class="WanTransformer3DModel",
    title="Wan 2.1 and 2.2, with one expert or two: text, image and video to video",
    sparse=SparseParts(attention="self-attention; cross-attention is left"),
    modules=ModuleNames(
        blocks=("blocks",),
        attention="attn1",
        mlp="ffn",
        embedding="patch_embedding",
        rotary="rope",
        last="norm_out",
    ),
    kinds=SameBlocks(projections=6),  # q, k, v and out of self-attention; q and out of the other
    text=TextPlace("cross-attention"),
    per_token=PerToken(rotary_dim=1),
    sharing=Sharing(tokens=True, guidance=True),
    tokens=WanOrder,
)

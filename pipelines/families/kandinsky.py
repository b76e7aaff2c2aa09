"""Kandinsky 5 and 6 (``Kandinsky5Transformer3DModel``, ``Kandinsky6Transformer3DModel``)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from chipsparse.layout import Grid
from chipsparse.pipelines.call_reader import Arguments, CallReader
from chipsparse.pipelines.family import Family
from chipsparse.pipelines.family_facts import (
    AttentionFacts,
    Config,
    ModuleNames,
    SameBlocks,
    Sharing,
    SparseParts,
    TextPlace,
)
from chipsparse.pipelines.feed_forward_forms import MLPParts
from chipsparse.pipelines.token_grids import frame_by_frame
from chipsparse.pipelines.token_order import TokenOrder

NABLA = "sparse_params"


class KandinskyReader(CallReader):
    """Reads latents ``[B, F, H, W, C]``."""

    def grids(self, arguments: Arguments) -> tuple[Grid, ...]:
        """Return the video's grid, or one row of tokens where NABLA orders them."""
        _, frames, rows, columns, _ = arguments["hidden_states"].shape
        (grid,) = self.family.grids(self.model.config, (frames, rows, columns))
        return ((1, 1, math.prod(grid)),) if arguments.get(NABLA) is not None else (grid,)


class KandinskyOrder(TokenOrder):
    """Orders tokens ``[B, T, H, W, C]``, of which a process has its part as one row."""

    def install(self) -> None:
        """Hook the rotary embedding before it is made, too."""
        super().install()
        rotary = self.model.visual_rope_embeddings
        self.patches.add_hook(rotary.register_forward_pre_hook(self._name_whole_grid))

    def order_embedded(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Order ``[B, T, H, W, ...]``; a process's part of it is one row of tokens."""
        tokens = self.ordered(output.flatten(1, 3), 1)
        return tokens.unflatten(1, (-1, 1, 1)) if self.split else tokens.view(output.shape)

    def ordered_rotary(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Order ``[B, T, H, W, ...]`` alike."""
        return self.order_embedded(_module, _args, output)

    def _name_whole_grid(self, _module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.split is None:
            return None
        (batch, *_), *rest = args
        return ((batch, *self._grid()), *rest)

    def restored(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the tokens ``[B, T, H, W, C]`` of all processes, in raster order."""
        tokens = super().restored(hidden.flatten(1, 3))
        shape = hidden.shape[1:4] if self.split is None else self._grid()
        return tokens.unflatten(1, shape)

    def _grid(self) -> Grid:
        assert self.session.plan is not None
        (grid,) = self.session.plan.layout.grids
        return grid


def heads(config: Config) -> tuple[int, int]:
    """The attention heads, and channels of each."""
    head_dim = sum(config["axes_dims"])
    return config["model_dim"] // head_dim, head_dim


def neurons(config: Config) -> int:
    """The neurons of a feed-forward layer."""
    return config["ff_dim"]


# q, k, v and out of self-attention; q and out of the other.
KINDS = SameBlocks("visual", projections=6, count="num_visual_blocks", neurons=neurons)

# Self-attention and feed-forward layers of the visual blocks; cross-attention is left. Larger
# models come with sparse attention of their own (NABLA), which stays.
KANDINSKY5 = Family(
    transformer_class="Kandinsky5Transformer3DModel",
    title="Kandinsky 5: text and image to video, text and image to image",
    sparse=SparseParts(
        attention="self-attention, unless it is the model's own NABLA; cross-attention is left",
    ),
    modules=ModuleNames(
        blocks=("visual_transformer_blocks",),
        attention="self_attention",
        mlp="feed_forward",
        mlp_parts=MLPParts("in_layer", "out_layer", None, "activation"),
        embedding="visual_embeddings",
        rotary="visual_rope_embeddings",
        last="out_layer",
    ),
    kinds=KINDS,
    heads=heads,
    default_latents=128,
    # For the masks of NABLA the model was trained.
    attention=AttentionFacts(
        "processor",
        dense_arguments={NABLA: "the model's own sparse attention (NABLA) masks it"},
    ),
    text=TextPlace("cross-attention"),
    sharing=Sharing(tokens=True),
    reader=KandinskyReader,
    tokens=KandinskyOrder,
)


class Kandinsky6Reader(KandinskyReader):
    """Reads types of frames, which the model adds to the tokens after their embedding."""

    def grids(self, arguments: Arguments) -> tuple[Grid, ...]:
        """Return the video's grid, or one for each frame where frames have types."""
        grids = super().grids(arguments)
        typed = arguments.get("visual_token_type_ids") is not None
        return frame_by_frame(*grids) if typed else grids


class Kandinsky6Order(KandinskyOrder):
    """Orders rotary embeddings that are the same for all samples."""

    def ordered_rotary(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Order ``[T, H, W, ...]``."""
        return self.ordered(output.flatten(0, 2), 0).view(output.shape)


# Kandinsky 5 with a stream of sound, which is left, as is attention between both.
KANDINSKY6 = replace(
    KANDINSKY5,
    transformer_class="Kandinsky6Transformer3DModel",
    title="Kandinsky 6: text and image to video with sound",
    sparse=SparseParts(
        attention="self-attention of the video; the sound's and cross-attention are left",
        mlp="feed-forward of the video tokens",
    ),
    modules=replace(KANDINSKY5.modules, inner="video_dec_block", mlp_parts=None),
    kinds=replace(KINDS, projections=10),  # q and out to the sound, k and v from it besides
    sharing=Sharing(why_whole="its sound attends to all tokens of the video"),
    reader=Kandinsky6Reader,
    tokens=Kandinsky6Order,
)

"""The shape of one model call, as its adapter reads it from the model: numbers only."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

Grid = tuple[int, int, int]
Fp8Form = Literal["weights", "weights and inputs"]  # that linears in FP8 round


@dataclass(frozen=True)
class LayerKind:
    """Layers of one build, which follow each other in the model."""

    name: str  # what the model calls them, such as "double" and "single"
    layers: int  # how many there are
    intermediate_size: int  # neurons of their feed-forward layer
    mlp_sees_text: bool = True  # text tokens pass that layer, too, and may run sparse in it
    mlp_linears: int = 2  # of that layer, with a row or column a neuron; 3 where it is gated
    projections: int = 4  # linears as wide as the hidden states that each token passes besides


@dataclass(frozen=True)
class Share:
    """The share of a call that one of several processes has."""

    heads: int  # inside of attention, the most that any of them has
    tokens: int  # outside of attention, the most that any of them has, text included
    grid_tokens: int  # the same of video or image tokens alone


@dataclass(frozen=True)
class ModelLayout:
    """Sizes that the plan and the session need.

    Layers are numbered in the order of ``kinds``: all of the first kind, then all of the next.
    """

    kinds: tuple[LayerKind, ...]  # the transformer blocks with self-attention
    heads: int  # attention heads per layer
    head_dim: int  # channels per head
    batch: int  # samples in one call
    # The video or image tokens as (frames, rows, columns) after patchification; a model that sees
    # several images in one sequence has one grid for each, in this order.
    grids: tuple[Grid, ...]
    # Text tokens in the same sequence as the others (joint attention), and whatever else stands in
    # it: audio, images to go by. Their columns are always kept.
    text_tokens: int = 0
    text_first: bool = False  # whether the text tokens stand before the others, or behind them
    share: Share | None = None  # what this process has of it; None: all
    guided_in_batch: int = 1  # guidance branches that the batch holds, one behind the other
    # Whether the rows of the text tokens, which then stand before the others, are computed in full
    # at every step, too; caches then hold the others alone.
    exact_text: bool = False
    hidden_size: int | None = None  # channels of the hidden states; None for those of all heads
    # Query rows of zeros before those that may run sparse, so that blocks of them lie in the video
    # or image as another guidance branch's do.
    padding_rows: int = 0
    samples: tuple[int, ...] | None = None  # videos or images in the call, where not all are

    @cached_property
    def without_prompts(self) -> ModelLayout:
        """The layout without what guidance branches differ in: text tokens and samples."""
        return replace(
            self,
            text_tokens=0,
            batch=1,
            guided_in_batch=1,
            share=None,
            padding_rows=0,
            samples=None,
        )

    @property
    def layers(self) -> int:
        """Layers of all kinds."""
        return sum(kind.layers for kind in self.kinds)

    def kind(self, layer: int) -> LayerKind:
        """Return the kind of a layer, or raise `ValueError` if there is no such layer."""
        first = 0
        for kind in self.kinds:
            if first <= layer < first + kind.layers:
                return kind
            first += kind.layers
        raise ValueError(f"layer: must be from 0 to {self.layers - 1}, got {layer}")

    @property
    def channels(self) -> int:
        """Channels of all heads, on all processes."""
        return self.heads * self.head_dim

    @property
    def width(self) -> int:
        """Channels of the hidden states."""
        return self.channels if self.hidden_size is None else self.hidden_size

    @cached_property
    def own(self) -> Share:
        """This process's share of the call: all of it where no other process has one."""
        if self.share is not None:
            return self.share
        return Share(self.heads, self.tokens, self.grid_tokens)

    @property
    def query_rows(self) -> range:
        """The rows of self-attention that may run sparse; the others see all columns."""
        return range(self.full_attention_rows - self.padding_rows, self.tokens)

    @property
    def full_attention_rows(self) -> int:
        """Rows of self-attention that see all columns at every step."""
        return self.text_tokens if self.exact_text else 0

    @property
    def own_attention_channels(self) -> int:
        """Channels of this process's heads."""
        return self.own.heads * self.head_dim

    def mlp_tokens(self, layer: int) -> int:
        """Return this process's tokens per sample that may run sparse in a feed-forward layer."""
        sees_text = self.kind(layer).mlp_sees_text and not self.exact_text
        return self.own.tokens if sees_text else self.own.grid_tokens

    @cached_property
    def grid_tokens(self) -> int:
        """Video or image tokens per sample, of all processes."""
        return sum(math.prod(grid) for grid in self.grids)

    @property
    def grid_columns(self) -> slice[int, int]:
        """The columns of attention that are video or image tokens; others are text."""
        first = self.text_tokens if self.text_first else 0
        return slice(first, first + self.grid_tokens)

    @property
    def tokens(self) -> int:
        """Tokens per sample in the whole sequence: rows and columns of full attention."""
        return self.grid_tokens + self.text_tokens

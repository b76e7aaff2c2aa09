"""The shape of one model call, as its adapter reads it from the model: numbers only."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelLayout:
    """Sizes that the plan and the session need.

    Attributes:
        layers: number of transformer blocks with self-attention.
        heads: attention heads per layer.
        head_dim: channels per head.
        mlp_width: neurons of a feed-forward layer.
        batch: samples in one call.
        grid: video tokens as (frames, rows, columns) after patchification.
        text_tokens: text tokens in the same sequence as the video tokens (joint attention).
    """

    layers: int
    heads: int
    head_dim: int
    mlp_width: int
    batch: int
    grid: tuple[int, int, int]
    text_tokens: int = 0

    @property
    def video_tokens(self) -> int:
        """Video tokens per sample."""
        return math.prod(self.grid)

    @property
    def tokens(self) -> int:
        """Tokens per sample in self-attention."""
        return self.video_tokens + self.text_tokens

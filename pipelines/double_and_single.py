"""Models with double blocks, with weights for image and text, and single ones of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from chipsparse.layout import LayerKind
from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.pipelines.feed_forward import (
    FeedForwardModule,
    FeedForwardSite,
    ParallelFeedForward,
)


class DoubleAndSingleBlocks(ModelAdapter):
    """The part that such models share; comes before another adapter's class."""

    sparse_attention = "joint attention of double and single blocks"

    single_mlp: ClassVar[Any] = ParallelFeedForward  # which runs beside a single block's attention

    def blocks(self) -> list[Any]:
        return [*self._model.transformer_blocks, *self._model.single_transformer_blocks]

    def feed_forwards(self) -> list[FeedForwardSite]:
        double = self._model.transformer_blocks
        single = self._model.single_transformer_blocks
        layers = [FeedForwardModule(block, "ff", self.mlp_parts) for block in double]
        return [*layers, *map(self.single_mlp, single)]

    @classmethod
    def kinds(cls, config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
        """Double and single blocks; the text has a feed-forward layer of its own in double ones."""
        double = config["num_layers"]
        single = config["num_single_layers"]
        width = cls.neurons(config)
        linears = cls.mlp_linears
        return (
            LayerKind("double", double, width, mlp_sees_text=False, mlp_linears=linears),
            LayerKind("single", single, width, mlp_linears=linears),
        )

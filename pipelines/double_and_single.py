"""Models with double blocks, with weights for image and text, and single ones of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chipsparse.layout import LayerKind
from chipsparse.pipelines.family import own_module
from chipsparse.pipelines.family_facts import Config, ModuleNames, neurons
from chipsparse.pipelines.feed_forward import FeedForwardSite

BLOCKS = ("transformer_blocks", "single_transformer_blocks")
ATTENTION = "joint attention of double and single blocks"


@dataclass(frozen=True)
class DoubleAndSingle:
    """Their kinds; the text has a feed-forward layer of its own in double blocks."""

    mlp_linears: int = 2

    def __call__(self, config: Config) -> tuple[LayerKind, ...]:
        """Return the kinds of the double and the single blocks."""
        double = config["num_layers"]
        single = config["num_single_layers"]
        width = neurons(config)
        linears = self.mlp_linears
        return (
            LayerKind("double", double, width, mlp_sees_text=False, mlp_linears=linears),
            LayerKind("single", single, width, mlp_linears=linears),
        )


@dataclass(frozen=True)
class SingleBeside:
    """Their feed-forward layers: a single block computes its own beside its attention."""

    single: Callable[[Any], FeedForwardSite]

    def __call__(self, block: Any, names: ModuleNames) -> FeedForwardSite:
        """Return the feed-forward layer of a double or a single block."""
        return own_module(block, names) if hasattr(block, names.mlp) else self.single(block)

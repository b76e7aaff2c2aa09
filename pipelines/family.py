"""A family of models: one transformer class of diffusers, and what serves a loaded model of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chipsparse.pipelines.call_reader import CallReader
from chipsparse.pipelines.family_facts import FamilyFacts, ModuleNames
from chipsparse.pipelines.feed_forward import FeedForwardModule, FeedForwardSite
from chipsparse.pipelines.token_order import TokenOrder


def own_module(block: Any, names: ModuleNames) -> FeedForwardSite:
    """Return the feed-forward layer of a block that is a module of its own."""
    return FeedForwardModule(block, names.mlp, names.mlp_parts)


@dataclass(frozen=True, kw_only=True)
class Family(FamilyFacts):
    """Facts about a transformer class, and the classes that read its calls and order its tokens.

    A family where only facts differ needs no class of its own.
    """

    reader: type[CallReader] = CallReader
    tokens: type[TokenOrder] = TokenOrder
    feed_forward: Callable[[Any, ModuleNames], FeedForwardSite] = own_module  # of a block

    def blocks(self, transformer: Any) -> list[Any]:
        """Return the modules that have the layers of each transformer block, in layer order."""
        lists = [getattr(transformer, name) for name in self.modules.blocks]
        return [block.get_submodule(self.modules.inner) for blocks in lists for block in blocks]

    def self_attentions(self, transformer: Any) -> list[Any]:
        """Return the self-attention modules in layer order, each with a ``processor``."""
        return [getattr(block, self.modules.attention) for block in self.blocks(transformer)]

    def feed_forwards(self, transformer: Any) -> list[FeedForwardSite]:
        """Return the feed-forward layers in layer order."""
        return [self.feed_forward(block, self.modules) for block in self.blocks(transformer)]

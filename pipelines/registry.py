"""Which adapter serves which transformer class."""

from __future__ import annotations

from typing import Any

from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.pipelines.flux import ChromaAdapter, FluxAdapter
from chipsparse.pipelines.generic import GenericAdapter
from chipsparse.pipelines.wan import WanAdapter

ADAPTERS: dict[str, type[ModelAdapter]] = {
    adapter.transformer_class: adapter for adapter in (WanAdapter, FluxAdapter, ChromaAdapter)
}


def adapter_class(transformer: Any) -> type[ModelAdapter]:
    """The adapter of a transformer's class, else the one that serves what it can."""
    return ADAPTERS.get(type(transformer).__name__, GenericAdapter)

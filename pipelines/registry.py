"""Which adapter serves which transformer class."""

from __future__ import annotations

from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.pipelines.flux import ChromaAdapter, FluxAdapter
from chipsparse.pipelines.hunyuan_video import HunyuanVideoAdapter
from chipsparse.pipelines.hunyuan_video15 import HunyuanVideo15Adapter
from chipsparse.pipelines.wan import WanAdapter

ADAPTERS: dict[str, type[ModelAdapter]] = {
    adapter.transformer_class: adapter
    for adapter in (
        WanAdapter,
        FluxAdapter,
        ChromaAdapter,
        HunyuanVideoAdapter,
        HunyuanVideo15Adapter,
    )
}

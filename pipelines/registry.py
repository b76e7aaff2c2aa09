"""Which adapter serves which transformer class."""

from __future__ import annotations

from typing import Any

from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.pipelines.cogvideox import CogVideoXAdapter
from chipsparse.pipelines.flux import ChromaAdapter, FluxAdapter
from chipsparse.pipelines.flux2 import Flux2Adapter
from chipsparse.pipelines.generic import GenericAdapter
from chipsparse.pipelines.hunyuan_video import HunyuanVideoAdapter
from chipsparse.pipelines.hunyuan_video15 import HunyuanVideo15Adapter
from chipsparse.pipelines.ltx import LTXAdapter
from chipsparse.pipelines.ltx2 import LTX2Adapter
from chipsparse.pipelines.minimax_h3 import MiniMaxH3Adapter
from chipsparse.pipelines.mochi import MochiAdapter
from chipsparse.pipelines.qwen_image import QwenImageAdapter
from chipsparse.pipelines.stable_diffusion3 import StableDiffusion3Adapter
from chipsparse.pipelines.wan import WanAdapter

ADAPTERS: dict[str, type[ModelAdapter]] = {
    adapter.transformer_class: adapter
    for adapter in (
        WanAdapter,
        FluxAdapter,
        ChromaAdapter,
        CogVideoXAdapter,
        MochiAdapter,
        StableDiffusion3Adapter,
        Flux2Adapter,
        QwenImageAdapter,
        LTXAdapter,
        LTX2Adapter,
        HunyuanVideoAdapter,
        HunyuanVideo15Adapter,
        MiniMaxH3Adapter,
    )
}


def adapter_class(transformer: Any) -> type[ModelAdapter]:
    """The adapter of a transformer's class, else the one that serves what it can."""
    return ADAPTERS.get(type(transformer).__name__, GenericAdapter)

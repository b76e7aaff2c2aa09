"""Which adapter serves which transformer class."""

from __future__ import annotations

import inspect
from inspect import Parameter
from typing import Any

from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.pipelines.bria_fibo2 import BriaFibo2Adapter
from chipsparse.pipelines.cogvideox import CogVideoXAdapter
from chipsparse.pipelines.cosmos3 import Cosmos3Adapter
from chipsparse.pipelines.flux import (
    BriaAdapter,
    ChromaAdapter,
    FluxAdapter,
    LongCatImageAdapter,
    OvisImageAdapter,
)
from chipsparse.pipelines.flux2 import Flux2Adapter
from chipsparse.pipelines.flux3 import Flux3Adapter
from chipsparse.pipelines.helios import HeliosAdapter
from chipsparse.pipelines.hidream import HiDreamAdapter
from chipsparse.pipelines.hunyuan_video import FramePackAdapter, HunyuanVideoAdapter
from chipsparse.pipelines.hunyuan_video15 import HunyuanVideo15Adapter
from chipsparse.pipelines.kandinsky import Kandinsky5Adapter, Kandinsky6Adapter
from chipsparse.pipelines.ltx import LTXAdapter
from chipsparse.pipelines.ltx2 import LTX2Adapter
from chipsparse.pipelines.minimax_h3 import MiniMaxH3Adapter
from chipsparse.pipelines.mochi import MochiAdapter
from chipsparse.pipelines.other_classes import OTHER_CLASSES
from chipsparse.pipelines.patches import stock_class
from chipsparse.pipelines.qwen_image import QwenImageAdapter
from chipsparse.pipelines.qwen_image21 import QwenImage21Adapter
from chipsparse.pipelines.stable_diffusion3 import StableDiffusion3Adapter
from chipsparse.pipelines.wan import WanAdapter
from chipsparse.pipelines.wan_kin import (
    ChronoEditAdapter,
    SkyReelsV2Adapter,
    WanAnimateAdapter,
    WanVACEAdapter,
)
from chipsparse.pipelines.z_image import ZImageAdapter

ADAPTERS: dict[str, type[ModelAdapter]] = {
    adapter.transformer_class: adapter
    for adapter in (
        WanAdapter,
        WanVACEAdapter,
        WanAnimateAdapter,
        SkyReelsV2Adapter,
        ChronoEditAdapter,
        HeliosAdapter,
        FluxAdapter,
        ChromaAdapter,
        LongCatImageAdapter,
        BriaAdapter,
        OvisImageAdapter,
        BriaFibo2Adapter,
        CogVideoXAdapter,
        MochiAdapter,
        StableDiffusion3Adapter,
        Flux2Adapter,
        Flux3Adapter,
        QwenImageAdapter,
        QwenImage21Adapter,
        ZImageAdapter,
        HiDreamAdapter,
        LTXAdapter,
        LTX2Adapter,
        Kandinsky5Adapter,
        Kandinsky6Adapter,
        HunyuanVideoAdapter,
        FramePackAdapter,
        HunyuanVideo15Adapter,
        MiniMaxH3Adapter,
        Cosmos3Adapter,
    )
}


def adapter_class(transformer: Any) -> type[ModelAdapter]:
    """The adapter of a transformer that has one; see `find_adapter`."""
    found = find_adapter(transformer)
    assert found is not None
    return found


def find_adapter(transformer: Any) -> type[ModelAdapter] | None:
    """The adapter of a transformer's class; None where it has none.

    A subclass has that of the nearest class with one, unless it has a ``forward`` that may not hand
    its arguments on to that of this class.
    """
    overriding: list[Any] = []
    for model_class in stock_class(transformer).__mro__:
        own = ADAPTERS.get(model_class.__name__)
        forward: Any = getattr(model_class, "forward", None)
        if own is not None:
            return own if all(_hands_on(each, forward) for each in overriding) else None
        if "forward" in vars(model_class):
            overriding.append(forward)
    return None


def why_refused(transformer: Any) -> str:
    """Why a transformer without an adapter is refused."""
    names = [model_class.__name__ for model_class in stock_class(transformer).__mro__]
    if (base := next((name for name in names if name in ADAPTERS), None)) is not None:
        return f"its forward may not hand its arguments on to that of {base}"
    return OTHER_CLASSES.get(names[0], "chipsparse has no adapter for it")


def _hands_on(forward: Any, overridden: Any) -> bool:
    """Return whether a method takes all arguments of the one that it overrides, and calls that.

    Of one that takes whatever it is given the signature says so, of others their code.
    """
    taken, known = (inspect.signature(each).parameters for each in (forward, overridden))
    kinds = [each.kind for each in taken.values()][1:]
    if kinds == [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]:
        return True
    own, stock = inspect.unwrap(forward), inspect.unwrap(overridden)
    calls = own is stock or "forward" in getattr(getattr(own, "__code__", None), "co_names", ())
    return calls and (Parameter.VAR_KEYWORD in kinds or taken.keys() >= known.keys())

"""The family of each transformer class of diffusers, and why others are refused."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping
from importlib import import_module
from inspect import Parameter
from types import MappingProxyType
from typing import Any

from chipsparse.pipelines import families
from chipsparse.pipelines.family import Family
from chipsparse.pipelines.patches import stock_class


def _collect() -> dict[str, Family]:
    modules = [
        import_module(f"{families.__name__}.{module.name}")
        for module in pkgutil.iter_modules(families.__path__)
    ]
    found = {
        item.transformer_class: item
        for module in modules
        for item in vars(module).values()
        if isinstance(item, Family)
    }
    return {name: found[name] for name in sorted(found)}


FAMILIES: dict[str, Family] = _collect()  # by transformer class


def family_of(transformer: Any) -> Family:
    """The family of a transformer that has one; see `find_family`."""
    family = find_family(transformer)
    assert family is not None
    return family


def find_family(transformer: Any) -> Family | None:
    """The family of a transformer's class; None where it has none.

    A subclass has that of the nearest class with one, unless it has a ``forward`` that may not hand
    its arguments on to that of this class.
    """
    overriding: list[Any] = []
    for model_class in stock_class(transformer).__mro__:
        own = FAMILIES.get(model_class.__name__)
        forward: Any = getattr(model_class, "forward", None)
        if own is not None:
            return own if all(_hands_on(method, forward) for method in overriding) else None
        if "forward" in vars(model_class):
            overriding.append(forward)
    return None


def why_refused(transformer: Any) -> str:
    """Return why a transformer without a family is refused."""
    names = [model_class.__name__ for model_class in stock_class(transformer).__mro__]
    if (base := next((name for name in names if name in FAMILIES), None)) is not None:
        return f"its forward may not hand its arguments on to that of {base}"
    return OTHER_CLASSES.get(names[0], "chipsparse has no adapter for it")


def _hands_on(forward: Any, overridden: Any) -> bool:
    """Return whether a method takes all arguments of the one that it overrides, and calls that.

    If it takes ``*args, **kwargs``, its signature is enough; otherwise its code must call
    ``forward``.
    """
    taken, known = (inspect.signature(method).parameters for method in (forward, overridden))
    kinds = [parameter.kind for parameter in taken.values()][1:]
    if kinds == [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]:
        return True
    own = inspect.unwrap(forward)
    stock = inspect.unwrap(overridden)
    calls = own is stock or "forward" in getattr(getattr(own, "__code__", None), "co_names", ())
    return calls and (Parameter.VAR_KEYWORD in kinds or taken.keys() >= known.keys())


# Classes without a family.
_BY_REASON = {
    "its attention does not go through diffusers' dispatcher": """
        AllegroTransformer3DModel AuraFlowTransformer2DModel CogView3PlusTransformer2DModel
        CogView4Transformer2DModel ConsisIDTransformer3DModel DiTTransformer2DModel
        DreamLiteTransformer2DModel EasyAnimateTransformer3DModel HunyuanDiT2DModel
        LatteTransformer3DModel Lumina2Transformer2DModel LuminaNextDiT2DModel
        OmniGenTransformer2DModel PixArtTransformer2DModel PriorTransformer StableAudioDiTModel
        Transformer2DModel TransformerTemporalModel
    """,
    "every call passes attention masks": """
        BriaFiboTransformer2DModel ErnieImageTransformer2DModel HunyuanImageTransformer2DModel
        Ideogram4Transformer2DModel JoyImageEditPlusTransformer3DModel Krea2Transformer2DModel
        LongCatAudioDiTTransformer MotifVideoTransformer3DModel NucleusMoEImageTransformer2DModel
    """,
    "its attention modules pass no mask on to diffusers' dispatcher": """
        AnyFlowFARTransformer3DModel AnyFlowTransformer3DModel CosmosTransformer3DModel
        JoyImageEditTransformer3DModel MiniMaxMusic3Transformer1DModel StableAudio3DiTModel
    """,
    "it is called with other arguments than hidden_states and timestep": """
        MiniMaxMusic3RVQDepthDecoder RFD4ProteinaTransformer T5FilmDecoder
    """,
    "its self-attention is linear: it has no columns": """
        SanaTransformer2DModel SanaVideoTransformer3DModel SanaWMTransformer3DModel
    """,
    "its processors make another mask of the one that they are given": """
        GlmImageTransformer2DModel PRXTransformer2DModel
    """,
    "every other layer masks all but a sliding window": "AceStepTransformer1DModel",
    "every call has sparse attention of its own (NABLA)": "Kandinsky6SRTransformer3DModel",
    "its layers keep keys and values between calls": "SanaWMLTX2RefinerTransformer3DModel",
    "every step masks what frames see of the reference": "WanAnimate2Transformer3DModel",
}
# A test compares these with what diffusers has, so that classes of a new release are looked at.
OTHER_CLASSES: Mapping[str, str] = MappingProxyType(
    {name: reason for reason, names in _BY_REASON.items() for name in names.split()},
)

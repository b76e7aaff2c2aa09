"""diffusers' transformer classes without an adapter, and why each is refused.

A test compares this with what diffusers has, so that the classes of a new release are looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_DIRECT = "its attention does not go through diffusers' dispatcher"
_NO_MASK = "its attention modules pass no mask on to diffusers' dispatcher"
_MASKED = "every call passes attention masks"
_OTHER_CALL = "it is called with other arguments than hidden_states and timestep"
_LINEAR = "its self-attention is linear: it has no columns"
_CHANGED_MASK = "its processors make another mask of the one that they are given"

# Why a class is refused.
OTHER_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "AceStepTransformer1DModel": "every other layer masks all but a sliding window",
        "AllegroTransformer3DModel": _DIRECT,
        "AnyFlowFARTransformer3DModel": _NO_MASK,
        "AnyFlowTransformer3DModel": _NO_MASK,
        "AuraFlowTransformer2DModel": _DIRECT,
        "BriaFiboTransformer2DModel": _MASKED,
        "CogView3PlusTransformer2DModel": _DIRECT,
        "CogView4Transformer2DModel": _DIRECT,
        "ConsisIDTransformer3DModel": _DIRECT,
        "CosmosTransformer3DModel": _NO_MASK,
        "DiTTransformer2DModel": _DIRECT,
        "DreamLiteTransformer2DModel": _DIRECT,
        "EasyAnimateTransformer3DModel": _DIRECT,
        "ErnieImageTransformer2DModel": _MASKED,
        "GlmImageTransformer2DModel": _CHANGED_MASK,
        "HunyuanDiT2DModel": _DIRECT,
        "HunyuanImageTransformer2DModel": _MASKED,
        "Ideogram4Transformer2DModel": _MASKED,
        "JoyImageEditPlusTransformer3DModel": _MASKED,
        "JoyImageEditTransformer3DModel": _NO_MASK,
        "Kandinsky6SRTransformer3DModel": "every call has sparse attention of its own (NABLA)",
        "Krea2Transformer2DModel": _MASKED,
        "LatteTransformer3DModel": _DIRECT,
        "LongCatAudioDiTTransformer": _MASKED,
        "Lumina2Transformer2DModel": _DIRECT,
        "LuminaNextDiT2DModel": _DIRECT,
        "MiniMaxMusic3RVQDepthDecoder": _OTHER_CALL,
        "MiniMaxMusic3Transformer1DModel": _NO_MASK,
        "MotifVideoTransformer3DModel": _MASKED,
        "NucleusMoEImageTransformer2DModel": _MASKED,
        "OmniGenTransformer2DModel": _DIRECT,
        "PRXTransformer2DModel": _CHANGED_MASK,
        "PixArtTransformer2DModel": _DIRECT,
        "PriorTransformer": _DIRECT,
        "RFD4ProteinaTransformer": _OTHER_CALL,
        "SanaTransformer2DModel": _LINEAR,
        "SanaVideoTransformer3DModel": _LINEAR,
        "SanaWMLTX2RefinerTransformer3DModel": "its layers keep keys and values between calls",
        "SanaWMTransformer3DModel": _LINEAR,
        "StableAudio3DiTModel": _NO_MASK,
        "StableAudioDiTModel": _DIRECT,
        "T5FilmDecoder": _OTHER_CALL,
        "Transformer2DModel": _DIRECT,
        "TransformerTemporalModel": _DIRECT,
        "WanAnimate2Transformer3DModel": "every step masks what frames see of the reference",
    }
)

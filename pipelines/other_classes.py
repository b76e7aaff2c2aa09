"""diffusers' transformer classes without an adapter, and why each is refused.

A test compares this with what diffusers has, so that the classes of a new release are looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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
# The reason of each class.
OTHER_CLASSES: Mapping[str, str] = MappingProxyType(
    {name: reason for reason, names in _BY_REASON.items() for name in names.split()}
)

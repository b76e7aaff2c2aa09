"""The tiny pipelines that are soaked, and how they are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.pipelines.families import (
    cogvideox,
    flux,
    flux2,
    hunyuan_video,
    ltx,
    mochi,
    qwen_image,
    stable_diffusion3,
    wan,
)
from tests.pipelines.families.family import Family

BASE = ""  # the call as the family gives it
FAMILIES: dict[str, Family] = {
    family.name: family
    for module in (
        cogvideox,
        flux,
        flux2,
        hunyuan_video,
        ltx,
        mochi,
        qwen_image,
        stable_diffusion3,
        wan,
    )
    for family in module.FAMILIES
}
# How often each is drawn: those with most users first, then one of each further kind.
SHARES = {
    "flux": 5,
    "wan 2.1": 4,
    "wan 2.2 two experts": 3,
    "hunyuan video": 3,
    "hunyuan video 1.5": 1,
    "chroma": 1,
    "flux2": 1,
    "flux image to image": 1,
    "qwen-image": 1,
    "sd3": 1,
    "ltx": 1,
    "mochi": 1,
    "cogvideox 2b": 1,
}
WITHOUT_CALLBACKS = ("hunyuan video 1.5",)
WITHOUT_CACHES_ON_TOP = ("sd3",)  # diffusers has none for its transformer
# Their pipelines ask before each step whether they are to guide.
GUIDED_BY_STEP = ("wan 2.1", "wan 2.2 two experts")
PROMPTS = ("a red circle moves left", "a blue square", "the green triangle grows and shrinks")


@dataclass(frozen=True)
class Place:
    """Where pipelines live, and in which dtype."""

    device: torch.device
    dtype: torch.dtype

    def make(self, family: str) -> Any:
        """A new pipeline, with the same weights at every call."""
        return FAMILIES[family].make().to(self.device, self.dtype)

    def arguments(self, family: str, variant: str, dtype: torch.dtype | None = None) -> Any:
        """The arguments of a family's call, its tensors here and in the pipeline's dtype."""
        found = FAMILIES[family]
        changes: Mapping[str, Any] = found.variants[variant] if variant else {}

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            floating = tensor.is_floating_point()
            return tensor.to(self.device, (dtype or self.dtype) if floating else None)

        return pytree.tree_map_only(torch.Tensor, moved, {**found.call, **changes})


def transformers_of(pipe: Any) -> list[Any]:
    """The transformers of a pipeline, in the order in which they are called."""
    models = (pipe.transformer, getattr(pipe, "transformer_2", None))
    return [model for model in models if model is not None]

"""The PSNR that step caches were published with on real weights: what to expect of a speed-up."""

from __future__ import annotations

import math
from dataclasses import dataclass

import yaml

from chipsparse.common.text_files import read_text
from chipsparse.profiles.profile import ASSETS

ANY_MODEL = "any model"
TWO_EXPERTS = {"WanTransformer3DModel": "Wan 2.2 with two experts, sparse attention"}


@dataclass(frozen=True)
class PublishedPsnr:
    """A published range of PSNR against dense."""

    model: str  # the transformer class, or `ANY_MODEL`
    speedup: float  # over dense, of all denoising steps
    low: float  # dB
    high: float

    def __str__(self) -> str:
        low = f"{self.low:g}"
        high = f"{self.high:g}"
        return f"{low if low == high else f'{low}-{high}'} dB at {self.speedup:g}x"


def published_ranges() -> dict[str, list[PublishedPsnr]]:
    """Return all published ranges by model, of rising speed-up."""
    return {
        model: [PublishedPsnr(model, float(speedup), *psnr) for speedup, psnr in ranges.items()]
        for model, ranges in yaml.safe_load(read_text(ASSETS / "published.yaml")).items()
    }


def published_psnr(transformer_class: str, speedup: float, *, experts: int = 1) -> PublishedPsnr:
    """Return what was published nearest to a speed-up, for the model or else for any."""
    ranges = published_ranges()
    own = TWO_EXPERTS.get(transformer_class) if experts > 1 else None
    nearby = ranges.get(own or transformer_class, ranges[ANY_MODEL])
    return min(nearby, key=lambda other: abs(math.log(other.speedup / speedup)))

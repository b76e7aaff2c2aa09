"""The records of clips, which results files hold."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ConfigDict


class ClipQuality(BaseModel):
    """The quality of a clip against another one of the same size and length.

    Attributes:
        identical: whether every pixel is the same.
        psnr_db: from the error of the whole clip; None where the clips are identical.
        ssim: mean over the frames; None where they are too small for its window.
        lpips: mean over the frames; None where it was not measured.
        flicker: mean absolute second difference over time; None for fewer than three frames.
        flicker_change: flicker minus that of the other clip.
        largest_difference: of any value of any pixel, of 255.
        per_frame: PSNR, SSIM, LPIPS and flicker of each frame by name, and the other clip's flicker
            as ``flicker_dense``; empty where not kept.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    identical: bool = False
    psnr_db: float | None = None
    ssim: float | None = None
    lpips: float | None = None
    flicker: float | None = None
    flicker_change: float | None = None
    largest_difference: int = 0
    per_frame: dict[str, list[float | None]] = {}

    @property
    def psnrs(self) -> list[float]:
        """The PSNR of each frame; infinite where its pixels are the same."""
        return [math.inf if value is None else value for value in self.per_frame["psnr_db"]]


class ClipRecord(ClipQuality):
    """One clip against the dense clip of the same prompt and seed.

    Attributes:
        refused: why the clip could not be made; the other values are then empty.
        seconds: of the denoising loop.
        total_seconds: with text encoding and decoding.
        speedup: seconds of the dense loop over these; 1 for a dense clip.
        lpips_missing: why LPIPS was not measured.
        work: estimated operations over dense ones; None where not known.
        actions: of every step.
        fallbacks: what ran dense although the config asks otherwise, a sentence each.
        notes: what else is worth knowing, a sentence each.
        facts: further values that the way keeps.
    """

    way: str
    prompt: str
    seed: int
    refused: str | None = None
    seconds: float = 0.0
    total_seconds: float = 0.0
    speedup: float = 1.0
    lpips_missing: str | None = None
    work: float | None = None
    actions: list[str] = []
    fallbacks: list[str] = []
    notes: list[str] = []
    facts: dict[str, Any] = {}

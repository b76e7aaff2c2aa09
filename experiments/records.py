"""The records of clips, which results files hold."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class ClipRecord(BaseModel):
    """One clip against the dense clip of the same prompt and seed.

    Attributes:
        refused: why the clip could not be made; the other values are then empty.
        seconds: of the denoising loop.
        total_seconds: with text encoding and decoding.
        speedup: seconds of the dense loop over these; 1 for a dense clip.
        identical: whether every pixel is the same as in the dense clip.
        psnr_db: None where the clips are identical.
        ssim: None where frames are too small.
        lpips: None where it was not measured, for the reason in `lpips_missing`.
        flicker: mean absolute second difference over time; None for fewer than three frames.
        flicker_change: flicker minus that of the dense clip.
        largest_difference: of any value of any pixel, of 255.
        work: estimated operations over dense ones; None where not known.
        actions: of every step.
        fallbacks: what ran dense although the config asks otherwise, a sentence each.
        notes: what else is worth knowing, a sentence each.
        facts: further values that the way keeps.
        per_frame: PSNR, SSIM, LPIPS and flicker of each frame, by name; empty where not kept.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    way: str
    prompt: str
    seed: int
    refused: str | None = None
    seconds: float = 0.0
    total_seconds: float = 0.0
    speedup: float = 1.0
    identical: bool = False
    psnr_db: float | None = None
    ssim: float | None = None
    lpips: float | None = None
    lpips_missing: str | None = None
    flicker: float | None = None
    flicker_change: float | None = None
    largest_difference: int = 0
    work: float | None = None
    actions: list[str] = []
    fallbacks: list[str] = []
    notes: list[str] = []
    facts: dict[str, Any] = {}
    per_frame: dict[str, list[float | None]] = {}

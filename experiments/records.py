"""The records of clips and their steps, which results files hold."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from chipsparse.common.bounded import Index, Number


class StepResult(BaseModel):
    """One denoising step, all its guidance branches together."""

    model_config = ConfigDict(frozen=True)

    step: Index  # from 0, in each section of a pipeline that denoises in sections
    # "dense", "refresh", "sparse" or "skip"; joined by "+" where branches differ.
    action: Annotated[str, Field(pattern="^[a-z+]+$")]
    seconds: Number  # from the end of the step before, without the time of the display
    # Mean shares of columns and neurons that were computed; None where nothing ran sparse.
    attention_kept: Number | None = None
    mlp_kept: Number | None = None
    section: Index = 0  # from 0

    def computed(self, kept: float | None) -> float:
        """The share that it computed: all where nothing ran sparse, none where it was skipped."""
        return 0.0 if self.action == "skip" else 1.0 if kept is None else kept


class ClipQuality(BaseModel):
    """The quality of a clip against another one of the same size and length."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    identical: bool = False
    psnr_db: float | None = None  # from the error of the whole clip; None where identical
    ssim: float | None = None  # mean over the frames; None where they are too small for its window
    lpips: float | None = None  # mean over the frames; None where it was not measured
    flicker: float | None = None  # mean absolute second difference over time, from three frames on
    flicker_change: float | None = None  # minus that of the other clip
    largest_difference: int = 0  # of any value of any pixel, of 255
    # Each frame's PSNR, SSIM, LPIPS, flicker and largest difference by name, and the other clip's
    # `flicker_dense`; empty where not kept.
    per_frame: dict[str, list[float | None]] = {}

    @property
    def psnrs(self) -> list[float]:
        """The PSNR of each frame; infinite where its pixels are the same."""
        return [math.inf if value is None else value for value in self.per_frame["psnr_db"]]


class ClipRecord(ClipQuality):
    """One clip against the dense clip of the same prompt and seed."""

    way: str
    prompt: str
    seed: int
    refused: str | None = None  # why it could not be made; the other values are then empty
    seconds: float = 0.0  # of the denoising loop
    total_seconds: float = 0.0  # with text encoding and decoding
    speedup: float = 1.0  # seconds of the dense loop over these; 1 for a dense clip
    lpips_missing: str | None = None  # why it was not measured
    work: float | None = None  # operations over dense ones; None where not known
    actions: list[str] = []  # of every step
    fallbacks: list[str] = []  # what ran dense although the config asks otherwise
    notes: list[str] = []  # what else is worth knowing
    facts: dict[str, Any] = {}  # further values that the way keeps

"""Two clips of 8-bit pixels against each other, frame by frame."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from chipsparse.measure import quality

# Distance of two frames `[1, H, W, 3]` with values in [0, 1].
PerceptualDistance = Callable[[torch.Tensor, torch.Tensor], float]


@dataclass(frozen=True)
class ClipComparison:
    """How far clip B is from clip A, or from the reference that A is.

    Attributes:
        psnr_db: from the error of the whole clip; infinite where the pixels are the same.
        psnr_per_frame: of each frame alone.
        ssim: mean over the frames; None where they are smaller than its window.
        ssim_per_frame: of each frame; likewise.
        lpips: mean over the frames; None where it was not asked for.
        lpips_per_frame: of each frame; likewise.
        flicker_a: see `quality.flicker`; None for fewer than three frames.
        flicker_b: likewise.
        flicker_a_per_frame: of every frame that has two neighbours, the second frame first.
        flicker_b_per_frame: likewise.
        largest_difference: of any value of any pixel, of 255.
    """

    psnr_db: float
    psnr_per_frame: list[float]
    ssim: float | None
    ssim_per_frame: list[float] | None
    lpips: float | None
    lpips_per_frame: list[float] | None
    flicker_a: float | None
    flicker_b: float | None
    flicker_a_per_frame: list[float]
    flicker_b_per_frame: list[float]
    largest_difference: int

    @property
    def identical(self) -> bool:
        """Whether all pixels are the same."""
        return self.largest_difference == 0

    @property
    def flicker_change(self) -> float | None:
        """How much more B flickers than A."""
        if self.flicker_a is None or self.flicker_b is None:
            return None
        return self.flicker_b - self.flicker_a


def compare_clips(
    a: np.ndarray, b: np.ndarray, *, perceptual: PerceptualDistance | None = None
) -> ClipComparison:
    """Compares two clips, a few frames at a time in memory.

    Args:
        a: uint8 ``[F, H, W, 3]``.
        b: the same shape.
        perceptual: measures LPIPS, where it is available.

    Raises:
        ValueError: shapes or dtypes are others, or there is no frame.
    """
    if a.shape != b.shape or a.ndim != 4 or 0 in a.shape:
        raise ValueError(f"clips must have one shape [F, H, W, 3], got {a.shape} and {b.shape}")
    if a.dtype != np.uint8 or b.dtype != np.uint8:
        raise ValueError(f"clips must hold uint8, got {a.dtype} and {b.dtype}")
    frames = [slice(index, index + 1) for index in range(len(a))]
    errors = [quality.mean_squared_error(_floats(a[i]), _floats(b[i])) for i in frames]
    ssims = lpips = None
    if min(a.shape[1:3]) >= quality.SSIM_WINDOW:
        ssims = [quality.ssim(_floats(a[i]), _floats(b[i])) for i in frames]
    if perceptual is not None:
        lpips = [perceptual(_floats(a[i]), _floats(b[i])) for i in frames]
    flickers = [_flicker_per_frame(clip) for clip in (a, b)]
    return ClipComparison(
        psnr_db=quality.decibel(math.fsum(errors) / len(errors)),
        psnr_per_frame=[quality.decibel(error) for error in errors],
        ssim=_mean(ssims),
        ssim_per_frame=ssims,
        lpips=_mean(lpips),
        lpips_per_frame=lpips,
        flicker_a=_mean(flickers[0]),
        flicker_b=_mean(flickers[1]),
        flicker_a_per_frame=flickers[0],
        flicker_b_per_frame=flickers[1],
        largest_difference=max(
            int(np.abs(x.astype(np.int16) - y).max()) for x, y in zip(a, b, strict=True)
        ),
    )


def _floats(frames: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(frames.astype(np.float64) / 255)


def _flicker_per_frame(clip: np.ndarray) -> list[float]:
    return [quality.flicker(_floats(clip[first : first + 3])) for first in range(len(clip) - 2)]


def _mean(values: list[float] | None) -> float | None:
    return math.fsum(values) / len(values) if values else None

"""The closeness of one video to another: PSNR, SSIM and flicker; clips of 8-bit pixels by frame.

A video is `[F, H, W, C]` with floats in [0, 1], a torch tensor or a numpy array. All arithmetic is
float64, one frame at a time, so that long clips need little memory. Only paired clips (same prompt,
seed and size) compare fairly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from chipsparse.experiments.records import ClipQuality

SSIM_WINDOW = 11
SSIM_SIGMA = 1.5
SSIM_K1 = 0.01
SSIM_K2 = 0.03

Video = torch.Tensor | np.ndarray
# Distance of two frames `[1, H, W, 3]` with values in [0, 1].
PerceptualDistance = Callable[[torch.Tensor, torch.Tensor], float]


def psnr(a: Video, b: Video) -> float:
    """Peak signal-to-noise ratio in dB of two videos `[F, H, W, C]`, from the whole clip's error.

    Identical clips give `inf`. Raises `ValueError` where the shapes differ or are not a video's.
    """
    pairs = zip(*_pair(a, b), strict=True)
    return _decibel(_mean([float((x.double() - y.double()).square().mean()) for x, y in pairs]))


def ssim(a: Video, b: Video) -> float:
    """Structural similarity of two videos `[F, H, W, C]`, mean over frames, channels and pixels.

    Wang et al. 2004, "Image quality assessment: from error visibility to structural similarity": a
    Gaussian window of 11×11 with σ 1.5, only where the whole window lies inside the frame. Raises
    `ValueError` where the shapes differ or a side is shorter than 11.
    """
    a, b = _pair(a, b)
    height, width = a.shape[1:3]
    if min(height, width) < SSIM_WINDOW:
        raise ValueError(f"SSIM needs frames of at least 11x11 pixels, got {height}x{width}")
    return _mean([_frame_ssim(x, y) for x, y in zip(a, b, strict=True)])


def flicker(a: Video) -> float:
    """Mean absolute second difference over time of a video `[F, H, W, C]`.

    0 where each pixel changes evenly; a pixel that jumps to and fro gives much. Raises `ValueError`
    for fewer than three frames.
    """
    a = _video(a)
    if len(a) < 3:
        raise ValueError(f"flicker needs at least 3 frames, got {len(a)}")
    changes = [
        float((before.double() - 2 * now.double() + after.double()).abs().mean())
        for before, now, after in zip(a[:-2], a[1:-1], a[2:], strict=True)
    ]
    return _mean(changes)


def compare_clips(
    a: np.ndarray,
    b: np.ndarray,
    *,
    perceptual: PerceptualDistance | None = None,
    psnr_alone: bool = False,
) -> ClipQuality:
    """Compares clip B with clip A, both uint8 ``[F, H, W, 3]``, a few frames at a time in memory.

    ``perceptual`` measures LPIPS, where it is available. ``psnr_alone`` leaves out the measures
    that take long. Raises `ValueError` where shapes or dtypes are others, or there is no frame.
    """
    if a.shape != b.shape or a.ndim != 4 or 0 in a.shape:
        raise ValueError(f"clips must have one shape [F, H, W, 3], got {a.shape} and {b.shape}")
    if a.dtype != np.uint8 or b.dtype != np.uint8:
        raise ValueError(f"clips must hold uint8, got {a.dtype} and {b.dtype}")

    def by_frame(measure: PerceptualDistance) -> list[float]:
        frames = [slice(place, place + 1) for place in range(len(a))]
        return [measure(_floats(a[frame]), _floats(b[frame])) for frame in frames]

    errors = [_pixel_error(x, y) for x, y in zip(a, b, strict=True)]
    error = _mean(errors)
    if psnr_alone:
        return ClipQuality(identical=error == 0, psnr_db=_finite_decibel(error))
    per_frame: dict[str, list[float | None]] = {"psnr_db": [*map(_finite_decibel, errors)]}
    means = dict[str, float]()
    if min(a.shape[1:3]) >= SSIM_WINDOW:
        per_frame["ssim"] = [*(values := by_frame(ssim))]
        means["ssim"] = _mean(values)
    if perceptual is not None:
        per_frame["lpips"] = [*(values := by_frame(perceptual))]
        means["lpips"] = _mean(values)
    if len(a) > 2:  # flicker belongs to frames that have two neighbours
        before, after = map(_flickers, (a, b))
        per_frame |= {"flicker_dense": [None, *before, None], "flicker": [None, *after, None]}
        means |= {"flicker": _mean(after), "flicker_change": _mean(after) - _mean(before)}
    changes = [int(np.abs(x.astype(np.int16) - y).max()) for x, y in zip(a, b, strict=True)]
    per_frame["largest_difference"] = [*changes]
    return ClipQuality(
        identical=max(changes) == 0,
        psnr_db=_finite_decibel(error),
        largest_difference=max(changes),
        per_frame=per_frame,
        **means,
    )


def _video(a: Video) -> torch.Tensor:
    tensor = torch.as_tensor(a).detach()
    if tensor.ndim != 4 or 0 in tensor.shape:
        shape = tuple(tensor.shape)
        raise ValueError(f"a video is [frames, height, width, channels], got the shape {shape}")
    if not tensor.is_floating_point():
        raise ValueError(
            f"a video holds floats in [0, 1], got {tensor.dtype}; divide 8-bit values by 255",
        )
    return tensor


def _pair(a: Video, b: Video) -> tuple[torch.Tensor, torch.Tensor]:
    first = _video(a)
    second = _video(b)
    if first.shape != second.shape:
        shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
        raise ValueError(f"the videos differ in shape: {shapes}")
    return first, second.to(first.device)


def _pixel_error(a: np.ndarray, b: np.ndarray) -> float:
    """The mean squared error of two frames of uint8, as of values in [0, 1]."""
    return float(np.square(a.astype(np.int32) - b).mean()) / 255**2


def _decibel(error: float) -> float:
    """The PSNR in dB of a mean squared error of values in [0, 1]; `inf` for 0."""
    return math.inf if error == 0 else -10 * math.log10(error)


def _finite_decibel(error: float) -> float | None:
    return None if error == 0 else _decibel(error)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _floats(frames: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(frames.astype(np.float64) / 255)


def _flickers(clip: np.ndarray) -> list[float]:
    """The flicker of each frame of uint8 ``[F, H, W, 3]`` that has two neighbours."""
    return [flicker(_floats(clip[first : first + 3])) for first in range(len(clip) - 2)]


def _frame_ssim(a: torch.Tensor, b: torch.Tensor) -> float:
    """The SSIM of two frames `[H, W, C]`."""
    x, y = (frame.double().permute(2, 0, 1).unsqueeze(1) for frame in (a, b))  # [C, 1, H, W]
    mean_x = _blur(x)
    mean_y = _blur(y)
    variance_x = _blur(x * x) - mean_x * mean_x
    variance_y = _blur(y * y) - mean_y * mean_y
    covariance = _blur(x * y) - mean_x * mean_y
    c1 = SSIM_K1**2
    c2 = SSIM_K2**2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x * mean_x + mean_y * mean_y + c1)
    structure = (2 * covariance + c2) / (variance_x + variance_y + c2)
    return float((luminance * structure).mean())


def _blur(images: torch.Tensor) -> torch.Tensor:
    """The Gaussian mean over each window that lies inside `images [C, 1, H, W]`."""
    offsets = torch.arange(SSIM_WINDOW, device=images.device).double() - SSIM_WINDOW // 2
    weights = torch.exp(-(offsets**2) / (2 * SSIM_SIGMA**2))
    weights = weights / weights.sum()
    columns = torch.nn.functional.conv2d(images, weights.view(1, 1, -1, 1))
    return torch.nn.functional.conv2d(columns, weights.view(1, 1, 1, -1))

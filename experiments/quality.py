"""How close one video is to another: PSNR, SSIM and flicker; clips of 8-bit pixels by frame.

A video is `[F, H, W, C]` with values in [0, 1], a torch tensor or a numpy array. All arithmetic is
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
    a, b = _pair(a, b)
    frame_errors = [mean_squared_error(x, y) for x, y in zip(a, b, strict=True)]
    return decibel(sum(frame_errors) / len(frame_errors))


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
    return sum(_frame_ssim(x, y) for x, y in zip(a, b, strict=True)) / len(a)


def flicker(a: Video) -> float:
    """Mean absolute second difference over time of a video `[F, H, W, C]`.

    0 where each pixel changes evenly; a pixel that jumps to and fro gives much. Raises `ValueError`
    for fewer than three frames.
    """
    a = _video(a)
    if len(a) < 3:
        raise ValueError(f"flicker needs at least 3 frames, got {len(a)}")
    triples = zip(a[:-2], a[1:-1], a[2:], strict=True)
    changes = [
        float((before.double() - 2 * now.double() + after.double()).abs().mean())
        for before, now, after in triples
    ]
    return sum(changes) / len(changes)


def _video(a: Video) -> torch.Tensor:
    tensor = torch.as_tensor(a).detach()
    if tensor.ndim != 4 or 0 in tensor.shape:
        shape = tuple(tensor.shape)
        raise ValueError(f"a video is [frames, height, width, channels], got the shape {shape}")
    if not tensor.is_floating_point():
        raise ValueError(
            f"a video holds floats in [0, 1], got {tensor.dtype}; divide 8-bit values by 255"
        )
    return tensor


def _pair(a: Video, b: Video) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = _video(a), _video(b)
    if first.shape != second.shape:
        shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
        raise ValueError(f"the videos differ in shape: {shapes}")
    return first, second.to(first.device)


def mean_squared_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Mean squared difference of two tensors of one shape, in float64."""
    return float((a.double() - b.double()).square().mean())


def decibel(error: float) -> float:
    """PSNR in dB of a mean squared error of values in [0, 1]; `inf` for 0."""
    return math.inf if error == 0 else -10 * math.log10(error)


def _frame_ssim(a: torch.Tensor, b: torch.Tensor) -> float:
    """SSIM of two frames `[H, W, C]`."""
    x, y = (frame.double().permute(2, 0, 1).unsqueeze(1) for frame in (a, b))  # [C, 1, H, W]
    mean_x, mean_y = _blur(x), _blur(y)
    variance_x = _blur(x * x) - mean_x * mean_x
    variance_y = _blur(y * y) - mean_y * mean_y
    covariance = _blur(x * y) - mean_x * mean_y
    c1, c2 = SSIM_K1**2, SSIM_K2**2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x * mean_x + mean_y * mean_y + c1)
    structure = (2 * covariance + c2) / (variance_x + variance_y + c2)
    return float((luminance * structure).mean())


def _blur(images: torch.Tensor) -> torch.Tensor:
    """Gaussian mean over each window that lies inside `images [C, 1, H, W]`."""
    offsets = torch.arange(SSIM_WINDOW, device=images.device).double() - SSIM_WINDOW // 2
    weights = torch.exp(-(offsets**2) / (2 * SSIM_SIGMA**2))
    weights = weights / weights.sum()
    columns = torch.nn.functional.conv2d(images, weights.view(1, 1, -1, 1))
    return torch.nn.functional.conv2d(columns, weights.view(1, 1, 1, -1))


def compare_clips(
    a: np.ndarray, b: np.ndarray, *, perceptual: PerceptualDistance | None = None
) -> ClipQuality:
    """Compares clip B with clip A, a few frames at a time in memory.

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
    errors = [mean_squared_error(_floats(a[i]), _floats(b[i])) for i in frames]
    ssims = lpips = None
    if min(a.shape[1:3]) >= SSIM_WINDOW:
        ssims = [ssim(_floats(a[i]), _floats(b[i])) for i in frames]
    if perceptual is not None:
        lpips = [perceptual(_floats(a[i]), _floats(b[i])) for i in frames]
    change = max(int(np.abs(x.astype(np.int16) - y).max()) for x, y in zip(a, b, strict=True))
    per_frame: dict[str, Sequence[float | None]] = {
        "psnr_db": [_finite(decibel(error)) for error in errors],
        "ssim": ssims or [],
        "lpips": lpips or [],
    }
    flickers: list[float | None] = [None, None]
    if len(a) > 2:  # flicker belongs to frames that have two neighbours
        of_a, of_b = map(_flicker_per_frame, (a, b))
        flickers = [_mean(of_a), _mean(of_b)]
        per_frame |= {"flicker_dense": [None, *of_a, None], "flicker": [None, *of_b, None]}
    before, after = flickers
    return ClipQuality(
        identical=change == 0,
        psnr_db=_finite(decibel(math.fsum(errors) / len(errors))),
        ssim=_mean(ssims),
        lpips=_mean(lpips),
        flicker=after,
        flicker_change=None if before is None or after is None else after - before,
        largest_difference=change,
        per_frame={name: list(values) for name, values in per_frame.items() if values},
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _floats(frames: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(frames.astype(np.float64) / 255)


def _flicker_per_frame(clip: np.ndarray) -> list[float]:
    return [flicker(_floats(clip[first : first + 3])) for first in range(len(clip) - 2)]


def _mean(values: list[float] | None) -> float | None:
    return math.fsum(values) / len(values) if values else None

"""A comparison of two clips as JSON: the whole, and every frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chipsparse.measure.clip_comparison import ClipComparison


def clip_json(clip: ClipComparison, flicker_a: str, flicker_b: str) -> dict[str, Any]:
    """All numbers.

    Args:
        clip: has them.
        flicker_a: what the flicker of the first clip is called.
        flicker_b: likewise, of the second one.
    """
    return {
        "identical": clip.identical,
        "psnr_db": clip.psnr_db,
        "ssim": clip.ssim,
        "lpips": clip.lpips,
        flicker_a: clip.flicker_a,
        flicker_b: clip.flicker_b,
        "flicker_change": clip.flicker_change,
        "largest_difference": clip.largest_difference,
        "per_frame": _frames_json(clip, flicker_a, flicker_b),
    }


def _frames_json(clip: ClipComparison, flicker_a: str, flicker_b: str) -> list[dict[str, Any]]:
    """Every frame's values; null where a metric has none, as flicker at both ends."""
    count = len(clip.psnr_per_frame)
    nothing = [None] * count
    columns: dict[str, Sequence[float | None]] = {
        "psnr_db": clip.psnr_per_frame,
        "ssim": clip.ssim_per_frame or nothing,
        "lpips": clip.lpips_per_frame or nothing,
        flicker_a: [None, *clip.flicker_a_per_frame, None][:count],
        flicker_b: [None, *clip.flicker_b_per_frame, None][:count],
    }
    return [
        {"frame": index, **dict(zip(columns, values, strict=True))}
        for index, values in enumerate(zip(*columns.values(), strict=True))
    ]

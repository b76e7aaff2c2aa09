"""A comparison of two clips as JSON: the whole, and every frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chipsparse.experiments.quality import ClipComparison


def clip_json(clip: ClipComparison, flicker_a: str, flicker_b: str) -> dict[str, Any]:
    """All numbers; null where a metric has none, as flicker at both ends.

    Args:
        flicker_a: what the flicker of the first clip is called.
        flicker_b: likewise, of the second one.
    """
    count = len(clip.psnr_per_frame)
    nothing = [None] * count
    columns: dict[str, Sequence[float | None]] = {
        "frame": range(count),
        "psnr_db": clip.psnr_per_frame,
        "ssim": clip.ssim_per_frame or nothing,
        "lpips": clip.lpips_per_frame or nothing,
        flicker_a: [None, *clip.flicker_a_per_frame, None][:count],
        flicker_b: [None, *clip.flicker_b_per_frame, None][:count],
    }
    return {
        "identical": clip.identical,
        "psnr_db": clip.psnr_db,
        "ssim": clip.ssim,
        "lpips": clip.lpips,
        flicker_a: clip.flicker_a,
        flicker_b: clip.flicker_b,
        "flicker_change": clip.flicker_change,
        "largest_difference": clip.largest_difference,
        "per_frame": [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ],
    }

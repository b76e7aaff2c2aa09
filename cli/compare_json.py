"""What `chipsparse compare` tells, as one JSON object."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import chipsparse
from chipsparse.cli.compare_configs import ConfigsComparison, notes
from chipsparse.cli.compare_files import FilesComparison, Picture
from chipsparse.cli.config_statistics import Summary, statistics
from chipsparse.cli.lpips import Lpips
from chipsparse.cli.paired_runs import SIDES, ConfigRun
from chipsparse.measure.bootstrap import LEVEL, RESAMPLES, Interval
from chipsparse.measure.clip_comparison import ClipComparison

FLICKER_OF_FILES = ("flicker_a", "flicker_b")
FLICKER_OF_CONFIGS = ("flicker_dense", "flicker")


def files_json(comparison: FilesComparison) -> str:
    """Two files; `psnr_db` is null where the pixels are the same."""
    frames, height, width, _ = comparison.clips[0].frames.shape
    content = {
        "chipsparse": chipsparse.__version__,
        "mode": "files",
        "a": str(comparison.paths[0]),
        "b": str(comparison.paths[1]),
        "frames": frames,
        "height": height,
        "width": width,
        "lossy": [str(path) for path in comparison.lossy],
        **_clip_json(comparison.result, FLICKER_OF_FILES),
        **_lpips_json(comparison.lpips),
        "picture": _picture_json(comparison.picture),
        "per_frame": _frames_json(comparison.result, FLICKER_OF_FILES),
    }
    return _dumps(content)


def configs_json(comparison: ConfigsComparison) -> str:
    """Two configs: every generation, and means and medians with their intervals."""
    found = statistics(comparison)
    picture = _picture_json(comparison.picture)
    sides: dict[str, Any] = {
        side: {name: _summary_json(each) for name, each in found.sides[side].items()}
        for side in SIDES
    }
    content = {
        "chipsparse": chipsparse.__version__,
        "mode": "configs",
        "model": comparison.model.location,
        "transformer_class": comparison.model.transformer_class,
        "device": str(comparison.device),
        "dtype": str(comparison.dtype).removeprefix("torch."),
        "settings": dataclasses.asdict(comparison.settings),
        "configs": {
            side: {
                "name": subject.text,
                "profile": None if profile is None else profile.source,
            }
            for side, subject, profile in zip(
                SIDES, comparison.subjects, comparison.profiles.values(), strict=True
            )
        },
        "reference": "dense",
        "interrupted": comparison.interrupted,
        "interval": {"level": LEVEL, "resamples": RESAMPLES, "method": "bootstrap percentile"},
        **sides,
        "B - A": {name: _summary_json(each) for name, each in found.difference.items()},
        **_lpips_json(comparison.lpips),
        "picture": None if picture is None else {**picture, "prompt": comparison.pictured},
        "notes": list(notes(comparison)),
        "prompts": [
            {
                "prompt": runs.prompt,
                "seed": runs.seed,
                "dense_seconds": runs.dense_seconds,
                **{side: _run_json(runs.sides[side]) for side in SIDES},
            }
            for runs in comparison.prompts
        ],
    }
    return _dumps(content)


def _run_json(run: ConfigRun) -> dict[str, Any]:
    return {
        "seconds": run.seconds,
        "speedup": run.speedup,
        **_clip_json(run.clip, FLICKER_OF_CONFIGS),
        "per_frame": _frames_json(run.clip, FLICKER_OF_CONFIGS),
    }


def _clip_json(clip: ClipComparison, flicker: tuple[str, str]) -> dict[str, Any]:
    return {
        "identical": clip.identical,
        "psnr_db": clip.psnr_db,
        "ssim": clip.ssim,
        "lpips": clip.lpips,
        flicker[0]: clip.flicker_a,
        flicker[1]: clip.flicker_b,
        "flicker_change": clip.flicker_change,
        "largest_difference": clip.largest_difference,
    }


def _frames_json(clip: ClipComparison, flicker: tuple[str, str]) -> list[dict[str, Any]]:
    """Every frame's values; null where a metric has none, as flicker at both ends."""
    count = len(clip.psnr_per_frame)
    nothing = [None] * count
    columns: dict[str, Sequence[float | None]] = {
        "psnr_db": clip.psnr_per_frame,
        "ssim": clip.ssim_per_frame or nothing,
        "lpips": clip.lpips_per_frame or nothing,
        flicker[0]: [None, *clip.flicker_a_per_frame, None][:count],
        flicker[1]: [None, *clip.flicker_b_per_frame, None][:count],
    }
    return [
        {"frame": index, **dict(zip(columns, values, strict=True))}
        for index, values in enumerate(zip(*columns.values(), strict=True))
    ]


def _lpips_json(lpips: Lpips) -> dict[str, Any]:
    return {"lpips_missing": lpips.why_not}


def _picture_json(picture: Picture | None) -> dict[str, Any] | None:
    if picture is None:
        return None
    return {"files": [str(file) for file in picture.files], "amplified": picture.factor}


def _summary_json(summary: Summary | None) -> dict[str, Any] | None:
    if summary is None:
        return None
    return {"mean": _interval_json(summary.mean), "median": _interval_json(summary.median)}


def _interval_json(found: Interval) -> dict[str, Any]:
    return {**dataclasses.asdict(found), "includes_zero": found.contains(0.0)}


def _dumps(content: dict[str, Any]) -> str:
    return json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    """The same with null for infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and math.isinf(value) else value

"""The table of `peers`: medians over its clips. It does without diffusers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.records import Record

OP = "peers"
DENSE, OURS = "dense", "chipsparse"
STACKED = f"{OURS} + "
# What makes a point of the table, and a clip, the same.
POINT = ("model", "method", "setting", "steps", "frames")
IDENTITY = (*POINT, "prompt", "seed")


def summaries(records: Sequence[Record]) -> list[Record]:
    """One record per model, method, setting, steps and frames: medians over its clips.

    ``speedup`` is the median of dense processor seconds over the clip's, ``work`` that of the share
    of dense's multiply-adds, ``flicker`` that of the clip's over dense's. What was refused has its
    reason and no numbers. In order: dense, chipsparse, its controls, diffusers' caches, and these
    on top of chipsparse; each from the most work to the least.
    """
    clips = [record for record in records if record["op"] == OP and "refused" in record]
    baselines: dict[tuple[Any, ...], list[float]] = {}
    for clip in clips:
        if clip["method"] == DENSE:
            baselines.setdefault(_pair(clip), []).append(clip["processor_seconds"])
    grouped: dict[tuple[Any, ...], list[Record]] = {}
    for clip in clips:
        grouped.setdefault(tuple(clip[name] for name in POINT), []).append(clip)
    found = [
        {**dict(zip(POINT, point, strict=True)), **_medians(group, baselines)}
        for point, group in grouped.items()
    ]
    return sorted(found, key=lambda row: (row["model"], *place(row)))


def place(row: Record) -> tuple[int, str, float]:
    """What a table of one model, or of several side by side, is sorted by."""
    method: str = row["method"]
    places = (
        method == DENSE,
        method.startswith(OURS) and not method.startswith(STACKED),
        "columns" in method or "window" in method,
        not method.startswith(STACKED),
        True,
    )
    return places.index(True), method, -row.get("work", 0.0)


def _pair(clip: Record) -> tuple[Any, ...]:
    """What a clip shares with the dense one that it is compared with."""
    return tuple(clip[name] for name in IDENTITY if name not in ("method", "setting"))


def _medians(clips: Sequence[Record], baselines: dict[tuple[Any, ...], list[float]]) -> Record:
    made = [clip for clip in clips if clip["refused"] is None]
    found: Record = {"prompts": len(clips), "refused": None}
    if not made:
        return found | {"refused": clips[0]["refused"]}
    # Equal clips have an infinite PSNR, which a file of records holds as null.
    psnrs = [math.inf if clip["psnr"] is None else clip["psnr"] for clip in made]
    speedups = [
        statistics.fmean(baselines[_pair(clip)]) / clip["processor_seconds"] for clip in made
    ]
    flickers = [
        clip["flicker"] / clip["dense_flicker"] for clip in made if clip["flicker"] is not None
    ]
    return found | {
        "speedup": statistics.median(speedups),
        "seconds": statistics.median(clip["processor_seconds"] for clip in made),
        "work": statistics.median(clip["work"] for clip in made),
        "psnr_median": statistics.median(psnrs),
        "psnr_min": min(psnrs),
        "ssim_median": statistics.median(clip["ssim"] for clip in made),
        "flicker": statistics.median(flickers) if flickers else None,
        "inert": all(psnr == math.inf for psnr in psnrs),
        "remarks": made[0]["remarks"],
    }

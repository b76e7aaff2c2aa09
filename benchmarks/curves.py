"""From records of clips to quality at equal work or equal time, and its tables; without diffusers.

A method's curve of one prompt is PSNR over its share of the dense generation's work, or of its
time, straight between its settings. What does less work than all of them is unknown; where more is
allowed than any of them did, the one that did most counts.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from benchmarks.records import Record, table

OP = "equal_work"
# What makes two records of clips the same.
IDENTITY = (
    *("op", "model", "size", "steps", "flow_shift"),
    *("method", "variant", "setting", "prompt", "seed"),
)
DENSE = "dense"
# What our own search finds, with sparse steps and without any.
OURS, SKIPS = "chipsparse, sparse steps", "chipsparse, nothing sparse"
# Shares of the dense generation's work, or of its time.
TARGETS = (0.25, 0.33, 0.4, 0.5)
Axis = Literal["work", "time"]
Curve = tuple[str, str]  # method and variant
# What a clip is that equals the dense one bit for bit.
EQUAL_DB = 100.0
# On other prompts thresholds skip more or fewer steps than on the one that settings are chosen by.
MARGIN = 0.9
RESAMPLES = 4000
LEAD = "ours ahead of other methods"
INTERVAL = f"{LEAD}: 95 % of the means"


@dataclass(frozen=True)
class Quality:
    """One method at one share of the work or the time.

    Attributes:
        variant: the one that is best there.
        psnrs: in dB, by prompt.
    """

    variant: str
    psnrs: dict[str, float]

    @property
    def mean(self) -> float:
        """Over the prompts."""
        return statistics.fmean(self.psnrs.values())

    @property
    def worst(self) -> float:
        """Of the prompts."""
        return min(self.psnrs.values())


@dataclass(frozen=True)
class Lead:
    """How far the better of ours is ahead of the best other method, in dB; below zero, behind.

    Attributes:
        best: the other method, by the mean.
        mean: over the prompts, paired.
        interval: in which the mean lies with 95 % confidence, by resampling the prompts.
    """

    best: str
    mean: float
    interval: tuple[float, float]


def joined(records: Iterable[Record]) -> list[Record]:
    """Each clip once, the first time that it was made, where several processes wrote parts."""
    found: dict[tuple[Any, ...], Record] = {}
    for record in records:
        found.setdefault(tuple(str(record.get(name)) for name in IDENTITY), record)
    return list(found.values())


def at_share(points: Iterable[tuple[float, float]], share: float) -> float | None:
    """PSNR at a share, from the points (share, PSNR) of one prompt's curve; None left of it."""
    curve = sorted(points)
    if not curve or share < curve[0][0]:
        return None
    for (x0, y0), (x1, y1) in pairwise(curve):
        if share <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (share - x0) / (x1 - x0)
    return curve[-1][1]


def qualities(clips: Iterable[Record], axis: Axis, share: float) -> dict[str, Quality]:
    """Every method at a share, in its best variant; those that do not reach it are missing.

    Args:
        clips: records of clips of one model, size and number of steps.
        axis: what is equal.
        share: of the dense generation's.
    """
    clips = [clip for clip in clips if clip["method"] != DENSE]
    prompts = {clip["prompt"] for clip in clips}
    found: dict[str, Quality] = {}
    for (method, variant), points in _by_curve(clips, axis).items():
        psnrs = {prompt: at_share(points.get(prompt, []), share) for prompt in sorted(prompts)}
        known = {prompt: psnr for prompt, psnr in psnrs.items() if psnr is not None}
        if len(known) < len(prompts):
            continue
        quality = Quality(variant, known)
        if method not in found or quality.mean > found[method].mean:
            found[method] = quality
    return found


def lead(found: dict[str, Quality]) -> Lead | None:
    """Ours against the best of the other methods; None where either is missing."""
    mine = [quality for method, quality in found.items() if method in (OURS, SKIPS)]
    others = {method: q for method, q in found.items() if method not in (OURS, SKIPS)}
    if not mine or not others:
        return None
    ours = max(mine, key=lambda quality: quality.mean)
    best = max(others, key=lambda method: others[method].mean)
    differences = [ours.psnrs[prompt] - others[best].psnrs[prompt] for prompt in ours.psnrs]
    return Lead(best, statistics.fmean(differences), interval(differences))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Bounds of 95 % of the means of as many values, drawn from these."""
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return means[round(0.025 * RESAMPLES)], means[round(0.975 * RESAMPLES) - 1]


def chosen(
    calibration: Iterable[Record], targets: Sequence[float] = TARGETS
) -> dict[Curve, set[str]]:
    """The settings of others that decide the comparison, by curve.

    Of each method, at each target, the variant that was best on the calibrating prompt, with its
    settings on both sides of the target and between them; where no variant gets so low, the one
    that gets lowest.

    Args:
        calibration: records of the clips of one prompt that is not compared.
        targets: shares of the work.
    """
    curves: dict[Curve, dict[str, tuple[float, float]]] = {}
    for clip in calibration:
        if clip["method"] not in (DENSE, OURS, SKIPS) and clip["refused"] is None:
            points = curves.setdefault((clip["method"], clip["variant"]), {})
            points[clip["setting"]] = clip["work"], decibels(clip)
    found: dict[Curve, set[str]] = {}
    for target in targets:
        winners: dict[str, tuple[float, float, Curve]] = {}
        for curve, points in curves.items():
            psnr = at_share(points.values(), target)
            lowest = min(work for work, _ in points.values())
            # One that does not get so low is behind all that do, the further the less it does.
            score = (psnr, 0.0) if psnr is not None else (float("-inf"), -lowest)
            winners[curve[0]] = max(winners.get(curve[0], (*score, curve)), (*score, curve))
        for _, _, curve in winners.values():
            found.setdefault(curve, set()).update(_around(curves[curve], target))
    return found


def _around(points: dict[str, tuple[float, float]], target: float) -> set[str]:
    """The settings next to a target with a margin on both sides, and those between.

    The lowest one alone where none gets so low; of settings that did the same, the first.
    """
    different = {point: setting for setting, point in reversed(points.items())}
    works = {setting: work for (work, _), setting in different.items()}
    lowest = min(works, key=lambda setting: works[setting])
    if works[lowest] > target:
        return {lowest}
    below = [work for work in works.values() if work <= target * MARGIN]
    above = [work for work in works.values() if work >= target / MARGIN]
    low = max(below, default=works[lowest])
    high = min(above, default=max(works.values()))
    return {setting for setting, work in works.items() if low <= work <= high}


def _by_curve(
    clips: Iterable[Record], axis: Axis
) -> dict[Curve, dict[str, list[tuple[float, float]]]]:
    """The points of every prompt, by curve."""
    found: dict[Curve, dict[str, list[tuple[float, float]]]] = {}
    for clip in clips:
        if clip["refused"] is None:
            by_prompt = found.setdefault((clip["method"], clip["variant"]), {})
            by_prompt.setdefault(clip["prompt"], []).append((share_of(clip, axis), decibels(clip)))
    return found


def share_of(clip: Record, axis: Axis) -> float:
    """The share of the dense generation's work or time that a clip took."""
    return float(clip["work"] if axis == "work" else clip["seconds"] / clip["dense_seconds"])


def decibels(clip: Record) -> float:
    """The PSNR of a clip; that of one that equals the dense one is `EQUAL_DB`."""
    return EQUAL_DB if clip["psnr"] is None else min(EQUAL_DB, clip["psnr"])


def compared(records: Iterable[Record]) -> list[Record]:
    """The records of clips that no setting was chosen by."""
    return [each for each in records if each["op"] == OP and each.get("role") == "compared"]


def quality_rows(clips: Sequence[Record], axis: Axis) -> list[dict[str, str]]:
    """Mean and worst PSNR of every method at each share, in its best variant there; our lead.

    Args:
        clips: compared ones, of one model, size and number of steps.
        axis: what is equal.
    """
    at_target = {f"{share:.0%}": qualities(clips, axis, share) for share in TARGETS}
    methods = {clip["method"] for clip in clips} - {DENSE}
    rows = []
    for method in sorted(methods, key=lambda name: (name != OURS, name != SKIPS, name)):
        row = {"method": method}
        for share, by_method in at_target.items():
            quality = by_method.get(method)
            row[share] = f"{quality.mean:.1f} ({quality.worst:.1f})" if quality else "-"
        rows.append(row)
    leads = {share: lead(by_method) for share, by_method in at_target.items()}
    if any(leads.values()):
        means, intervals = {"method": LEAD}, {"method": INTERVAL}
        for share, ours in leads.items():
            means[share] = f"{ours.mean:+.1f} ({ours.best})" if ours else "-"
            intervals[share] = "{:+.1f} to {:+.1f}".format(*ours.interval) if ours else "-"
        rows += [means, intervals]
    return rows


def on_gpu(clips: Iterable[Record]) -> bool:
    """Whether times are the GPU's own; a CPU's are those of whatever else it does."""
    return all(clip["device"].startswith("NVIDIA") for clip in clips)


def by_workload(clips: Iterable[Record]) -> dict[str, list[Record]]:
    """Clips by what they are of: a model and how it generates together."""
    groups: dict[str, list[Record]] = {}
    for clip in clips:
        groups.setdefault(f"{clip['model']}, {generation_of(clip)}", []).append(clip)
    return groups


def generation_of(clip: Record) -> str:
    """Size, number of steps and, where one was given, flow shift."""
    parts = ["x".join(map(str, clip["size"])), f"{clip['steps']} steps"]
    if clip.get("flow_shift") is not None:
        parts.append(f"flow shift {clip['flow_shift']:g}")
    return ", ".join(parts)


def text_of(clips: Sequence[Record]) -> str:
    """All tables of compared clips as Markdown, model by model and size by size."""
    texts = []
    for name, group in by_workload(clips).items():
        titled = {f"{name}: PSNR in dB at equal work, mean (worst)": quality_rows(group, "work")}
        if on_gpu(group):
            titled["At equal time"] = quality_rows(group, "time")
        for title, rows in titled.items():
            if rows:
                texts.append(f"{title}\n\n{table(rows, dict.fromkeys(rows[0], 's'))}")
    return "\n\n".join(texts)

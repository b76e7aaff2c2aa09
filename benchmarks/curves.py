"""From records of clips to quality at equal cost, and its tables; without diffusers.

A method's curve of one prompt is PSNR over its cost, which is a share of the dense generation's
time, straight between its settings. A cost below or above all of them is unknown.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.records import Record

DENSE = "dense"
# What our own search finds, with sparse steps and without any.
OURS = "chipsparse, sparse steps"
SKIPS = "chipsparse, nothing sparse"
# What a clip is that equals the dense one bit for bit.
EQUAL_DB = 100.0
RESAMPLES = 4000
LEAD = "lead over the best other method"
INTERVAL = "95 % interval of the mean lead"


@dataclass(frozen=True)
class Quality:
    """One method at one cost.

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
        """The figures of the prompts."""
        return min(self.psnrs.values())


@dataclass(frozen=True)
class Lead:
    """The lead of the better of ours over the best other method, both by the mean.

    In dB; below zero, behind.

    Attributes:
        mean: over the prompts, paired.
        worst: between the two methods' worst prompts.
        interval: in which the mean lies with 95 % confidence, by resampling the prompts.
    """

    mean: float
    worst: float
    interval: tuple[float, float]


def decibels(clip: Record) -> float:
    """The PSNR of a clip that was made; at most `EQUAL_DB`."""
    return EQUAL_DB if clip["psnr"] is None else min(EQUAL_DB, clip["psnr"])


def at_share(points: Iterable[tuple[float, float]], share: float) -> float | None:
    """PSNR at a share, from the points (share, PSNR) of one prompt's curve; None left of it."""
    curve = sorted(points)
    if not curve or share < curve[0][0]:
        return None
    for (x0, y0), (x1, y1) in pairwise(curve):
        if share <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (share - x0) / (x1 - x0)
    return curve[-1][1]


def qualities(clips: Iterable[Record], cost: float) -> dict[str, Quality]:
    """Every method at a cost, in its best variant; those that do not reach it are missing.

    Args:
        clips: records of clips of one model, size and number of steps.
        cost: share of the dense generation's time.
    """
    points: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    prompts = set()
    for clip in clips:
        if clip["method"] == DENSE:
            continue
        prompts.add(clip["prompt"])
        if clip["refused"] is None:
            by_prompt = points.setdefault((clip["method"], clip["variant"]), {})
            by_prompt.setdefault(clip["prompt"], []).append((clip["cost"], decibels(clip)))
    best: dict[str, Quality] = {}
    for (method, variant), by_prompt in points.items():
        most = max(done for curve in by_prompt.values() for done, _ in curve)
        if cost > 1.01 * most:
            continue
        psnrs = {prompt: at_share(by_prompt.get(prompt, []), cost) for prompt in sorted(prompts)}
        known = {prompt: psnr for prompt, psnr in psnrs.items() if psnr is not None}
        quality = Quality(variant, known)
        if len(known) == len(prompts) and (method not in best or quality.mean > best[method].mean):
            best[method] = quality
    return best


def lead(by_method: dict[str, Quality]) -> Lead | None:
    """Ours against the best of the other methods; None where either is missing."""
    mine = [quality for method, quality in by_method.items() if method in (OURS, SKIPS)]
    others = [quality for method, quality in by_method.items() if method not in (OURS, SKIPS)]
    if not mine or not others:
        return None
    ours, best = (max(group, key=lambda quality: quality.mean) for group in (mine, others))
    differences = [ours.psnrs[prompt] - best.psnrs[prompt] for prompt in ours.psnrs]
    return Lead(statistics.fmean(differences), ours.worst - best.worst, interval(differences))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Bounds of 95 % of the means of as many values, drawn from these."""
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return means[round(0.025 * RESAMPLES)], means[round(0.975 * RESAMPLES) - 1]


def quality_rows(
    clips: Sequence[Record],
    costs: Mapping[str, float],
) -> list[dict[str, str]]:
    """Mean (worst) PSNR of every method at each cost, in its best variant there; our lead.

    Args:
        clips: compared ones, of one model, size and number of steps.
        costs: shares of the dense generation's time, by the titles of their columns.
    """
    at_target = {title: qualities(clips, cost) for title, cost in costs.items()}
    methods = {clip["method"] for clip in clips} - {DENSE}
    rows = []
    for method in sorted(methods, key=lambda name: (name != OURS, name != SKIPS, name)):
        row = {"method": method}
        for title, by_method in at_target.items():
            quality = by_method.get(method)
            row[title] = f"{quality.mean:.1f} ({quality.worst:.1f})" if quality else "-"
        rows.append(row)
    leads = {title: lead(by_method) for title, by_method in at_target.items()}
    if any(leads.values()):
        means = {"method": LEAD}
        intervals = {"method": INTERVAL}
        for title, ours in leads.items():
            means[title] = f"{ours.mean:+.1f} ({ours.worst:+.1f})" if ours else "-"
            intervals[title] = "{:+.1f} to {:+.1f}".format(*ours.interval) if ours else "-"
        rows += [means, intervals]
    return rows


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

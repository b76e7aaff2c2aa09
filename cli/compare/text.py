"""What `chipsparse compare` tells, as tables for people."""

from __future__ import annotations

import math
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from chipsparse.cli.compare.configs import ConfigsComparison, notes
from chipsparse.cli.compare.files import ComparisonClip, FilesComparison
from chipsparse.cli.compare.paired_runs import SIDES
from chipsparse.cli.compare.statistics import FLICKER_SCALE, METRICS, Summary, statistics
from chipsparse.cli.tables import Facts, facts_table, number_table, print_table
from chipsparse.cli.wording import files_text
from chipsparse.experiments.quality import ClipComparison
from chipsparse.experiments.statistics import LEVEL

SAME = "the same"
INTERVAL = f"{LEVEL:.0%} interval"


def print_files(comparison: FilesComparison, console: Console) -> None:
    """The page about two files."""
    result = comparison.result
    print_table(console, _clip_table(result))
    facts: Facts = []
    if result.identical:
        facts.append(("pixels", "the same in every frame"))
    else:
        facts.append(("largest difference", f"{result.largest_difference} of 255"))
    if result.flicker_change is not None:
        first, second, change = (
            FLICKER_SCALE * (value or 0.0)
            for value in (result.flicker_a, result.flicker_b, result.flicker_change)
        )
        flicker = f"A {first:.3f}, B {second:.3f} of 255 ({round(change, 3) + 0.0:+.3f})"
        facts.append(("flicker", flicker))
    facts += _lpips_facts(comparison.lpips.why_not)
    frames, height, width, _ = comparison.clips[0].frames.shape
    facts.append(("compared", f"{frames} frame{'s' * (frames > 1)} of {width}x{height} pixels"))
    if comparison.lossy:
        names = " and ".join(str(path) for path in comparison.lossy)
        facts.append(
            ("note", f"{names}: part of the difference may be the encoder's; PNG files are exact")
        )
    facts += _clip_facts(comparison.clip)
    print_table(console, facts_table(facts))


def print_configs(comparison: ConfigsComparison, console: Console) -> None:
    """The page about two configs."""
    runs = comparison.runs
    found = statistics(runs.prompts)
    for side, subject in zip(SIDES, comparison.subjects, strict=True):
        if subject.kind != "dense":
            print_table(console, _summary_table(f"{side}: {subject.text}", found[side]))
    print_table(console, _summary_table("B - A", found["B - A"], sign=True))
    count = len(runs.prompts)
    seeds = [each.seed for each in runs.prompts]
    facts: Facts = [
        ("compared", f"with dense, {count} prompts, seeds {seeds[0]} to {seeds[-1]}"),
        ("intervals", "bootstrap over prompts, A and B resampled together"),
        *_zero_facts(found["B - A"]),
        *_lpips_facts(runs.lpips.why_not),
        *(("note", note) for note in notes(comparison)),
        *_clip_facts(comparison.clip),
    ]
    if comparison.clip is not None:
        worst = runs.prompts[runs.worst.index]
        facts.append(("", f"of the lowest PSNR: seed {worst.seed}, {worst.prompt}"))
    print_table(console, facts_table(facts))


def _clip_table(result: ClipComparison) -> Table:
    table = number_table("B against A", "overall", "worst", "in frame")
    for name, value, frames, worst, text in (
        ("PSNR", result.psnr_db, result.psnr_per_frame, min, _decibels),
        ("SSIM", result.ssim, result.ssim_per_frame, min, "{:.4f}".format),
        ("LPIPS", result.lpips, result.lpips_per_frame, max, "{:.4f}".format),
    ):
        if value is not None and frames is not None:
            table.add_row(name, text(value), *_worst(frames, worst, text))
        elif name == "SSIM":
            table.add_row(name, "frames are too small", "", "")
    return table


def _worst(
    values: list[float], pick: Callable[[list[float]], float], text: Callable[[float], str]
) -> tuple[str, str]:
    """The worst value and its frame, from 0; where all are alike none is the worst."""
    worst = pick(values)
    return text(worst), "all" if min(values) == max(values) else str(values.index(worst))


def _decibels(value: float) -> str:
    return SAME if math.isinf(value) else f"{value:.2f} dB"


def _summary_table(
    title: str, summaries: dict[str, Summary | None], *, sign: bool = False
) -> Table:
    table = number_table(title, "mean", INTERVAL, "median", INTERVAL, gap=1)
    for name, metric in METRICS.items():
        summary = summaries[name]
        if summary is not None:
            cells: list[str] = []
            for found in (summary.mean, summary.median):
                low, high = (metric.text(bound, sign=sign) for bound in (found.low, found.high))
                between = low if low == high else f"{low} to {high}"
                cells += [metric.text(found.value, sign=sign), between]
            table.add_row(metric.title, *cells)
    return table


def _zero_facts(difference: dict[str, Summary | None]) -> Facts:
    """Where B - A may be nothing but the choice of prompts."""
    unclear = []
    for name, metric in METRICS.items():
        summary = difference[name]
        if summary is None:
            continue
        title = metric.title.partition(" (")[0]
        mean, median = (found.contains(0.0) for found in (summary.mean, summary.median))
        if mean or median:
            which = "" if mean and median else " (mean)" if mean else " (median)"
            unclear.append(title + which)
    if not unclear:
        return [("B - A", "no interval includes zero")]
    return [("B - A", f"may be zero, as the interval includes it: {', '.join(unclear)}")]


def _lpips_facts(why_not: str | None) -> Facts:
    return [] if why_not is None else [("LPIPS", f"not available: {why_not}")]


def _clip_facts(clip: ComparisonClip | None) -> Facts:
    if clip is None:
        return []
    white = -(-255 // clip.amplified)
    return [
        ("written", files_text(clip.files)),
        ("heat-map", f"difference x{clip.amplified}: white is {white} of 255 or more"),
    ]

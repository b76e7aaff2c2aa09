"""Tables of equal work and equal time, as rows of texts by column."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.equal_work.curves import (
    DENSE,
    OURS,
    SKIPS,
    TARGETS,
    Axis,
    Lead,
    decibels,
    known_methods,
    lead,
    qualities,
    share_of,
)
from benchmarks.records import Record, table

Row = dict[str, str]
# Leads: of sparse steps over everything else, and of the better of ours over other methods.
LEADS = {"sparse steps ahead of all": (OURS,), "ours ahead of other methods": (OURS, SKIPS)}
BETWEEN, WORST = "95 % of the means", "worst prompt"


def quality_rows(clips: Sequence[Record], axis: Axis) -> list[Row]:
    """Mean and worst PSNR of every method at each share, in its best variant there.

    Behind them, how far ours is ahead of the best of the others: see `LEADS`.

    Args:
        clips: compared ones, of one model, size and number of steps.
        axis: what is equal.
    """
    found = {share: qualities(clips, axis, share) for share in TARGETS}
    rows = []
    for method in known_methods(clips):
        row = {"method": method}
        for share, by_method in found.items():
            quality = by_method.get(method)
            row[f"{share:.0%}"] = f"{quality.mean:.1f} ({quality.worst:.1f})" if quality else "-"
        ratio = _time_over_work(clips, method)
        rows.append({**row, "time / work": "-" if ratio is None else f"{ratio:.2f}"})
    for name, ours in LEADS.items():
        leads = {f"{share:.0%}": lead(by_method, ours) for share, by_method in found.items()}
        if any(leads.values()):
            rows += _lead_rows(name, leads)
    return rows


def _lead_rows(name: str, leads: dict[str, Lead | None]) -> list[Row]:
    rows: list[Row] = [{"method": row} for row in (name, f"{name}: {BETWEEN}", f"{name}: {WORST}")]
    for share, found in leads.items():
        texts = ("-", "-", "-")
        if found is not None:
            texts = (
                f"{found.mean:+.1f} ({found.best.method})",
                "{:+.1f} to {:+.1f}".format(*found.interval),
                f"{found.worst:+.1f} ({found.best_worst.method})",
            )
        for row, text in zip(rows, texts, strict=True):
            row[share] = text
    return [{**row, "time / work": ""} for row in rows]


def _time_over_work(clips: Iterable[Record], method: str) -> float | None:
    """The median over the clips that it did generate; None where time says nothing."""
    made = [clip for clip in clips if clip["method"] == method and clip["refused"] is None]
    if not made or not on_gpu(made):
        return None
    return statistics.median(share_of(clip, "time") / clip["work"] for clip in made)


def on_gpu(clips: Iterable[Record]) -> bool:
    """Whether times are the GPU's own; a CPU's are those of whatever else it does."""
    return all(clip["device"].startswith("NVIDIA") for clip in clips)


def step_rows(clips: Sequence[Record]) -> list[Row]:
    """Where the time of ours goes: calls of each action, their median time, and dense's."""
    rows = []
    points: dict[tuple[str, str, str], list[Record]] = {}
    for clip in clips:
        if clip["method"] in (OURS, SKIPS):
            points.setdefault(_point(clip), []).append(clip)
    for (_, variant, setting), made in sorted(points.items()):
        calls = made[0]["calls"]
        row = {"profile": f"{variant}/{setting}" if variant else setting}
        row["calls"] = ", ".join(f"{n} {name}" for name, n in calls.items())
        for action in ("dense", "refresh", "sparse", "skip"):
            times = [clip["call_ms"][action] for clip in made if action in clip["call_ms"]]
            row[f"{action}, ms"] = f"{statistics.median(times):.2f}" if times else "-"
        per_call = [clip["dense_seconds"] * 1e3 / sum(calls.values()) for clip in made]
        row["stock, ms"] = f"{statistics.median(per_call):.2f}"
        row["work"] = f"{statistics.median(clip['work'] for clip in made):.1%}"
        row["time"] = f"{statistics.median(share_of(clip, 'time') for clip in made):.1%}"
        rows.append(row)
    return rows


def setting_rows(clips: Sequence[Record]) -> list[Row]:
    """Every setting that was measured, from the most work to the least."""
    by_point: dict[tuple[str, str, str], list[Record]] = {}
    for clip in clips:
        by_point.setdefault(_point(clip), []).append(clip)
    rows: list[tuple[float, Row]] = []
    for (method, variant, setting), found in by_point.items():
        named = {"method": method, "variant": variant, "setting": setting}
        named["prompts"] = str(len(found))
        made = [clip for clip in found if clip["refused"] is None]
        if not made or method == DENSE:
            refused = "" if method == DENSE else found[0]["refused"]
            rows.append((2.0, named | {"work": refused, "time": "", "PSNR": ""}))
            continue
        work = statistics.fmean(clip["work"] for clip in made)
        psnrs = [decibels(clip) for clip in made]
        time = f"{statistics.fmean(share_of(clip, 'time') for clip in made):.1%}"
        cells = {"work": f"{work:.1%}", "time": time if on_gpu(made) else "-"}
        cells["PSNR"] = f"{statistics.fmean(psnrs):.1f} ({min(psnrs):.1f})"
        rows.append((work, named | cells))
    return [row for _, row in sorted(rows, key=lambda each: (each[1]["method"], -each[0]))]


def _point(clip: Record) -> tuple[str, str, str]:
    return clip["method"], clip["variant"], clip["setting"]


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
        titled |= {"Ours": step_rows(group), "Settings": setting_rows(group)}
        for title, rows in titled.items():
            if rows:
                texts.append(f"{title}\n\n{table(rows, dict.fromkeys(rows[0], 's'))}")
    return "\n\n".join(texts)

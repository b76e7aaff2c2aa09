"""What the page says of two configs: of what `chipsparse compare A B --json` prints."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from chipsparse.cli.config_statistics import METRICS, Metric
from chipsparse.cli.pages.axes import fitting
from chipsparse.cli.pages.chart import Chart, Dots, Key, Mark, Whisker, figure
from chipsparse.cli.pages.elements import Element, element, listed
from chipsparse.cli.pages.frame_curves import Curves, curves_figure, read_curves
from chipsparse.cli.pages.json_values import Values
from chipsparse.cli.pages.names import name_of
from chipsparse.cli.pages.part import (
    Missing,
    Part,
    QualityPoint,
    Section,
    Tile,
    folded,
    table,
)
from chipsparse.cli.pages.units import decibels, picture_text, times
from chipsparse.cli.paired_runs import SIDES, Side
from chipsparse.cli.wording import seconds_text

CLASSES = {"A": ("first", False), "B": ("second", True)}
DIFFERENCE = "B - A"


@dataclass(frozen=True)
class Run:
    """One generation against the dense one.

    Attributes:
        speedup: dense over its time.
        psnr_db: None where both are the same.
        values: the rest of it.
    """

    speedup: float
    psnr_db: float | None
    values: Values


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; None where it is not finite."""

    value: float | None
    low: float | None
    high: float | None


def comparison_part(values: Values) -> Part:
    """The part of the page; raises `UserError` where the file is damaged."""
    prompts = values.objects("prompts")
    names = {side: name_of(values.object("configs").object(side).text("name")) for side in SIDES}
    runs = {side: [_run(prompt.object(side)) for prompt in prompts] for side in SIDES}
    sections = [_intervals_section(values)]
    missing: list[Missing] = []
    quality = _quality_section(values, names, runs)
    if quality is None:
        how = "Both configs make the same pictures as dense for every prompt."
        missing.append(Missing("Quality and speed", how))
    else:
        sections.insert(0, quality)
    frames = _frames_section(names, runs)
    if frames is None:
        missing.append(Missing("Frame by frame", "These are images, of one frame each."))
    else:
        sections.append(frames)
    sections.append(_prompts_section(prompts, names, runs))
    points = [
        QualityPoint(f"{names[side]}, median of {len(runs[side])}", *found)
        for side in SIDES
        if (found := _median(runs[side])) is not None
    ]
    stopped = values.flag("interrupted")
    return Part(
        kind="comparison",
        source=values.file.name,
        title=f"A: {names['A']}, B: {names['B']}",
        facts=_facts(values, len(prompts)),
        tiles=_tiles(values, names),
        sections=sections,
        missing=missing,
        alert=f"This comparison was interrupted after {len(prompts)} prompts." if stopped else None,
        points=points,
    )


def _run(entry: Values) -> Run:
    return Run(entry.number("speedup"), entry.number_or_none("psnr_db"), entry)


def _median(runs: Sequence[Run]) -> tuple[float, float] | None:
    """Speed-up and PSNR; None where no generation differs from dense."""
    psnrs = [run.psnr_db for run in runs if run.psnr_db is not None]
    if not psnrs:
        return None
    return statistics.median(run.speedup for run in runs), statistics.median(psnrs)


def _facts(values: Values, prompts: int) -> list[tuple[str, str]]:
    settings = values.object("settings").content
    return [
        ("model", name_of(values.text("model"))),
        ("transformer", values.text("transformer_class")),
        ("picture", f"{picture_text(settings)}, {settings.get('num_inference_steps')} steps"),
        ("prompts", f"{prompts}, each with the same seed for dense, A and B"),
        ("device", f"{values.text('device')}, {values.text('dtype')}"),
        ("versions", f"chipsparse {values.text('chipsparse')}"),
    ]


def _tiles(values: Values, names: dict[Side, str]) -> list[Tile]:
    tiles = []
    for side in SIDES:
        speed = _estimate(values.object(side), "speedup", "median")
        quality = _estimate(values.object(side), "psnr_db", "median")
        if speed is not None and speed.value is not None:
            tiles.append(
                Tile(times(speed.value), f"speed of {side} over dense", f"median; {names[side]}")
            )
        if quality is not None:
            label = f"PSNR of {side} against dense"
            tiles.append(Tile(decibels(quality.value), label, f"median; {names[side]}"))
    return tiles


def _estimate(side: Values, metric: str, which: str) -> Estimate | None:
    if metric not in side:
        return None
    found = side.object(metric).object(which)
    return Estimate(*(found.number_or_none(name) for name in ("value", "low", "high")))


# Quality and speed.


def _quality_section(
    values: Values, names: dict[Side, str], runs: dict[Side, list[Run]]
) -> Section | None:
    known = {side: [run for run in runs[side] if run.psnr_db is not None] for side in SIDES}
    points = {
        side: [(run.speedup, run.psnr_db) for run in known[side] if run.psnr_db is not None]
        for side in SIDES
    }
    if not any(points.values()):
        return None
    marks: list[Mark] = []
    across, up = ([point[i] for each in points.values() for point in each] for i in (0, 1))
    for side in SIDES:
        class_, square = CLASSES[side]
        tips = [
            f"{side}, prompt {index}: {times(run.speedup)}, {decibels(run.psnr_db)}"
            for index, run in enumerate(runs[side])
            if run.psnr_db is not None
        ]
        marks.append(Dots(points[side], tips, f"{class_} faint", 4, square))
        speed = _estimate(values.object(side), "speedup", "median")
        quality = _estimate(values.object(side), "psnr_db", "median")
        cross = _cross(side, speed, quality)
        marks += cross
        for mark in cross:
            if isinstance(mark, Whisker):
                across += [mark.start[0], mark.end[0]]
                up += [mark.start[1], mark.end[1]]
    chart = Chart(
        "PSNR over speed-up",
        fitting("times as fast as dense", across, zero=False),
        fitting("PSNR against dense, dB", up, zero=False),
        marks,
        height=360,
    )
    shapes = {side: "square" if CLASSES[side][1] else "dot" for side in SIDES}
    keys = [Key(CLASSES[side][0], f"{side}: {names[side]}", shapes[side]) for side in SIDES]
    same = [side for side in SIDES if not points[side]]
    note = f" {same[0]} makes the same pictures as dense and is not in it." if same else ""
    return Section(
        "Quality and speed",
        "Small marks are prompts; a large one is the median over prompts, and its cross the "
        f"interval.{note}",
        [figure(chart, caption="PSNR over speed-up, both against dense", keys=keys)],
    )


def _cross(side: str, speed: Estimate | None, quality: Estimate | None) -> list[Mark]:
    """The median with its intervals, as far as they are finite."""
    if speed is None or quality is None or speed.value is None or quality.value is None:
        return []
    class_, square = CLASSES[side]
    marks: list[Mark] = []
    if speed.low is not None and speed.high is not None:
        ends = ((speed.low, quality.value), (speed.high, quality.value))
        marks.append(Whisker(*ends, class_))
    if quality.low is not None and quality.high is not None:
        ends = ((speed.value, quality.low), (speed.value, quality.high))
        marks.append(Whisker(*ends, class_))
    tip = f"{side}: median {times(speed.value)}, {quality.value:.2f} dB"
    return [*marks, Dots([(speed.value, quality.value)], [tip], class_, 6, square)]


# Intervals.


def _intervals_section(values: Values) -> Section:
    level = values.object("interval").number("level")
    body: list[Element] = []
    for which in ("median", "mean"):
        body.append(element("h3", f"{which.capitalize()} over prompts"))
        body.append(_intervals_table(values, which))
    notes = values.texts("notes")
    missing = values.text_or_none("lpips_missing")
    if missing is not None:
        notes.append(f"LPIPS was not measured: {missing}.")
    if notes:
        body.append(listed(notes))
    return Section(
        "Intervals",
        f"Means and medians over prompts with their {level:.0%} bootstrap intervals; A and B were "
        "resampled together. Where the interval of B - A includes zero, marked 0, these prompts "
        "show no difference.",
        body,
    )


def _intervals_table(values: Values, which: str) -> Element:
    sides = (*SIDES, DIFFERENCE)
    rows = []
    for name, metric in METRICS.items():
        found = {side: _estimate(values.object(side), name, which) for side in sides}
        cells = [
            "" if each is None else _interval_text(each, metric, sign=side == DIFFERENCE)
            for side, each in found.items()
        ]
        zero = values.object(DIFFERENCE).object(name).object(which).flag("includes_zero")
        if any(cells):
            rows.append((metric.title, *cells, "0" if zero else ""))
    return table(("", *sides, ""), rows)


def _interval_text(found: Estimate, metric: Metric, *, sign: bool) -> str:
    def text(value: float | None) -> str:
        return "the same" if value is None else metric.text(value, sign=sign)

    if found.low == found.high:
        return text(found.value)
    return f"{text(found.value)} ({text(found.low)} to {text(found.high)})"


# Frames and prompts.


def _frames_section(names: dict[Side, str], runs: dict[Side, list[Run]]) -> Section | None:
    groups = [
        Curves(
            f"{side}: {names[side]}",
            [read_curves(run.values.objects("per_frame")) for run in runs[side]],
        )
        for side in SIDES
    ]
    figures = [curves_figure(metric, groups) for metric in ("psnr_db", "ssim", "lpips", "flicker")]
    body = [each for each in figures if each is not None]
    if not body:
        return None
    return Section(
        "Frame by frame",
        "The median over prompts, and the band from the least to the most, against dense. Flicker "
        "is how much a frame differs from the mean of its neighbours.",
        body,
    )


def _prompts_section(
    prompts: Sequence[Values], names: dict[Side, str], runs: dict[Side, list[Run]]
) -> Section:
    headings = (
        "prompt",
        "seed",
        *(f"{what} {side}" for side in SIDES for what in ("PSNR", "speed-up")),
    )
    rows: list[tuple[str, ...]] = []
    for index, prompt in enumerate(prompts):
        cells = [
            text
            for side in SIDES
            for text in (
                decibels(runs[side][index].psnr_db),
                times(runs[side][index].speedup),
            )
        ]
        rows.append((prompt.text("prompt"), str(prompt.count("seed")), *cells))
    seconds = [prompt.number("dense_seconds") for prompt in prompts]
    dense = f" Dense took {seconds_text(statistics.median(seconds))} (median)." if seconds else ""
    body: list[Element] = [folded(f"All {len(prompts)} prompts", table(headings, rows))]
    text = f"Every prompt with its seed, both configs against dense.{dense}"
    return Section("Prompts", text, body)

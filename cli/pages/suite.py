"""What the page says of a suite: of the file that `chipsparse compare --suite` writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chipsparse.cli.pages.axes import fitting
from chipsparse.cli.pages.chart import Chart, Dots, Key, Labels, Level, Line, Mark, figure
from chipsparse.cli.pages.elements import Element, listed
from chipsparse.cli.pages.json_values import Values
from chipsparse.cli.pages.part import (
    Missing,
    Part,
    QualityPoint,
    Section,
    Tile,
    folded,
    table,
)
from chipsparse.cli.pages.samples import suite_samples
from chipsparse.cli.pages.units import decibels, picture_text, times
from chipsparse.cli.wording import counted, refused_rows, seconds_text

CLASSES = {
    "chipsparse": ("first", False),
    "MagCache": ("second", True),
    "SeaCache": ("third", True),
}
OTHERS = ("fourth", True)
TITLES = {"psnr_db": "PSNR against dense, dB", "ssim": "SSIM", "lpips": "LPIPS"}
FAR_DB = 15.0  # a floor that is so far above everything would press it together
PASSED = "\N{CHECK MARK}"


@dataclass(frozen=True)
class Row:
    """One way to generate.

    Attributes:
        name: of the row.
        method: of its curve.
        values: the rest of it.
        summary: over its clips; None where it could not run.
    """

    name: str
    method: str
    values: Values
    summary: Values | None

    def mean(self, metric: str) -> float | None:
        """Over its clips."""
        if self.summary is None or metric not in self.summary:
            return None
        return self.summary.object(metric).number("mean")


def suite_part(values: Values) -> Part:
    """The part of the page; raises `UserError` where the file is damaged."""
    rows = [_row(entry) for entry in values.objects("rows")]
    prompts = values.object("prompts")
    asked, made = prompts.index("asked"), prompts.index("made")
    charts = [_chart(values, rows, metric) for metric in TITLES]
    body = [chart for chart in charts if chart is not None]
    sections: list[Section] = []
    missing: list[Missing] = []
    if body:
        text = (
            "Means over prompts; up and to the right is better, of LPIPS down. No result can be "
            "closer to dense than the floor and mean anything: it is the stock model again, with "
            "another attention kernel. The other dashed line is what serving stacks ask for."
        )
        sections.append(Section("Quality and speed", text, body))
    else:
        missing.append(Missing("Quality and speed", "No clip differs from dense yet."))
    sections.append(_numbers_section(values, rows))
    samples = suite_samples(values)
    if isinstance(samples, Section):
        sections.append(samples)
    else:
        missing.append(samples)
    remarks = _remarks_section(rows)
    if remarks is not None:
        sections.append(remarks)
    sections.append(_clips_section(prompts, rows))
    return Part(
        kind="suite",
        source=values.file.name,
        title=f"{values.text('model')}: quality over speed",
        facts=_facts(values, rows),
        tiles=_tiles(rows),
        sections=sections,
        missing=missing,
        warnings=_warnings(values, rows),
        alert=f"{made} of {asked} prompts are made." if made < asked else None,
        points=[
            QualityPoint(f"{row.name}, mean of {row.summary.index('clips')}", speed, psnr)
            for row in rows
            if row.summary is not None
            and row.method != "floor"
            and (psnr := row.mean("psnr_db")) is not None
            and (speed := row.summary.number("speedup"))
        ],
    )


def _warnings(values: Values, rows: Sequence[Row]) -> list[str]:
    refused = sum(row.values.text_or_none("refused") is not None for row in rows)
    restless = values.text_or_none("restless")
    return [
        *([] if restless is None else [restless]),
        *([f"{refused_rows(refused, len(rows))}. Why, stands below."] if refused else []),
    ]


def _row(entry: Values) -> Row:
    summary = entry.object("summary") if "summary" in entry else None
    return Row(entry.text("name"), entry.text("method"), entry, summary)


def _facts(values: Values, rows: Sequence[Row]) -> list[tuple[str, str]]:
    settings = values.object("settings").content
    prompts = values.object("prompts")
    versions = values.object("versions").content
    dense = values.object("dense_seconds").number("median")
    floor = next((text for row in rows if row.method == "floor" for text in _remarks(row)), "")
    lpips = values.text_or_none("lpips_missing")
    return [
        ("transformer", f"{values.text('transformer_class')}, {values.text('pipeline_class')}"),
        ("picture", f"{picture_text(settings)}, {settings.get('num_inference_steps')} steps"),
        ("prompts", f"{prompts.index('made')}, each row with the same seeds as dense"),
        ("dense", f"{seconds_text(dense)} for the denoising loop, median"),
        ("floor", floor),
        ("device", f"{values.text('device')}, {values.text('dtype')}"),
        ("versions", ", ".join(f"{name} {each}" for name, each in versions.items() if each)),
        ("LPIPS", "" if lpips is None else f"not measured: {lpips}"),
    ]


def _tiles(rows: Sequence[Row]) -> list[Tile]:
    tiles = []
    for row in rows:
        if row.method == "chipsparse" and row.summary is not None:
            detail = f"PSNR {decibels(row.mean('psnr_db'))}, {_passed(row.summary)}"
            tiles.append(Tile(times(row.summary.number("speedup")), row.name, detail))
    return tiles


def _passed(summary: Values) -> str:
    passed, clips = summary.index("passed"), summary.index("clips")
    return f"{passed} of {clips} pass" + (f" {PASSED}" if passed == clips else "")


def _chart(values: Values, rows: Sequence[Row], metric: str) -> Element | None:
    """One metric over speed, a line for each method; None where nothing has both."""
    points: dict[str, list[tuple[float, float, str]]] = {}
    for row in rows:
        mean = row.mean(metric)
        if row.method != "floor" and row.summary is not None and mean is not None:
            place = (row.summary.number("speedup"), mean, row.name)
            points.setdefault(row.method, []).append(place)
    if not points:
        return None
    marks: list[Mark] = []
    keys = []
    for method, found in points.items():
        class_, square = CLASSES.get(method, OTHERS)
        places = [(speed, mean) for speed, mean, _ in sorted(found)]
        tips = [f"{name}: {times(speed)}, {mean:.4g}" for speed, mean, name in sorted(found)]
        marks += [Line(places, class_), Dots(places, tips, class_, 5, square)]
        keys.append(Key(class_, method, "square" if square else "dot"))
    every = [each for found in points.values() for each in found]
    labels = [name.rpartition(" ")[2] for _, _, name in every]
    marks.append(Labels([(speed, mean) for speed, mean, _ in every], labels))
    levels = [Level(values.object("thresholds").number(metric), "asked for")]
    caption = f"{TITLES[metric]}, over speed-up"
    heights = [mean for _, mean, _ in every]
    floor = next((row.mean(metric) for row in rows if row.method == "floor"), None)
    if floor is not None and floor - max(heights) > FAR_DB:
        caption += f"; the floor, {floor:.2f}, lies far above"
    elif floor is not None:
        levels.append(Level(floor, "floor"))
    heights += [level.value for level in levels]
    chart = Chart(
        f"{TITLES[metric]} over speed-up",
        fitting("times as fast as dense", [speed for speed, _, _ in every], zero=False),
        fitting(TITLES[metric], heights, zero=False),
        marks,
        levels,
        height=340,
    )
    return figure(chart, caption=caption, keys=keys)


def _numbers_section(values: Values, rows: Sequence[Row]) -> Section:
    found = values.object("thresholds").numbers_by_name()
    text = (
        f"Median time of the denoising loop, mean (worst) quality. {PASSED} marks rows of which "
        f"every clip has a PSNR of {found['psnr_db']:g} dB, an SSIM of {found['ssim']:g} and, "
        f"where measured, an LPIPS of {found['lpips']:g} or better, as serving stacks ask. "
        "A floor that does not pass says that this model cannot be judged so at this size."
    )
    headings = ("", "setting", "speed-up", "time", "PSNR, dB", "SSIM", "LPIPS", "pass")
    cells = []
    for row in rows:
        summary = row.summary
        if summary is None:
            cells.append((row.name, "did not run", "", "", "", "", "", ""))
            continue
        cells.append(
            (
                row.name,
                row.values.text("setting"),
                # Another kernel is taken in a roundabout way, whose time says nothing.
                *(("", "") if row.method == "floor" else _times(summary)),
                _metric(summary, "psnr_db", ".2f") or "identical",
                _metric(summary, "ssim", ".4f"),
                _metric(summary, "lpips", ".4f"),
                _passed(summary).replace(" pass", ""),
            )
        )
    return Section("Numbers", text, [table(headings, cells, texts=2)])


def _times(summary: Values) -> tuple[str, str]:
    return times(summary.number("speedup")), seconds_text(summary.number("seconds"))


def _metric(summary: Values, name: str, form: str) -> str:
    if name not in summary:
        return ""
    found = summary.object(name)
    return f"{found.number('mean'):{form}} ({found.number('worst'):{form}})"


def _remarks(row: Row) -> list[str]:
    refused = row.values.text_or_none("refused")
    return row.values.texts("remarks") if refused is None else [f"did not run: {refused}"]


def _remarks_section(rows: Sequence[Row]) -> Section | None:
    told = [f"{row.name}: {text}" for row in rows for text in _remarks(row)]
    return Section("What there is to say", "", [listed(told)]) if told else None


def _clips_section(prompts: Values, rows: Sequence[Row]) -> Section:
    """Every clip's PSNR, prompt by prompt."""
    texts = prompts.texts("texts")
    seeds = [seed for seed in prompts.numbers_or_none("seeds") if seed is not None]
    shown = [row for row in rows if row.summary is not None]
    cells: list[tuple[str, ...]] = []
    for place, seed in enumerate(seeds):
        line = [texts[place] if texts else f"prompt {place + 1}", str(seed)]
        for row in shown:
            clips = [each for each in row.values.objects("clips") if each.number("seed") == seed]
            line += [
                f"{decibels(clips[0].number_or_none('psnr_db'))}"
                + (f" {PASSED}" if clips[0].flag("passes") else "")
                if clips
                else ""
            ]
        cells.append(tuple(line))
    headings = ("prompt", "seed", *(row.name for row in shown))
    hidden = "" if texts else " Their texts are not in the file; --with-prompts puts them there."
    return Section(
        "Prompts",
        f"PSNR of every clip against dense; {PASSED} marks those that pass.{hidden}",
        [folded(f"All {counted(len(seeds), 'prompt')}", table(headings, cells, texts=2))],
    )

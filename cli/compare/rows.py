"""Ways to generate over the same prompts: their numbers, tables and charts.

The results of `compare` and of `tune` consist of such rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from chipsparse.cli.views.sections import (
    FIRST,
    SECOND,
    SERIES,
    THIRD,
    Chart,
    Record,
    String,
    Table,
)
from chipsparse.cli.views.units import counted, decibels, seconds_text, times
from chipsparse.common.bounded import Number
from chipsparse.experiments.records import ClipRecord
from chipsparse.experiments.statistics import LEVEL, draws, interval

if TYPE_CHECKING:
    from chipsparse.cli.views.charts import Canvas

OURS, FLOOR = "chipsparse", "floor"  # methods
# The colour of a method, and whether its marks are squares; of others by their place.
STYLES = {
    OURS: (FIRST, False),
    "MagCache": (SECOND, True),
    "SeaCache": (THIRD, True),
    "tried": (SECOND, False),
    "chosen": (THIRD, True),
}
PLACES = ((FIRST, False), (SECOND, True))
SPEED = "times as fast as dense"
EIGHT_BITS = 255.0  # people think of pixels as 8-bit values
# The bounds of serving stacks for a clip against dense.
LEAST = {"psnr_db": 20.0, "ssim": 0.82}
MOST = {"lpips": 0.2}
ASKED = {**LEAST, **MOST}
FAR_DB = 15.0  # a floor that is so far above everything would press it together
PASSED = "\N{CHECK MARK}"
Curves = Mapping[str, Sequence[Number | None]]  # the values of each frame, by metric


@dataclass(frozen=True)
class Metric:
    """A number of each clip: its title with the unit, its format, and a factor for people."""

    title: str
    form: str
    scale: float = 1.0

    def text(self, value: float | None, *, sign: bool = False) -> str:
        """Return a value for people; one that would be rounded to zero keeps its first digits."""
        if value is None:
            return "the same"
        shown, form = self.scale * value, self.form
        if shown and float(format(shown, form)) == 0:
            form = ".1e"
        return format(shown, ("+" if sign else "") + form)


QUALITY = {
    "psnr_db": Metric("PSNR, dB", ".2f"),
    "ssim": Metric("SSIM", ".4f"),
    "lpips": Metric("LPIPS", ".4f"),
}
METRICS = {
    **QUALITY,
    "flicker_change": Metric("flicker change, of 255", ".3f", EIGHT_BITS),
    "seconds": Metric("seconds", ".2f"),
    "speedup": Metric("speed-up", ".2f"),
}
FRAME_METRICS = {**QUALITY, "flicker": Metric("flicker, of 255", ".4g", EIGHT_BITS)}


class Estimate(Record):
    """A number with its interval; a PSNR of None is that of clips which are the same."""

    value: Number | None = None
    low: Number | None = None
    high: Number | None = None
    includes_zero: bool = False


class Summary(Record):
    """One metric over all prompts, with bootstrap intervals."""

    mean: Estimate
    median: Estimate


def summaries(series: Mapping[str, Sequence[float | None]]) -> dict[str, Summary]:
    """Return the summary of each metric that every clip has; none for fewer than two clips.

    The same prompts are resampled for all metrics and rows.
    """
    result = {}
    for name, values in series.items():
        known = [value for value in values if value is not None]
        if len(known) < max(2, len(values)):
            continue
        estimates = {}
        for statistic in ("mean", "median"):
            made = interval(known, statistic, draws(len(known)))
            numbers = {key: x if math.isfinite(x) else None for key, x in vars(made).items()}
            estimates[statistic] = Estimate(**numbers, includes_zero=made.contains(0.0))
        result[name] = Summary(**estimates)
    return result


def series_of(clips: Sequence[ClipRecord]) -> dict[str, list[float | None]]:
    """Return the values of each metric; the PSNR of a clip that is the same is infinite."""
    values = {name: [getattr(clip, name) for clip in clips] for name in METRICS}
    pairs = zip(clips, values["psnr_db"], strict=True)
    return {**values, "psnr_db": [math.inf if clip.identical else psnr for clip, psnr in pairs]}


def differences(a: Sequence[ClipRecord], b: Sequence[ClipRecord]) -> dict[str, Summary]:
    """Return the summaries of B - A, prompt by prompt."""

    def minus(b: float | None, a: float | None) -> float | None:
        none = a is None or b is None or math.isinf(a) or math.isinf(b)
        return None if none or a is None or b is None else b - a

    first, second = series_of(a), series_of(b)
    return summaries({name: [*map(minus, second[name], first[name])] for name in METRICS})


def passes(clip: ClipRecord) -> bool:
    """Return whether a clip meets every bound of what was measured."""
    values = {name: value for name in ASKED if (value := getattr(clip, name)) is not None}
    return all(
        LEAST.get(name, value) <= value <= MOST.get(name, value) for name, value in values.items()
    )


class Quality(Record):
    """A metric over the clips of a row."""

    mean: Number
    worst: Number


class Row(Record):
    """One way to generate.

    Attributes:
        method: the family of ways that one colour shows.
        setting: of the method; of a config the profile.
        label: the text beside its mark in charts, where rows of a method are joined by a line.
        refused: why it did not run.
        remarks: a sentence about each thing to know.
        clips: its records, one for each prompt.
        summary: the metrics over all prompts.
    """

    name: String
    method: String = ""
    setting: String = ""
    label: String = ""
    refused: String | None = None
    remarks: Sequence[String] = ()
    clips: Sequence[ClipRecord] = ()
    summary: Mapping[str, Summary] = {}

    @staticmethod
    def of(name: str, clips: Sequence[ClipRecord], **fields: Any) -> Row:
        """Return a row with the summary and the remarks of its clips.

        Args:
            fields: further ones; the remarks among them come first.
        """
        notes = [note for clip in clips for note in (*clip.fallbacks, *clip.notes)]
        same = sum(clip.identical for clip in clips)
        if 0 < same < len(clips):
            notes.append(
                f"{same} of {len(clips)} clips are bit for bit as dense; the PSNR is the others'"
            )
        elif same:
            notes.append("every clip is bit for bit as dense")
        remarks = [*fields.pop("remarks", ()), *dict.fromkeys(notes)]
        summary = summaries(series_of(clips))
        return Row(name=name, clips=clips, remarks=remarks, summary=summary, **fields)

    @property
    def pass_text(self) -> str:
        """The clips that pass, with a mark where all do."""
        passed = sum(map(passes, self.clips))
        text = f"{passed} of {len(self.clips)}"
        return f"{text} {PASSED}" if passed == len(self.clips) else text

    def median(self, name: Literal["seconds", "speedup"]) -> float:
        """Return the median of a time over the clips."""
        return statistics.median(getattr(clip, name) for clip in self.clips)

    def quality(self, metric: str) -> Quality | None:
        """Return a metric over the clips; None where one has none, or all are the same as dense."""
        values = [x for clip in self.clips if (x := getattr(clip, metric)) is not None]
        # A PSNR of None is the same clip, which no mean can have in it.
        if not values or (metric != "psnr_db" and len(values) < len(self.clips)):
            return None
        worst = max(values) if metric in MOST else min(values)
        return Quality(mean=statistics.fmean(values), worst=worst)

    @property
    def notes(self) -> list[str]:
        """The remarks, or why it did not run, with its name."""
        texts = self.remarks if self.refused is None else [f"did not run: {self.refused}"]
        return [f"{self.name}: {text}" for text in texts]


# Tables.


def numbers_table(rows: Sequence[Row], *, passed: bool = True) -> Table:
    """Return the mean and the worst quality of each row, its median time, and how many pass."""
    metrics = [name for name in QUALITY if any(row.quality(name) for row in rows)]
    lines = []
    for row in rows:
        # Another kernel is taken in a roundabout way, whose time says nothing.
        timed = row.method != FLOOR
        speed = times(row.median("speedup")) if timed else ""
        cells = [speed, seconds_text(row.median("seconds")) if timed else ""]
        for name in metrics:
            quality, form = row.quality(name), QUALITY[name].form
            none = "identical" if name == "psnr_db" else ""
            cells.append(f"{quality.mean:{form}} ({quality.worst:{form}})" if quality else none)
        lines.append([row.name, *cells, *[row.pass_text] * passed])
    titles = (QUALITY[name].title for name in metrics)
    columns = ["against dense", "speed-up", "time", *titles, *["pass"] * passed]
    return Table(columns, lines)


def intervals_table(
    title: str, summary: Mapping[str, Summary], *, sign: bool = False, folded: bool = False
) -> Table:
    """Return the mean and the median of each metric with their intervals."""
    bounds, lines = f"{LEVEL:.0%} interval", []
    for name, metric in METRICS.items():
        if name not in summary:
            continue
        line = [metric.title]
        for estimate in (summary[name].mean, summary[name].median):
            low, high = (metric.text(x, sign=sign) for x in (estimate.low, estimate.high))
            between = low if low == high else f"{low} to {high}"
            line += [metric.text(estimate.value, sign=sign), between]
        lines.append(line)
    columns = [title, "mean", bounds, "median", bounds]
    return Table(columns, lines, folded=title if folded else "")


def zeros_text(summary: Mapping[str, Summary]) -> str:
    """Return which differences may be nothing but the choice of prompts."""
    unclear = []
    for name, metric in METRICS.items():
        if name in summary:
            mean, median = summary[name].mean.includes_zero, summary[name].median.includes_zero
            which = "" if mean and median else " (mean)" if mean else " (median)"
            if mean or median:
                unclear.append(metric.title.partition(",")[0] + which)
    if not unclear:
        return "no interval includes zero"
    return f"may be zero, as the interval includes it: {', '.join(unclear)}"


def clips_table(rows: Sequence[Row], prompts: Mapping[int, str]) -> Table:
    """Return the PSNR and the speed-up of every clip, by the prompts' seeds."""
    lines = []
    for seed, prompt in prompts.items():
        line = [prompt, str(seed)]
        for row in rows:
            clip = next((clip for clip in row.clips if clip.seed == seed), None)
            mark = f" {PASSED}" if clip is not None and passes(clip) else ""
            text = "" if clip is None else f"{decibels(clip.psnr_db)}, {times(clip.speedup)}"
            line.append(text + mark)
        lines.append(line)
    columns = ["prompt", "seed", *(row.name for row in rows)]
    return Table(columns, lines, texts=2, folded=f"All {counted(len(lines), 'prompt')}")


# Charts.


def quality_chart(
    rows: Sequence[Row],
    metric: str,
    *,
    levels: Sequence[tuple[float, str]] = (),
    limits: Sequence[float] = (),
    worst: bool = False,
) -> Chart | None:
    """Return a metric over the median speed-up, a mark for each row; None where no row has it.

    Args:
        levels: values of the metric to mark, with texts.
        limits: speed-ups to mark.
        worst: shows the worst clip of each row in place of the mean.
    """
    marks = {
        row.name: (row.median("speedup"), quality.worst if worst else quality.mean)
        for row in rows
        if (quality := row.quality(metric)) is not None
    }
    shown = [row for row in rows if row.name in marks]
    if not shown:
        return None
    title = f"{METRICS[metric].title.partition(',')[0]} over speed-up"

    def draw(canvas: Canvas) -> None:
        canvas.plane(SPEED, METRICS[metric].title)
        for limit in limits:
            canvas.axes.axvline(limit, color=SERIES[3], linestyle="--", label="target")
        for place, method in enumerate(dict.fromkeys(row.method for row in shown)):
            colour, square = STYLES.get(method, PLACES[min(place, 1)])
            own = [row for row in shown if row.method == method]
            if any(row.label for row in own):
                line = sorted(marks[row.name] for row in own)
                canvas.axes.plot(*zip(*line, strict=True), color=colour)
            for row in own:
                _spread_marks(canvas, row, metric, colour, square, prompts=len(rows) <= 2)
            tips = [
                (x, y, f"{row.name}: {times(x)}, {y:.4g}")
                for row in own
                for x, y in [marks[row.name]]
            ]
            canvas.dots(tips, colour, label=method, square=square, radius=5)
        for value, text in levels:
            canvas.level(value, text)
        canvas.labels([(*marks[row.name], row.label) for row in shown if row.label])

    return Chart(title, draw, title, 340)


def _spread_marks(
    canvas: Canvas, row: Row, metric: str, colour: str, square: bool, *, prompts: bool
) -> None:
    """Draw the intervals of a row as far as they are finite, and each prompt of a few rows."""
    if prompts:
        marks = [
            (clip.speedup, value, f"{row.name}, seed {clip.seed}: {times(clip.speedup)}, {value:g}")
            for clip in row.clips
            if (value := getattr(clip, metric)) is not None
        ]
        canvas.dots(marks, colour, square=square, alpha=0.6)
    quality = row.quality(metric)
    speed, values = row.summary.get("speedup"), row.summary.get(metric)
    if quality is None or speed is None or values is None:
        return
    x, y = speed.median, values.mean
    if x.value is None or x.low is None or x.high is None or y.low is None or y.high is None:
        return
    canvas.axes.hlines(quality.mean, x.low, x.high, color=colour, linewidth=1.6)
    canvas.axes.vlines(x.value, y.low, y.high, color=colour, linewidth=1.6)


def curves_chart(metric: str, groups: Mapping[str, Sequence[Curves]]) -> Chart | None:
    """Return a metric over the frames: the median clip of each group, and the least and the most.

    None where there is nothing to draw: clips of a single frame, or without this metric.
    """
    facts = FRAME_METRICS[metric]
    spreads = {name: spread(clips, metric, facts.scale) for name, clips in groups.items()}
    spreads = {name: rows for name, rows in spreads.items() if len(rows) > 1}
    if not spreads:
        return None
    frames = 1 + max(row[0] for rows in spreads.values() for row in rows)

    def draw(canvas: Canvas) -> None:
        canvas.whole_axis("frame, from 0", frames, facts.title)
        for (name, rows), colour in zip(spreads.items(), SERIES, strict=False):
            numbers, low, middle, high = zip(*rows, strict=True)
            if low != high:
                canvas.axes.fill_between(numbers, low, high, color=colour, alpha=0.16, linewidth=0)
            heights = np.full(frames, np.nan)  # a gap where no clip has a value
            heights[list(numbers)] = middle
            line = "-" if colour == SERIES[0] else "--"
            canvas.axes.plot(range(frames), heights, color=colour, linestyle=line, label=name)
        if metric not in ("psnr_db", "ssim"):
            canvas.axes.set_ylim(bottom=0)

    title = f"{facts.title.partition(',')[0]} of each frame"
    title = title[:1].upper() + title[1:]
    return Chart(title, draw, title)


def spread(
    clips: Sequence[Curves], metric: str, scale: float = 1.0
) -> list[tuple[int, float, float, float]]:
    """Return frame, least, median and most of all clips, where any has a value."""
    curves = [clip.get(metric, ()) for clip in clips]
    rows = []
    for frame in range(max(map(len, curves), default=0)):
        values = [curve[frame] for curve in curves if frame < len(curve)]
        known = [scale * value for value in values if value is not None]
        if known:
            rows.append((frame, min(known), statistics.median(known), max(known)))
    return rows

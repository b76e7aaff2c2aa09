"""Ways to generate over the same prompts: their numbers, tables and charts.

The results of `compare` and of `tune` consist of such rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from chipsparse.cli.views.colours import FIRST, SECOND, SERIES, THIRD
from chipsparse.cli.views.sections import Chart, Record, String, Table
from chipsparse.cli.views.units import counted, decibels, seconds_text, times
from chipsparse.common.bounded import Number
from chipsparse.experiments.records import ClipRecord
from chipsparse.experiments.statistics import LEVEL, Estimate, Statistic, draws, interval

if TYPE_CHECKING:
    from chipsparse.cli.views.canvas import Canvas

# Names of methods.
OURS = "chipsparse"
FLOOR = "floor"
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
PASSED = "\N{CHECK MARK}"
Curves = Mapping[str, Sequence[Number | None]]  # the values of each frame, by metric


@dataclass(frozen=True)
class Metric:
    """A number of each clip."""

    title: str  # name with the unit
    form: str
    scale: float = 1.0  # factor for people
    statistic: Statistic = "mean"  # of many clips
    worst: Callable[[Sequence[float]], float] = min  # of several values
    bound: float = 0.0  # worst value with which a clip passes in serving stacks

    @property
    def name(self) -> str:
        """The title without its unit."""
        return self.title.partition(",")[0]

    def text(self, value: float | None, *, sign: bool = False) -> str:
        """Return a value for people; one that would be rounded to zero keeps its first digits."""
        if value is None:
            return "the same"
        shown = self.scale * value
        form = self.form
        if shown and float(format(shown, form)) == 0:
            form = ".1e"
        return format(shown, ("+" if sign else "") + form)


QUALITY = {
    "psnr_db": Metric("PSNR, dB", ".2f", bound=20.0),
    "ssim": Metric("SSIM", ".4f", bound=0.82),
    "lpips": Metric("LPIPS", ".4f", worst=max, bound=0.2),
}
BOUNDED = {**QUALITY, "largest_difference": Metric("largest pixel difference", ".0f", worst=max)}
# The metric of each bound of the command.
METRIC_OF = {
    "min_psnr": "psnr_db",
    "min_ssim": "ssim",
    "max_lpips": "lpips",
    "max_pixel": "largest_difference",
}
USUAL_BOUNDS = {name: metric.bound for name, metric in QUALITY.items()}
# Least PSNR of every clip of a quality, in dB: the worst clips of docs/performance.md.
QUALITY_PSNRS = {"faithful": 31.0, "balanced": 26.5, "fast": 22.0}
METRICS = {
    **QUALITY,
    "flicker_change": Metric("flicker change, of 255", ".3f", EIGHT_BITS),
    "seconds": Metric("seconds", ".2f", statistic="median"),
    "speedup": Metric("speed-up", ".2f", statistic="median"),
}
FRAME_METRICS = {**QUALITY, "flicker": Metric("flicker, of 255", ".4g", EIGHT_BITS)}


def usual_bounds(quality: str | None) -> dict[str, float]:
    """Return the bounds of a clip where none is given: those that the docs show of a quality."""
    least = QUALITY_PSNRS.get(quality or "", USUAL_BOUNDS["psnr_db"])
    return {**USUAL_BOUNDS, "psnr_db": least}


def bound_text(name: str, bound: float) -> str:
    """Return a bound of a metric for people."""
    metric = BOUNDED[name]
    sign = "<=" if metric.worst is max else ">="
    unit = " dB" if name == "psnr_db" else ""
    return f"{metric.name} {sign} {bound:g}{unit}"


def keeps(clip: ClipRecord, name: str, bound: float) -> bool:
    """Return whether a clip is within a bound; True where its metric was not measured."""
    value = getattr(clip, name)
    return value is None or BOUNDED[name].worst((value, bound)) == bound


def passes(clip: ClipRecord, bounds: Mapping[str, float] = USUAL_BOUNDS) -> bool:
    """Return whether a clip is within the bound of every metric that was measured."""
    return all(keeps(clip, *item) for item in bounds.items())


def summary_of(series: Mapping[str, Sequence[float | None]]) -> dict[str, Estimate]:
    """Return the estimate of each metric that every clip has; none for fewer than two clips.

    The same prompts are resampled for all metrics and rows.
    """
    summary = {}
    for name, values in series.items():
        known = [value for value in values if value is not None]
        if len(known) == len(values) >= 2:
            summary[name] = interval(known, METRICS[name].statistic, draws(len(known)))
    return summary


def series_of(clips: Sequence[ClipRecord]) -> dict[str, list[float | None]]:
    """Return the values of each metric; the PSNR of a clip that is the same is infinite."""
    series = {name: [getattr(clip, name) for clip in clips] for name in METRICS}
    pairs = zip(clips, series["psnr_db"], strict=True)
    return {**series, "psnr_db": [math.inf if clip.identical else psnr for clip, psnr in pairs]}


def differences(a: Sequence[ClipRecord], b: Sequence[ClipRecord]) -> dict[str, Estimate]:
    """Return the summary of B - A, prompt by prompt."""

    def minus(x: float | None, y: float | None) -> float | None:
        if x is None or y is None or math.isinf(x) or math.isinf(y):
            return None
        return x - y

    first = series_of(a)
    second = series_of(b)
    return summary_of({name: [*map(minus, second[name], first[name])] for name in METRICS})


class Quality(NamedTuple):
    """A metric over the clips of a row."""

    mean: float
    worst: float


class Row(Record):
    """One way to generate."""

    name: String
    method: String = ""  # family of ways that one colour shows
    setting: String = ""  # of the method; of a config the profile
    refused: String | None = None  # why it did not run
    remarks: Sequence[String] = ()  # a sentence each
    clips: Sequence[ClipRecord] = ()  # one for each prompt
    summary: Mapping[str, Estimate] = {}  # of the metrics, over all prompts
    bounds: Mapping[str, Number] = USUAL_BOUNDS  # of every clip, by metric

    @staticmethod
    def of(
        name: str,
        clips: Sequence[ClipRecord],
        *,
        remarks: Sequence[str] = (),
        **fields: Any,
    ) -> Row:
        """Return a row with the summary of its clips, and with their remarks behind others."""
        texts = [*remarks, *(text for clip in clips for text in (*clip.fallbacks, *clip.notes))]
        same = sum(clip.identical for clip in clips)
        if same and same == len(clips):
            texts.append("every clip is bit for bit as dense")
        elif same:
            texts.append(
                f"{same} of {len(clips)} clips are bit for bit as dense; the PSNR is the others'",
            )
        remarks = list(dict.fromkeys(texts))
        summary = summary_of(series_of(clips))
        return Row(name=name, clips=clips, remarks=remarks, summary=summary, **fields)

    @property
    def label(self) -> str:
        """The setting in the name, such as ``fast``; empty where a method has one row."""
        return self.name.partition(f"{self.method} ")[2]

    @property
    def pass_text(self) -> str:
        """The clips that pass, with a mark where all do."""
        passed = sum(passes(clip, self.bounds) for clip in self.clips)
        text = f"{passed} of {len(self.clips)}"
        return f"{text} {PASSED}" if passed == len(self.clips) else text

    def broken(self) -> list[str]:
        """Return each bound that a clip breaks, with the worst clip, in a sentence."""
        sentences = []
        if self.refused is not None:
            sentences.append(f"{self.name}: did not run, so no bound holds")
        for name, bound in self.bounds.items():
            metric = BOUNDED[name]
            beyond = [clip for clip in self.clips if not keeps(clip, name, bound)]
            if beyond:
                worst = metric.worst([getattr(clip, name) for clip in beyond])
                seed = next(clip.seed for clip in beyond if getattr(clip, name) == worst)
                value = f"{metric.text(worst)} of seed {seed}"
                sentences.append(f"{self.name}: {value} breaks {bound_text(name, bound)}")
        return sentences

    @property
    def bounds_text(self) -> str:
        """Which bounds hold, and which do not, of those on metrics that were measured."""
        texts = []
        for name, bound in self.bounds.items():
            if any(clip.identical or getattr(clip, name) is not None for clip in self.clips):
                holds = all(keeps(clip, name, bound) for clip in self.clips)
                texts.append(f"{bound_text(name, bound)} {'holds' if holds else 'is broken'}")
        return ", ".join(texts)

    def median(self, name: Literal["seconds", "speedup"]) -> float:
        """Return the median over its clips, in seconds or as a factor."""
        return statistics.median(getattr(clip, name) for clip in self.clips)

    def quality(self, metric: str) -> Quality | None:
        """Return a metric over the clips; None where one has none, or all are the same as dense."""
        values = [x for clip in self.clips if (x := getattr(clip, metric)) is not None]
        # A PSNR of None is the same clip, which no mean can have in it.
        if not values or (metric != "psnr_db" and len(values) < len(self.clips)):
            return None
        return Quality(statistics.fmean(values), QUALITY[metric].worst(values))

    @property
    def notes(self) -> list[str]:
        """The remarks, or why it did not run, with its name."""
        texts = self.remarks if self.refused is None else [f"did not run: {self.refused}"]
        return [f"{self.name}: {text}" for text in texts]


# Tables.


def numbers_table(rows: Sequence[Row], *, passed: bool = True) -> Table:
    """Return the mean and the worst quality of each row, its median time, and how many pass."""
    metrics = {name: m for name, m in QUALITY.items() if any(row.quality(name) for row in rows)}
    lines = []
    for row in rows:
        cells = [row.name, times(row.median("speedup")), seconds_text(row.median("seconds"))]
        if row.method == FLOOR:  # its kernel is called in a roundabout way
            cells[1:] = "", ""
        for name, metric in metrics.items():
            quality = row.quality(name)
            none = "identical" if name == "psnr_db" else ""
            pair = [] if quality is None else [format(x, metric.form) for x in quality]
            cells.append(f"{pair[0]} ({pair[1]})" if pair else none)
        lines.append([*cells, *[row.pass_text] * passed])
    titles = (f"{metric.title}: mean (worst clip)" for metric in metrics.values())
    return Table(["against dense", "speed-up", "time", *titles, *["pass"] * passed], lines)


def intervals_table(
    title: str,
    summary: Mapping[str, Estimate],
    *,
    sign: bool = False,
    folded: bool = False,
) -> Table:
    """Return the mean or median of each metric with its interval."""
    lines = []
    for name, metric in METRICS.items():
        if name in summary:
            estimate = summary[name]
            low, high = (metric.text(x, sign=sign) for x in (estimate.low, estimate.high))
            between = low if low == high else f"{low} to {high}"
            value = metric.text(estimate.value, sign=sign)
            lines.append([f"{metric.statistic} {metric.title}", value, between])
    columns = [title, "value", f"{LEVEL:.0%} interval"]
    return Table(columns, lines, folded=title if folded else "")


def zeros_text(summary: Mapping[str, Estimate]) -> str:
    """Return which differences may be nothing but the choice of prompts."""
    unclear = [METRICS[name].name for name, item in summary.items() if item.includes_zero]
    if not unclear:
        return "no interval includes zero"
    return f"may be zero, as the interval includes it: {', '.join(unclear)}"


def clips_table(rows: Sequence[Row], prompts: Mapping[int, str]) -> Table:
    """Return the PSNR and the speed-up of every clip, by the prompts' seeds."""
    lines = {seed: [prompt, str(seed)] for seed, prompt in prompts.items()}
    for row in rows:
        clips = {clip.seed: clip for clip in row.clips}
        for seed, line in lines.items():
            clip = clips.get(seed)
            text = "" if clip is None else f"{decibels(clip.psnr_db)}, {times(clip.speedup)}"
            passed = clip is not None and passes(clip, row.bounds)
            line.append(f"{text} {PASSED}" if passed else text)
    columns = ["prompt", "seed", *(row.name for row in rows)]
    return Table(columns, [*lines.values()], texts=2, folded=f"All {counted(len(lines), 'prompt')}")


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

    ``levels`` of the metric, with texts, and ``limits`` of the speed-up are marked. ``worst`` shows
    the worst clip of each row in place of the mean.
    """
    methods: dict[str, list[tuple[float, float, Row]]] = {}
    for row in rows:
        if (quality := row.quality(metric)) is not None:
            mark = row.median("speedup"), quality.worst if worst else quality.mean, row
            methods.setdefault(row.method, []).append(mark)
    if not methods:
        return None
    title = f"{METRICS[metric].name} over speed-up"

    def draw(canvas: Canvas) -> None:
        canvas.plane(SPEED, METRICS[metric].title)
        for limit in limits:
            canvas.axes.axvline(limit, color=SERIES[3], linestyle="--", label="target")
        for place, (method, marks) in enumerate(methods.items()):
            colour, square = STYLES.get(method, PLACES[min(place, 1)])
            if any(row.label for _, _, row in marks):
                line = sorted((x, y) for x, y, _ in marks)
                canvas.axes.plot(*zip(*line, strict=True), color=colour)
            for _, _, row in marks:
                _spread_marks(canvas, row, metric, colour, square, prompts=len(rows) <= 2)
            tips = [(x, y, f"{row.name}: {times(x)}, {y:.4g}") for x, y, row in marks]
            canvas.dots(tips, colour, label=method, square=square, radius=5)
        for value, text in levels:
            canvas.level(value, text)
        every = [mark for marks in methods.values() for mark in marks]
        canvas.labels([(x, y, row.label) for x, y, row in every if row.label])

    return Chart(title, draw, title, 340)


def _spread_marks(
    canvas: Canvas,
    row: Row,
    metric: str,
    colour: str,
    square: bool,
    *,
    prompts: bool,
) -> None:
    """Draw the intervals of a row where they are finite, and each prompt of a few rows."""
    if prompts:
        marks = [
            (clip.speedup, value, f"{row.name}, seed {clip.seed}: {times(clip.speedup)}, {value:g}")
            for clip in row.clips
            if (value := getattr(clip, metric)) is not None
        ]
        canvas.dots(marks, colour, square=square, alpha=0.6)
    missing = Estimate()
    x, y = (row.summary.get(name, missing).numbers for name in ("speedup", metric))
    if x is not None and y is not None:
        canvas.axes.hlines(y[0], x[1], x[2], color=colour, linewidth=1.6)
        canvas.axes.vlines(x[0], y[1], y[2], color=colour, linewidth=1.6)


def curves_chart(metric: str, groups: Mapping[str, Sequence[Curves]]) -> Chart | None:
    """Return a metric over the frames: the median clip of each group, and the least and the most.

    None where there is nothing to draw: clips of a single frame, or without this metric.
    """
    facts = FRAME_METRICS[metric]
    spreads = {name: spread(clips, metric) for name, clips in groups.items()}
    spreads = {name: values for name, values in spreads.items() if np.isfinite(values[1]).sum() > 1}
    if not spreads:
        return None
    frames = np.arange(max(values.shape[1] for values in spreads.values()))

    def draw(canvas: Canvas) -> None:
        canvas.whole_axis("frame, from 0", len(frames), facts.title)
        for (name, (low, middle, high)), colour in zip(spreads.items(), SERIES, strict=False):
            own = frames[: len(middle)]
            if len(groups[name]) > 1:
                canvas.axes.fill_between(own, low, high, color=colour, alpha=0.16, linewidth=0)
            line = "-" if colour == SERIES[0] else "--"
            canvas.axes.plot(own, middle, color=colour, linestyle=line, label=name)
        if metric not in ("psnr_db", "ssim"):
            canvas.axes.set_ylim(bottom=0)

    title = f"{facts.name} of each frame"
    title = title[:1].upper() + title[1:]
    return Chart(title, draw, title)


def spread(clips: Sequence[Curves], metric: str) -> np.ndarray:
    """Return the least, median and most value of each frame over all clips, float ``[3, F]``.

    NaN where no clip has a value, as each frame is the same as dense.
    """
    rows = []
    for values in zip_longest(*(clip.get(metric, ()) for clip in clips)):
        known = [value for value in values if value is not None] or [math.nan]
        rows.append((min(known), statistics.median(known), max(known)))
    return FRAME_METRICS[metric].scale * np.array(rows).reshape(-1, 3).T

"""The results of `chipsparse compare`, of two configs and of two files."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from chipsparse.cli.generate.record import Settings
from chipsparse.cli.views.names import name_of
from chipsparse.cli.views.sections import (
    FIRST,
    SECOND,
    SERIES,
    Chart,
    Clips,
    Count,
    Facts,
    Number,
    Part,
    QualityPoint,
    Record,
    Result,
    Section,
    String,
    Table,
    Tile,
)
from chipsparse.cli.views.units import counted, decibels, seconds_text, times
from chipsparse.experiments.records import ClipQuality, ClipRecord
from chipsparse.experiments.samples import DENSE
from chipsparse.experiments.statistics import LEVEL, draws, interval

if TYPE_CHECKING:
    from chipsparse.cli.views.charts import Canvas

Side = Literal["A", "B"]
SIDES: tuple[Side, Side] = ("A", "B")
SPEED, PSNR = "times as fast as dense", "PSNR against dense, dB"
EIGHT_BITS = 255.0  # people think of pixels as 8-bit values
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


METRICS = {
    "psnr_db": Metric("PSNR (dB)", ".2f"),
    "ssim": Metric("SSIM", ".4f"),
    "lpips": Metric("LPIPS", ".4f"),
    "flicker_change": Metric("flicker change", ".3f", EIGHT_BITS),
    "seconds": Metric("seconds", ".2f"),
    "speedup": Metric("speed-up", ".2f"),
}
FRAME_METRICS = {
    "psnr_db": Metric("PSNR, dB", ".4g"),
    "ssim": Metric("SSIM", ".4g"),
    "lpips": Metric("LPIPS", ".4g"),
    "flicker": Metric("flicker, of 255", ".4g", EIGHT_BITS),
}


class Estimate(Record):
    """A number with its interval; a PSNR of None is that of clips which are the same."""

    value: Number | None = None
    low: Number | None = None
    high: Number | None = None
    includes_zero: bool = False


class Summary(Record):
    """One metric over all prompts."""

    mean: Estimate
    median: Estimate

    @staticmethod
    def of(series: Sequence[float | None], drawn: np.ndarray) -> Summary | None:
        """Return the summary of a metric's values; None where a clip has none."""
        known = [value for value in series if value is not None]
        if len(known) < len(series):
            return None
        estimates = {}
        for name in ("mean", "median"):
            result = interval(known, name, drawn)
            values = {
                key: each if math.isfinite(each) else None for key, each in vars(result).items()
            }
            estimates[name] = Estimate(**values, includes_zero=result.contains(0.0))
        return Summary(**estimates)


class ShownClip(Record):
    """The clip that shows a comparison: its files, and the factor of its heat-map."""

    files: Sequence[String]
    amplified: Count
    prompt: Count | None = None

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Return where it is, and how to read it."""
        files = self.files
        text = files[0] if len(files) == 1 else f"{files[0]} to {name_of(files[-1])}"
        white = -(-255 // self.amplified)
        heat = f"difference x{self.amplified}: white is {white} of 255 or more"
        return [("written", text), ("heat-map", heat)]


class Config(Record):
    """A side: what the user called it, and its profile, None of the stock model."""

    name: String
    profile: String | None = None


class ConfigsComparison(Result):
    """Two configs against dense and against each other.

    Attributes:
        settings: of the generations.
        range_notes: that the profile of A or B was tuned for other ones, a sentence.
        sharing: how several processes made each clip together; empty for one process.
        asked: how many prompts there were to be.
        summaries: of "A", "B" and "B - A", by metric.
        records: of all clips, dense ones too; those of a config have its side as their way.
        clip: of the prompt with the lowest PSNR.
        unwritten: why the clip could not be written.
    """

    kind: Literal["comparison"] = "comparison"
    model: String
    transformer_class: String
    device: String
    dtype: String
    settings: Settings = Settings()
    flow_shift: Number | None = None
    sharing: String = ""
    configs: Mapping[Side, Config]
    range_notes: Mapping[Side, String] = {}
    asked: Count
    level: Number = LEVEL
    summaries: Mapping[str, Mapping[str, Summary | None]] = {}
    records: Sequence[ClipRecord] = ()
    clip: ShownClip | None = None
    unwritten: String | None = None

    @staticmethod
    def summarized(records: Sequence[ClipRecord], ways: Mapping[Side, str]) -> dict[str, Any]:
        """Return the summaries of records; all metrics are resampled by the same prompts.

        Args:
            ways: the way of each side.
        """
        sides = {side: [r for r in records if r.way == way] for side, way in ways.items()}
        drawn = draws(len(sides["A"]))
        columns: dict[str, dict[str, Summary | None]] = {"A": {}, "B": {}, "B - A": {}}
        for name in METRICS:
            a, b = ([_value(record, name) for record in sides[side]] for side in SIDES)
            columns["A"][name] = Summary.of(a, drawn)
            columns["B"][name] = Summary.of(b, drawn)
            columns["B - A"][name] = Summary.of([*map(_minus, b, a)], drawn)
        return columns

    @property
    def title(self) -> str:
        """The headline of the page."""
        return ", ".join(f"{side}: {self.names[side]}" for side in SIDES)

    @property
    def names(self) -> dict[Side, str]:
        """The names of both configs."""
        return {side: name_of(self.configs[side].name) for side in SIDES}

    def clips(self, side: Side) -> list[ClipRecord]:
        """Return the records of a side, one for each prompt."""
        way = side if self.configs[side].profile else DENSE
        return [record for record in self.records if record.way == way]

    @property
    def dense(self) -> list[ClipRecord]:
        """The records of the stock model, one for each prompt."""
        return [record for record in self.records if record.way == DENSE]

    @property
    def worst(self) -> ClipRecord:
        """The clip with the lowest PSNR of both sides."""
        clips = [clip for side in SIDES for clip in self.clips(side)]
        return min(clips, key=lambda clip: math.inf if clip.psnr_db is None else clip.psnr_db)

    def points(self, name: str) -> list[QualityPoint]:
        """Return the median of each side over its prompts."""
        points = []
        for side in SIDES:
            clips = self.clips(side)
            psnrs = [clip.psnr_db for clip in clips if clip.psnr_db is not None]
            if psnrs:
                label = f"{self.names[side]}, median of {len(clips)}"
                speedup = statistics.median(clip.speedup for clip in clips)
                points.append(QualityPoint(label, speedup, statistics.median(psnrs)))
        return points

    def sections(self, *, verbose: bool = False) -> list[Section]:
        """Return the summaries of both sides and of their difference, charts, and all prompts."""
        tables = [
            self._table(f"{side}: {self.names[side]}", side)
            for side in SIDES
            if self.configs[side].profile
        ]
        groups = {
            f"{side}: {self.names[side]}": [clip.per_frame for clip in self.clips(side)]
            for side in SIDES
        }
        shown = "the prompt with the lowest PSNR: A, B, and where each differs from dense"
        names = {} if self.clip is None else dict(zip([shown], self.clip.files, strict=False))
        missing = "They are there with compare -o worst.mp4."
        return [
            Section("", self._head()),
            Section("Frames", [Clips(names, side_by_side=True, missing=missing)], where="page"),
            Section(
                "Quality and speed",
                [self._chart()],
                "Small marks are prompts; a large one is the median over prompts, and its cross "
                "the interval.",
                where="page",
                missing="Both configs make the same clips as dense for every prompt.",
            ),
            Section(
                "Intervals",
                [*tables, self._table("B - A", "B - A"), Facts([("B - A", self._zeros())])],
                f"Means and medians over prompts with their {self.level:.0%} bootstrap intervals; "
                "A and B were resampled together.",
            ),
            Section(
                "Frame by frame",
                [curves_chart(metric, groups) for metric in FRAME_METRICS],
                "The median over prompts, and the band from the least to the most, against dense. "
                "Flicker is how much a frame differs from the mean of its neighbours.",
                where="page",
                missing="These are images, of one frame each.",
            ),
            Section("Prompts", [self._prompts()], where="page"),
        ]

    def _head(self) -> list[Part]:
        parts: list[Part] = []
        count = len(self.dense)
        for side in SIDES:
            detail = f"median; {self.names[side]}"
            speed, psnr = (self._median(side, name) for name in ("speedup", "psnr_db"))
            if speed is not None and speed.value is not None:
                parts.append(Tile(times(speed.value), f"speed of {side} over dense", detail))
            if psnr is not None:
                parts.append(Tile(decibels(psnr.value), f"PSNR of {side} against dense", detail))
        dense = statistics.median(clip.seconds for clip in self.dense)
        missing = next((r.lpips_missing for r in self.records if r.lpips_missing), None)
        seeds = [record.seed for record in self.dense]
        rows = [
            ("model", f"{name_of(self.model)} ({self.transformer_class})"),
            ("settings", self.settings.text(self.flow_shift)),
            ("prompts", f"{count}, seeds {seeds[0]} to {seeds[-1]}, the same for dense, A and B"),
            ("dense", f"{seconds_text(dense)} for the denoising loop, median"),
            ("device", f"{self.device}, {self.dtype}"),
            ("versions", f"chipsparse {self.chipsparse}"),
            ("LPIPS", "" if missing is None else f"not available: {missing}"),
            *(("note", note) for note in self.notes),
        ]
        if self.clip is not None:
            rows += self.clip.facts
            rows.append(("", f"of the lowest PSNR: seed {self.worst.seed}, {self.worst.prompt}"))
        return [*parts, Facts(rows)]

    def _median(self, column: str, metric: str) -> Estimate | None:
        summary = self.summaries.get(column, {}).get(metric)
        return None if summary is None else summary.median

    def _table(self, title: str, column: str) -> Table:
        bounds = f"{self.level:.0%} interval"
        sign, rows = column not in SIDES, []
        for name, metric in METRICS.items():
            summary = self.summaries.get(column, {}).get(name)
            if summary is not None:
                row = [metric.title]
                for estimate in (summary.mean, summary.median):
                    low, high = (metric.text(x, sign=sign) for x in (estimate.low, estimate.high))
                    between = low if low == high else f"{low} to {high}"
                    row += [metric.text(estimate.value, sign=sign), between]
                rows.append(row)
        return Table([title, "mean", bounds, "median", bounds], rows)

    @property
    def notes(self) -> list[str]:
        """What to know beside the numbers, one sentence each."""
        count = len(self.dense)
        notes = []
        if count < self.asked:
            notes.append(f"interrupted: of {self.asked} prompts, the first {count} are compared")
        if self.sharing:
            notes.append(f"dense and both configs ran on the same GPUs: {self.sharing}")
        if count < 10:
            notes.append(
                f"intervals from {count} prompts are rough and tend to be too narrow; use more"
            )
        notes += [f"{side}: {sentence}" for side, sentence in self.range_notes.items()]
        for side in SIDES:
            lines = [line for clip in self.clips(side) for line in (*clip.fallbacks, *clip.notes)]
            notes += [f"{side}: {line}" for line in dict.fromkeys(lines)]
        return notes

    def _zeros(self) -> str:
        """Return where B - A may be nothing but the choice of prompts."""
        unclear = []
        for name, metric in METRICS.items():
            summary = self.summaries.get("B - A", {}).get(name)
            if summary is not None:
                mean, median = summary.mean.includes_zero, summary.median.includes_zero
                which = "" if mean and median else " (mean)" if mean else " (median)"
                if mean or median:
                    unclear.append(metric.title.partition(" (")[0] + which)
        if not unclear:
            return "no interval includes zero"
        return f"may be zero, as the interval includes it: {', '.join(unclear)}"

    def _prompts(self) -> Table:
        columns = ["prompt", "seed", "PSNR A", "speed-up A", "PSNR B", "speed-up B"]
        rows = []
        for dense, *sides in zip(self.dense, *map(self.clips, SIDES), strict=True):
            values = [text for s in sides for text in (decibels(s.psnr_db), times(s.speedup))]
            rows.append([dense.prompt, str(dense.seed), *values])
        return Table(columns, rows, folded=f"All {counted(len(rows), 'prompt')}")

    def _chart(self) -> Chart | None:
        """Return a chart of every prompt and of the medians; None where nothing differs."""
        if all(clip.identical for side in SIDES for clip in self.clips(side)):
            return None

        def draw(canvas: Canvas) -> None:
            canvas.plane(SPEED, PSNR)
            for side, colour in zip(SIDES, (FIRST, SECOND), strict=True):
                square = side == "B"
                marks = [
                    (c.speedup, psnr, f"{side}, prompt {n}: {times(c.speedup)}, {psnr:.2f} dB")
                    for n, c in enumerate(self.clips(side))
                    if (psnr := c.psnr_db) is not None
                ]
                canvas.dots(marks, colour, square=square, alpha=0.6)
                self._cross(canvas, side, colour)
                canvas.axes.plot(
                    [],
                    [],
                    "s" if square else "o",
                    color=colour,
                    label=f"{side}: {self.names[side]}",
                )

        return Chart("PSNR over speed-up", draw, "PSNR over speed-up, both against dense", 360)

    def _cross(self, canvas: Canvas, side: Side, colour: str) -> None:
        """Draw the median with its intervals, as far as they are finite."""
        speed, psnr = (self._median(side, name) for name in ("speedup", "psnr_db"))
        if speed is None or psnr is None or speed.value is None or psnr.value is None:
            return
        if speed.low is not None and speed.high is not None:
            canvas.axes.hlines(psnr.value, speed.low, speed.high, color=colour, linewidth=1.6)
        if psnr.low is not None and psnr.high is not None:
            canvas.axes.vlines(speed.value, psnr.low, psnr.high, color=colour, linewidth=1.6)
        tip = f"{side}: median {times(speed.value)}, {psnr.value:.2f} dB"
        canvas.dots([(speed.value, psnr.value, tip)], colour, square=side == "B", radius=6)


def _value(record: ClipRecord, metric: str) -> float | None:
    if metric == "psnr_db" and record.identical:
        return math.inf
    value: float | None = getattr(record, metric)
    return value


def _minus(b: float | None, a: float | None) -> float | None:
    if a is None or b is None or math.isinf(a) or math.isinf(b):
        return None
    return b - a


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
            known = dict(zip(numbers, middle, strict=True))
            places = range(numbers[0], numbers[-1] + 1)  # with a gap where no clip has a value
            heights = [known.get(place, math.nan) for place in places]
            line = "-" if colour == SERIES[0] else "--"
            canvas.axes.plot(places, heights, color=colour, linestyle=line, label=name)
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


class FilesComparison(Result, ClipQuality):
    """The quality of file B against file A, whose flicker is ``flicker_dense`` in `per_frame`.

    Attributes:
        lossy: the files whose format changed the pixels.
    """

    kind: Literal["files"] = "files"
    a: String
    b: String
    frames: Count
    height: Count
    width: Count
    lossy: Sequence[String] = ()
    lpips_missing: String | None = None
    clip: ShownClip | None = None

    @property
    def title(self) -> str:
        """The headline of the page."""
        return f"{name_of(self.b)} against {name_of(self.a)}"

    def sections(self, *, verbose: bool = False) -> list[Section]:
        """Return the metrics with their worst frames, facts, and each frame."""
        frame_table = self._frames()
        flicker = {
            f"{side}: {name_of(file)}": [{"flicker": self.per_frame.get(name, ())}]
            for side, file, name in (("A", self.a, "flicker_dense"), ("B", self.b, "flicker"))
        }
        both = {"B against A": [self.per_frame]}
        charts = [curves_chart(name, both) for name in FRAME_METRICS if name != "flicker"]
        return [
            Section("", self._tiles(), where="page"),
            Section("B against A", self._numbers()),
            Section("Frames", [Clips({"A": self.a, "B": self.b}, reference="A")], where="page"),
            Section(
                "Frame by frame",
                [*charts, curves_chart("flicker", flicker), frame_table],
                "How close each frame of B is to that of A. Flicker is how much a frame differs "
                "from the mean of its neighbours. A gap in a curve of PSNR is a frame that is the "
                "same.",
                where="page",
                missing="These are images, of one frame each.",
            ),
        ]

    def _tiles(self) -> list[Part]:
        tiles: list[Part] = [Tile(decibels(self.psnr_db), "PSNR of B against A")]
        for title, value in (("SSIM", self.ssim), ("LPIPS", self.lpips)):
            if value is not None:
                tiles.append(Tile(f"{value:.4f}", title))
        return tiles

    def _numbers(self) -> list[Part]:
        forms: dict[str, tuple[str, Callable[[Sequence[float]], float], Callable[[float], str]]] = {
            "psnr_db": ("PSNR", min, decibels),
            "ssim": ("SSIM", min, "{:.4f}".format),
            "lpips": ("LPIPS", max, "{:.4f}".format),
        }
        rows = []
        for name, (title, pick, form) in forms.items():
            value = getattr(self, name)
            curve = self.per_frame.get(name, ())
            known = [math.inf if each is None else each for each in curve]
            if value is not None or (name == "psnr_db" and self.identical):
                worst = pick(known)
                where = "all" if min(known) == max(known) else str(known.index(worst))
                shown = "the same" if value is None else form(value)
                rows.append([title, shown, "the same" if value is None else form(worst), where])
            elif name == "ssim":
                rows.append([title, "frames are too small", "", ""])
        pixels = f"{self.largest_difference} of 255"
        facts = [
            (
                "largest difference",
                "none: the same pixels in every frame" if self.identical else pixels,
            )
        ]
        if self.flicker is not None and self.flicker_change is not None:
            change, second = (EIGHT_BITS * x for x in (self.flicker_change, self.flicker))
            text = f"A {second - change:.3f}, B {second:.3f} of 255 ({round(change, 3) + 0.0:+.3f})"
            facts.append(("flicker", text))
        if self.lpips_missing is not None:
            facts.append(("LPIPS", f"not available: {self.lpips_missing}"))
        size = f"{counted(self.frames, 'frame')} of {self.width}x{self.height} pixels"
        facts.append(("compared", size))
        if self.lossy:
            names = " and ".join(self.lossy)
            why = "part of the difference may be the encoder's; PNG files are exact"
            facts.append(("note", f"{names}: {why}"))
        facts += [] if self.clip is None else self.clip.facts
        return [Table(["", "overall", "worst", "in frame"], rows), Facts(facts)]

    def _frames(self) -> Table:
        names = [name for name in (*FRAME_METRICS, "flicker_dense") if self.per_frame.get(name)]
        titles = {name: metric.title for name, metric in FRAME_METRICS.items()}
        titles |= {"flicker": "flicker of B, of 255", "flicker_dense": "flicker of A, of 255"}
        rows = []
        for frame in range(self.frames):
            row = [str(frame)]
            for name in names:
                value = self.per_frame[name][frame]
                scale = EIGHT_BITS if name.startswith("flicker") else 1.0
                row.append("" if value is None else f"{scale * value:.4g}")
            rows.append(row)
        return Table(["frame", *(titles[n] for n in names)], rows, folded="All frames as a table")

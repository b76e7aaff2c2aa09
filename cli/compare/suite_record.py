"""The result of `chipsparse compare --suite`, to be sent: no prompts, no paths, no names."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from chipsparse.cli.compare.record import PSNR, SPEED
from chipsparse.cli.generate.record import Settings
from chipsparse.cli.views.names import without_folders
from chipsparse.cli.views.sections import (
    FIRST,
    FOURTH,
    SECOND,
    THIRD,
    Alert,
    Chart,
    Clips,
    Count,
    Facts,
    Index,
    Items,
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
from chipsparse.experiments.records import ClipRecord

if TYPE_CHECKING:
    from chipsparse.cli.views.charts import Canvas

FLOOR, OURS = "floor", "chipsparse"  # methods
COLOURS = {OURS: FIRST, "MagCache": SECOND, "SeaCache": THIRD}
METRICS = {"psnr_db": PSNR, "ssim": "SSIM", "lpips": "LPIPS"}
TITLES = {"psnr_db": "PSNR, dB", "ssim": "SSIM", "lpips": "LPIPS"}
FORMS = {"psnr_db": ".2f", "ssim": ".4f", "lpips": ".4f"}
# What serving stacks ask of a clip against dense.
LEAST = {"psnr_db": 20.0, "ssim": 0.82}
MOST = {"lpips": 0.2}
QUIET = 1.25
FAR_DB = 15.0  # a floor that is so far above everything would press it together
PASSED = "\N{CHECK MARK}"
# Fields of a record that are not sent: texts are in the remarks, without folders.
UNSENT: dict[str, Any] = {
    "prompt": "",
    "fallbacks": [],
    "notes": [],
    "facts": {},
    "lpips_missing": None,
}


def passes(clip: ClipRecord) -> bool:
    """Return whether a clip meets every threshold of what was measured."""
    values = {name: value for name in METRICS if (value := getattr(clip, name)) is not None}
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
        refused: why it did not run.
        remarks: what there is to say of it, a sentence each.
        clips: its records, without prompts.
    """

    name: String
    method: String
    setting: String = ""
    refused: String | None = None
    remarks: Sequence[String] = ()
    clips: Sequence[ClipRecord] = ()

    @staticmethod
    def of(
        name: str, method: str, setting: str, refused: str | None, records: Sequence[ClipRecord]
    ) -> Row:
        """Return a row of clips; none of one that was refused."""
        records = [] if refused else records
        notes = [note for record in records for note in (*record.fallbacks, *record.notes)]
        same = sum(record.identical for record in records)
        if 0 < same < len(records):
            notes.append(
                f"{same} of {len(records)} clips are bit for bit as dense; the PSNR is the others'"
            )
        elif same:
            notes.append("every clip is bit for bit as dense")
        return Row(
            name=name,
            method=method,
            setting=setting,
            refused=None if refused is None else without_folders(refused),
            remarks=[without_folders(note) for note in dict.fromkeys(notes)],
            clips=[record.model_copy(update=UNSENT) for record in records],
        )

    @property
    def passed(self) -> int:
        """How many clips pass."""
        return sum(passes(clip) for clip in self.clips)

    @property
    def pass_text(self) -> str:
        """The clips that pass, with a mark where all do."""
        text = f"{self.passed} of {len(self.clips)}"
        return f"{text} {PASSED}" if self.passed == len(self.clips) else text

    def median(self, name: Literal["seconds", "speedup"]) -> float:
        """Return the median of a time over the clips."""
        return statistics.median(getattr(clip, name) for clip in self.clips)

    def quality(self, metric: str) -> Quality | None:
        """Return a metric over the clips; None where one has none, or all are the same as dense."""
        values = [x for clip in self.clips if (x := getattr(clip, metric)) is not None]
        # A PSNR of None is the same clip, which no mean can have in it.
        if not values or (metric != "psnr_db" and len(values) < len(self.clips)):
            return None
        worst: Callable[[Sequence[float]], float] = max if metric in MOST else min
        return Quality(mean=statistics.fmean(values), worst=worst(values))

    @property
    def notes(self) -> list[str]:
        """What there is to say of it, with its name."""
        texts = self.remarks if self.refused is None else [f"did not run: {self.refused}"]
        return [f"{self.name}: {text}" for text in texts]


class Sample(Record):
    """The prompt on which a clip of ours is farthest from dense: its clips by row."""

    seed: Count
    files: Mapping[String, String]


class SuiteResult(Result):
    """Several ways to generate, over the same prompts.

    Attributes:
        asked: how many prompts there are to be.
        seeds: of those that were made.
        texts: of the prompts; None where they are not sent.
        dense_seconds: of the dense clips' denoising loops.
    """

    kind: Literal["suite"] = "suite"
    model: String
    pipeline_class: String
    transformer_class: String
    transformer_config: String = ""
    settings: Settings = Settings()
    flow_shift: Number | None = None
    device: String
    dtype: String
    versions: Mapping[str, String | None] = {}
    lpips_missing: String | None = None
    asked: Index
    seeds: Sequence[Count] = ()
    texts: Sequence[String] | None = None
    dense_seconds: Sequence[Number] = ()
    rows: Sequence[Row] = ()
    sample: Sample | None = None

    @property
    def title(self) -> str:
        """The headline of the page."""
        return f"{self.model}: quality over speed"

    @property
    def restless(self) -> str | None:
        """A warning where dense clips, which all take the same work, took different times."""
        least, most = min(self.dense_seconds), max(self.dense_seconds)
        if most <= QUIET * least:
            return None
        return (
            f"the machine was not quiet: dense clips took {seconds_text(least)} to "
            f"{seconds_text(most)}, so speeds mean little"
        )

    @property
    def shown(self) -> list[Row]:
        """The rows that have clips."""
        return [row for row in self.rows if row.clips]

    def measured(self, metric: str) -> list[tuple[Row, float, float]]:
        """Return rows with their speed-up and the mean of a metric, without the floor."""
        return [
            (row, row.median("speedup"), quality.mean)
            for row in self.shown
            if row.method != FLOOR and (quality := row.quality(metric)) is not None
        ]

    def points(self, name: str) -> list[QualityPoint]:
        """Return the mean of each row over its prompts."""
        return [
            QualityPoint(f"{row.name}, mean of {len(row.clips)}", speedup, psnr_db)
            for row, speedup, psnr_db in self.measured("psnr_db")
        ]

    def sections(self, *, verbose: bool = False) -> list[Section]:
        """Return charts, the table of all rows, frames, notes, and every clip."""
        notes = [note for row in self.rows for note in row.notes]
        sample = self.sample
        clips = Clips(
            {} if sample is None else sample.files,
            beside=True,
            text=""
            if sample is None
            else f"The prompt of seed {sample.seed}, on which chipsparse is farthest from dense. ",
            missing="They are there as soon as a prompt is complete.",
        )
        asked = f"PSNR {LEAST['psnr_db']:g} dB, SSIM {LEAST['ssim']:g}, LPIPS {MOST['lpips']:g}"
        return [
            Section("", self._head()),
            Section(
                "Quality and speed",
                [self._chart(metric) for metric in METRICS],
                "Means over prompts; up and to the right is better, of LPIPS down. No result can "
                "be closer to dense than the floor and mean anything: it is the stock model again, "
                "with another attention kernel. The other dashed line is what serving stacks ask "
                "for.",
                where="page",
                missing="No clip differs from dense yet.",
            ),
            Section(
                "Numbers",
                [self._table()],
                "Median time of the denoising loop, mean (worst) quality. Clips pass with "
                f"{asked} or better, as serving stacks ask; {PASSED} marks rows of which every "
                "clip does. A floor that does not pass says that this model cannot be judged so at "
                "this size.",
            ),
            Section("Frames", [clips], where="page"),
            Section("What there is to say", [Items(notes)]),
            Section(
                "Prompts",
                [self._clips()],
                f"PSNR of every clip against dense; {PASSED} marks those that pass."
                + ("" if self.texts else " Their texts are sent with --with-prompts only."),
                where="page",
            ),
        ]

    def _head(self) -> list[Part]:
        refused = sum(row.refused is not None for row in self.rows)
        alerts: list[Part] = []
        if len(self.seeds) < self.asked:
            alerts.append(Alert(f"{len(self.seeds)} of {self.asked} prompts are made"))
        if self.restless:
            alerts.append(Alert(self.restless))
        if refused:
            text = f"{refused} of {counted(len(self.rows), 'row')} did not run"
            alerts.append(Alert(f"{text}; the same command tries them again"))
        tiles = [
            Tile(
                times(row.median("speedup")),
                row.name,
                f"PSNR {decibels(q.mean if (q := row.quality('psnr_db')) else None)}, "
                f"{row.pass_text} pass",
            )
            for row in self.shown
            if row.method == OURS
        ]
        median = statistics.median(self.dense_seconds)
        missing = "" if self.lpips_missing is None else f"not measured: {self.lpips_missing}"
        rows = [
            ("transformer", f"{self.transformer_class}, {self.pipeline_class}"),
            ("settings", self.settings.text(self.flow_shift)),
            ("prompts", f"{len(self.seeds)}, each row with the same seeds as dense"),
            ("dense", f"{seconds_text(median)} for the denoising loop, median"),
            ("device", f"{self.device}, {self.dtype}"),
            (
                "versions",
                ", ".join(f"{name} {text}" for name, text in self.versions.items() if text),
            ),
            ("LPIPS", missing),
        ]
        return [*alerts, *tiles, Facts(rows)]

    def _table(self) -> Table:
        metrics = [name for name in METRICS if any(row.quality(name) for row in self.shown)]
        rows = []
        for row in self.shown:
            # Another kernel is taken in a roundabout way, whose time says nothing.
            timed = row.method != FLOOR
            speed = times(row.median("speedup")) if timed else ""
            cells = [speed, seconds_text(row.median("seconds")) if timed else ""]
            for name in metrics:
                quality, form = row.quality(name), FORMS[name]
                none = "identical" if name == "psnr_db" else ""
                cells.append(f"{quality.mean:{form}} ({quality.worst:{form}})" if quality else none)
            rows.append([row.name, *cells, row.pass_text])
        columns = ["against dense", "speed-up", "time", *(TITLES[name] for name in metrics), "pass"]
        return Table(columns, rows)

    def _clips(self) -> Table:
        rows = []
        for place, seed in enumerate(self.seeds):
            text = self.texts[place] if self.texts else f"prompt {place + 1}"
            cells = [text, str(seed)]
            for row in self.shown:
                clip = next((clip for clip in row.clips if clip.seed == seed), None)
                mark = f" {PASSED}" if clip is not None and passes(clip) else ""
                cells.append("" if clip is None else decibels(clip.psnr_db) + mark)
            rows.append(cells)
        columns = ["prompt", "seed", *(row.name for row in self.shown)]
        return Table(columns, rows, texts=2, folded=f"All {counted(len(rows), 'prompt')}")

    def _chart(self, metric: str) -> Chart | None:
        """Return a metric over speed, a line for each method; None where nothing has both."""
        rows = self.measured(metric)
        if not rows:
            return None
        floor = next((row.quality(metric) for row in self.shown if row.method == FLOOR), None)
        far = floor is not None and floor.mean - max(mean for _, _, mean in rows) > FAR_DB

        def draw(canvas: Canvas) -> None:
            canvas.plane(SPEED, METRICS[metric])
            for method in dict.fromkeys(row.method for row, _, _ in rows):
                marks = sorted(
                    (speed, mean, f"{row.name}: {times(speed)}, {mean:.4g}")
                    for row, speed, mean in rows
                    if row.method == method
                )
                colour = COLOURS.get(method, FOURTH)
                canvas.axes.plot(*zip(*((x, y) for x, y, _ in marks), strict=True), color=colour)
                canvas.dots(marks, colour, label=method, square=method != OURS, radius=5)
            canvas.level({**LEAST, **MOST}[metric], "asked for")
            if floor is not None and not far:
                canvas.level(floor.mean, "floor")
            canvas.labels([(x, y, row.name.rpartition(" ")[2]) for row, x, y in rows])

        caption = f"{METRICS[metric]}, over speed-up"
        if far and floor is not None:
            caption += f"; the floor, {floor.mean:.2f}, lies far above"
        return Chart(f"{METRICS[metric]} over speed-up", draw, caption, 340)

"""The results of `chipsparse compare`: of ways to generate, and of two files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from chipsparse.cli.compare import ways
from chipsparse.cli.generate.record import Settings
from chipsparse.cli.views import sections as view
from chipsparse.cli.views.frames import white_of
from chipsparse.cli.views.names import files_text, name_of
from chipsparse.cli.views.sections import QualityPoint, Record, Result, Section, String
from chipsparse.cli.views.units import counted, decibels, seconds_text, times
from chipsparse.common.bounded import Count, Index, Number
from chipsparse.experiments.comparison import Bounds
from chipsparse.experiments.records import ClipQuality
from chipsparse.experiments.statistics import Estimate

QUIET = 1.25  # the longest dense time over the shortest
FEW = 10  # prompts, from which intervals are too narrow
FAR_DB = 15.0  # a floor that is so far above everything would press it together


class ShownClip(Record):
    """The clip that shows a comparison: its files, and the factor of its heat-map."""

    files: Sequence[String]
    amplified: Count

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Names and texts below the clip: its files, and what white means in the heat-map."""
        heat = f"difference x{self.amplified}: {white_of(self.amplified)}"
        return [("written", files_text(self.files)), ("heat-map", heat)]


class Comparison(Result):
    """Ways to generate over the same prompts: two configs, or a suite."""

    kind: Literal["comparison"] = "comparison"
    model: String
    pipeline_class: String = ""
    transformer_class: String
    transformer_config: String = ""
    settings: Settings = Settings()
    flow_shift: Number | None = None
    device: String
    dtype: String
    versions: Mapping[str, String | None] = {}
    sharing: String = ""  # how several processes made each clip together; empty for one
    lpips_missing: String | None = None
    asked: Index  # number of prompts
    passed: bool | None = None  # whether all bounds hold; None where none was given
    identical: bool = False  # every clip that bounds would be about is bit for bit as dense
    broken: Sequence[String] = ()  # a sentence for each broken bound of a row
    # The stock model, then the other ways. A suite to send may leave the prompts of clips out.
    rows: Sequence[ways.Row]
    sides: Sequence[String] = ()  # rows that are A and B; none in a suite
    difference: Mapping[str, Estimate] = {}  # B - A, by metric
    seed: Count | None = None  # of the prompt farthest from dense, whose clips are shown
    files: Mapping[String, String] = {}  # clips of a suite, by row
    clip: ShownClip | None = None  # of two configs, side by side

    @property
    def title(self) -> str:
        """Both sides of a pair, or the model of a suite."""
        return ", ".join(self.sides) or f"{self.model}: quality over speed"

    @property
    def shown(self) -> list[ways.Row]:
        """The rows that have clips, but dense."""
        return [row for row in self.rows[1:] if row.clips]

    @property
    def drawn(self) -> list[ways.Row]:
        """The rows of charts: all but dense and the floor."""
        return [row for row in self.shown if row.method != ways.FLOOR]

    def points(self, name: str) -> list[QualityPoint]:
        """Return the mean of each row over its prompts."""
        return [
            QualityPoint(
                f"{row.name}, mean of {len(row.clips)}",
                row.median("speedup"),
                quality.mean,
            )
            for row in self.drawn
            if (quality := row.quality("psnr_db")) is not None
        ]

    def sections(self, *, verbose: bool = False) -> list[Section]:
        """Return the head, charts of quality, tables of clips and intervals, and frames."""
        pair = bool(self.sides)
        rows = self.shown
        dense = self.rows[0]
        intervals: list[view.Part] = [
            ways.intervals_table(row.name, row.summary, folded=not pair) for row in rows
        ]
        if pair:
            zeros = view.Facts([("B - A", ways.zeros_text(self.difference))])
            intervals += [ways.intervals_table("B - A", self.difference, sign=True), zeros]
        groups = {row.name: [clip.per_frame for clip in row.clips] for row in rows}
        numbered = enumerate(dense.clips, start=1)
        prompts = {clip.seed: clip.prompt or f"prompt {number}" for number, clip in numbered}
        unsent = "Their texts are sent with --with-prompts only."
        by_frame = Section(
            "Frame by frame",
            [ways.curves_chart(metric, groups) for metric in ways.FRAME_METRICS],
            "The median over prompts, and the band from the least to the most, against dense. "
            "Flicker is how much a frame differs from the mean of its neighbours.",
            where="page",
            missing="These are images, of one frame each.",
        )
        return [
            Section("", self._head(dense)),
            Section(
                "Quality and speed",
                [self._chart(metric) for metric in ways.QUALITY],
                "Means over prompts with their intervals; up and to the right is better, of LPIPS "
                "down. No difference below the floor means anything: it is the stock model with "
                "another attention kernel."
                if not pair
                else "Small marks are prompts; a large one is their mean, and its cross the "
                "interval.",
                where="page",
                missing="No clip differs from dense yet.",
            ),
            Section(
                "Numbers",
                [
                    ways.numbers_table(rows),
                    view.Facts([(f"bounds of {row.name}", row.bounds_text) for row in rows]),
                ],
                "Median time of the denoising loop, mean (worst clip) of the quality. "
                f"{ways.PASSED} marks rows of which every clip keeps all bounds. A floor that does "
                "not pass says that this model cannot be judged so at this size.",
            ),
            Section("Frames", [self._frames()], where="page"),
            Section(
                "Intervals",
                intervals,
                "Over prompts, with 95% bootstrap intervals; all rows were resampled together.",
                where="both" if pair else "page",
            ),
            *([by_frame] if pair else []),
            Section(
                "What there is to say",
                [view.Items([note for row in self.rows[1:] for note in row.notes])],
            ),
            Section(
                "Prompts",
                [ways.clips_table(rows, prompts)],
                "" if any(clip.prompt for clip in dense.clips) else unsent,
                where="page",
            ),
        ]

    def _head(self, dense: ways.Row) -> list[view.Part]:
        seconds = [clip.seconds for clip in dense.clips]
        count = len(seconds)
        refused = sum(row.refused is not None for row in self.rows)
        alerts = []
        if count < self.asked:
            alerts.append(f"{count} of {self.asked} prompts are made")
        if max(seconds) > QUIET * min(seconds):
            alerts.append(
                f"the machine was not quiet: dense clips took {seconds_text(min(seconds))} to "
                f"{seconds_text(max(seconds))}, so speeds mean little",
            )
        if refused:
            rows = counted(len(self.rows) - 1, "row")
            alerts.append(f"{refused} of {rows} did not run; the same command tries them again")
        if self.sides and count < FEW:
            alerts.append(
                f"intervals from {count} prompts are rough and tend to be too narrow; use more",
            )
        tiles = []
        for row in self.shown:
            if self.sides or row.method == ways.OURS:
                quality = row.quality("psnr_db")
                psnr = decibels(None if quality is None else quality.mean)
                detail = f"PSNR {psnr}, {row.pass_text} pass"
                tiles.append(view.Tile(times(row.median("speedup")), row.name, detail))
        kinds = ", ".join(filter(None, (self.transformer_class, self.pipeline_class)))
        facts = [
            ("model", f"{name_of(self.model)} ({kinds})"),
            ("settings", self.settings.text(self.flow_shift)),
            ("prompts", f"{count}, each row with the same seeds as dense"),
            ("dense", f"{seconds_text(dense.median('seconds'))} for the denoising loop"),
            ("device", f"{self.device}, {self.dtype}"),
            ("processes", self.sharing),
            ("versions", ", ".join(f"{name} {x}" for name, x in self.versions.items() if x)),
            ("LPIPS", f"not measured: {self.lpips_missing}" if self.lpips_missing else ""),
            *([] if self.clip is None else self.clip.facts),
        ]
        return [*map(view.Alert, alerts), *tiles, view.Facts(facts)]

    def _frames(self) -> view.Clips:
        """Return the clips of the prompt that is farthest from dense."""
        farthest = f"The prompt of seed {self.seed} is farthest from dense. "
        if not self.sides:
            missing = "They are there as soon as a prompt is complete."
            return view.Clips(self.files, beside=True, text=farthest, missing=missing)
        names = {} if self.clip is None else {"A, B, and where they differ": self.clip.files[0]}
        missing = "They are there with compare -o worst.mp4."
        return view.Clips(names, side_by_side=True, text=farthest, missing=missing)

    def _chart(self, metric: str) -> view.Chart | None:
        """Return a metric over speed; that of a suite with the floor and the bound."""
        levels: list[tuple[float, str]] = []
        if not self.sides:
            levels = [(ways.QUALITY[metric].bound, "asked for")]
            floors = (row.quality(metric) for row in self.rows if row.method == ways.FLOOR)
            floor = next(floors, None)
            means = [q.mean for row in self.drawn if (q := row.quality(metric)) is not None]
            if floor is not None and means and floor.mean - max(means) <= FAR_DB:
                levels.append((floor.mean, "floor"))
        return ways.quality_chart(self.drawn, metric, levels=levels)


class FilesComparison(Result, ClipQuality):
    """The quality of file B against file A, whose flicker is ``flicker_dense`` in `per_frame`."""

    kind: Literal["files"] = "files"
    a: String
    b: String
    frames: Count
    height: Count
    width: Count
    lossy: Sequence[String] = ()  # files whose format changed the pixels
    lpips_missing: String | None = None
    clip: ShownClip | None = None
    bounds: Mapping[str, Number] = {}  # that were given, by name
    passed: bool | None = None  # whether every frame keeps them; None where none was given
    broken: Sequence[String] = ()  # a sentence for each broken one, which names its worst frame

    @property
    def title(self) -> str:
        """The names of both files."""
        return f"{name_of(self.b)} against {name_of(self.a)}"

    def sections(self, *, verbose: bool = False) -> list[Section]:
        """Return the headline numbers, then quality and flicker by frame."""
        curves = self.per_frame
        flicker = {
            f"{side}: {name_of(file)}": [{"flicker": curves.get(name, ())}]
            for side, file, name in (("A", self.a, "flicker_dense"), ("B", self.b, "flicker"))
        }
        charts = [ways.curves_chart(name, {"B against A": [curves]}) for name in ways.QUALITY]
        tiles = [view.Tile(decibels(self.psnr_db), "PSNR of B against A")]
        for name in ("ssim", "lpips"):
            if (value := getattr(self, name)) is not None:
                tiles.append(view.Tile(ways.QUALITY[name].text(value), ways.QUALITY[name].title))
        return [
            Section("", tiles, where="page"),
            Section("B against A", [self._table(), self._facts()]),
            Section(
                "Frames",
                [view.Clips({"A": self.a, "B": self.b}, reference="A")],
                where="page",
            ),
            Section(
                "Frame by frame",
                [*charts, ways.curves_chart("flicker", flicker), self._frames()],
                "How close each frame of B is to that of A. Flicker is how much a frame differs "
                "from the mean of its neighbours. A gap in a curve of PSNR is a frame that is the "
                "same.",
                where="page",
                missing="These are images, of one frame each.",
            ),
        ]

    def _table(self) -> view.Table:
        rows = []
        for name, metric in ways.QUALITY.items():
            whole = math.inf if name == "psnr_db" and self.identical else getattr(self, name)
            if whole is not None:
                values = [math.inf if x is None else x for x in self.per_frame.get(name, ())]
                worst = metric.worst(values)
                place = "all" if len(set(values)) == 1 else str(values.index(worst))
                texts = [decibels(x) if name == "psnr_db" else f"{x:.4f}" for x in (whole, worst)]
                rows.append([metric.name, *texts, place])
            elif name == "ssim":
                rows.append([metric.name, "frames are too small", "", ""])
        return view.Table(["", "overall", "worst", "in frame"], rows)

    def _facts(self) -> view.Facts:
        same = "none: the same pixels in every frame"
        largest = same if self.identical else f"{self.largest_difference} of 255"
        given = Bounds(**self.bounds).text
        if self.passed:
            given = f"{given}: every frame keeps them"
        compared = f"{counted(self.frames, 'frame')} of {self.width}x{self.height} pixels"
        flicker = ""
        if self.flicker is not None and self.flicker_change is not None:
            change, b = (ways.EIGHT_BITS * x for x in (self.flicker_change, self.flicker))
            flicker = f"A {b - change:.3f}, B {b:.3f} of 255 ({round(change, 3) + 0.0:+.3f})"
        files = " and ".join(self.lossy)
        lossy = "part of the difference may be the encoder's; PNG files are exact"
        return view.Facts(
            [
                ("largest difference", largest),
                ("flicker", flicker),
                ("LPIPS", f"not measured: {self.lpips_missing}" if self.lpips_missing else ""),
                ("compared", compared),
                ("bounds", given),
                ("broken", "; ".join(self.broken)),
                ("note", f"{files}: {lossy}" if self.lossy and not self.identical else ""),
                *([] if self.clip is None else self.clip.facts),
            ],
        )

    def _frames(self) -> view.Table:
        metrics = {
            **ways.QUALITY,
            "flicker": ways.Metric("flicker of B, of 255", ".4g", ways.EIGHT_BITS),
            "flicker_dense": ways.Metric("flicker of A, of 255", ".4g", ways.EIGHT_BITS),
        }
        columns: dict[str, list[str]] = {}
        for name, metric in metrics.items():
            if values := self.per_frame.get(name):
                columns[metric.title] = ["" if x is None else metric.text(x) for x in values]
        rows = [[str(n), *line] for n, line in enumerate(zip(*columns.values(), strict=False))]
        return view.Table(["frame", *columns], rows, folded="All frames as a table")

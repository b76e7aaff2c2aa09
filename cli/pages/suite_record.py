"""The file that `chipsparse compare --suite` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field

from chipsparse.cli.pages.records import (
    Clips,
    Count,
    FileRecord,
    Index,
    Number,
    QualityPoint,
    Record,
    Settings,
    within,
)

FLOOR = "floor"  # as `suite_rows` calls it


class Quality(Record):
    """A metric over the clips of a row."""

    mean: Number
    worst: Number


class Summary(Record):
    """A row over its clips."""

    clips: Index
    passed: Index
    seconds: Number
    speedup: Number
    psnr_db: Quality | None = None
    ssim: Quality | None = None
    lpips: Quality | None = None

    def mean(self, metric: str) -> float | None:
        """Of a metric, if it was measured."""
        found: Quality | None = getattr(self, metric)
        return None if found is None else found.mean


class Clip(Record):
    """One generation of a row; a PSNR of None where it is as dense."""

    seed: Count
    psnr_db: Number | None = None
    passes: bool = False


class Row(Record):
    """One way to generate."""

    name: str
    method: str
    setting: str = ""
    refused: str | None = None
    noted: Sequence[str] = Field(default=(), alias="remarks")
    clips: Sequence[Clip] = ()
    summary: Summary | None = None

    @property
    def notes(self) -> Sequence[str]:
        """What there is to say of it."""
        return self.noted if self.refused is None else [f"did not run: {self.refused}"]

    def clip(self, seed: int) -> Clip | None:
        """Its clip of a prompt."""
        return next((each for each in self.clips if each.seed == seed), None)


class Prompts(Record):
    """How many there are, and which."""

    asked: Index
    made: Index
    seeds: Sequence[Count] = ()
    texts: Sequence[str] = ()


class Thresholds(Record):
    """What serving stacks ask for."""

    psnr_db: Number
    ssim: Number
    lpips: Number


class Suite(FileRecord):
    """Several ways to generate, over the same prompts."""

    kind = "suite"
    marks = frozenset({"mode", "rows", "thresholds"})

    model: str
    pipeline_class: str
    transformer_class: str
    device: str
    dtype: str
    versions: Mapping[str, str | None] = {}
    settings: Settings = Settings()
    flow_shift: Number | None = None
    thresholds: Thresholds
    lpips_missing: str | None = None
    prompts: Prompts
    dense_seconds: Number = within("dense_seconds", "median", ...)
    restless: str | None = None
    rows: Sequence[Row] = ()
    sample_seed: Count | None = within("sample", "seed", None, was="pictured")
    sample_files: Mapping[str, str] = within("sample", "files", {}, was="pictured")

    @property
    def floor(self) -> Row | None:
        """The stock model once more, with another attention kernel."""
        return next((row for row in self.rows if row.method == FLOOR), None)

    def measured(self, metric: str) -> list[tuple[Row, float, float]]:
        """Rows with their speed-up and the mean of a metric, without the floor."""
        return [
            (row, row.summary.speedup, mean)
            for row in self.rows
            if row.method != FLOOR
            and row.summary is not None
            and (mean := row.summary.mean(metric)) is not None
        ]

    @property
    def title(self) -> str:
        """The headline."""
        return f"{self.model}: quality over speed"

    @property
    def clips(self) -> Clips:
        """Every row's clip of one prompt."""
        return Clips(
            self.sample_files,
            beside=True,
            about=f"The prompt of seed {self.sample_seed}, on which chipsparse is farthest from "
            "dense. ",
            missing="They are there as soon as a prompt is complete.",
        )

    def points(self, name: str) -> list[QualityPoint]:
        """For the chart that joins several files: means over prompts."""
        return [
            QualityPoint(f"{row.name}, mean of {row.summary.clips}", speedup, psnr_db)
            for row, speedup, psnr_db in self.measured("psnr_db")
            if row.summary is not None
        ]

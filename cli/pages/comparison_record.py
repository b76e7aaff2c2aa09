"""What `chipsparse compare A B --json` prints, of two configs and of two files."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from chipsparse.cli.compare.paired_runs import SIDES, Side
from chipsparse.cli.compare.statistics import METRICS, Column
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
from chipsparse.cli.views.names import name_of

Which = Literal["median", "mean"]


class Run(Record):
    """One generation against the dense one; a PSNR of None where both are the same."""

    speedup: Number
    psnr_db: Number | None = None
    per_frame: Sequence[dict[str, Number | None]] = ()


class Prompt(Record):
    """A prompt with the generations of both configs."""

    prompt: str
    seed: Count
    dense_seconds: Number
    a: Run = Field(alias="A")
    b: Run = Field(alias="B")


class Estimate(Record):
    """A number with its interval; None where it is not finite."""

    value: Number | None = None
    low: Number | None = None
    high: Number | None = None
    includes_zero: bool = False


class Summary(Record):
    """One metric over all prompts."""

    mean: Estimate
    median: Estimate


class ConfigsComparison(FileRecord):
    """Two configs over several prompts."""

    kind = "comparison"
    marks = frozenset({"mode", "configs", "prompts", "interval"})

    chipsparse: str
    model: str
    transformer_class: str
    device: str
    dtype: str
    settings: Settings = Settings()
    flow_shift: Number | None = None
    name_a: str = within("configs", "A", "name", ...)
    name_b: str = within("configs", "B", "name", ...)
    interrupted: bool = False
    level: Number = within("interval", "level", ...)
    a: Mapping[str, Summary | None] = Field(default={}, alias="A")
    b: Mapping[str, Summary | None] = Field(default={}, alias="B")
    difference: Mapping[str, Summary | None] = Field(default={}, alias="B - A")
    lpips_missing: str | None = None
    clip_files: Sequence[str] = within("clip", "files", (), was="picture")
    notes: Sequence[str] = ()
    prompts: Sequence[Prompt] = ()

    @property
    def names(self) -> dict[Side, str]:
        """Of the configs."""
        return {"A": name_of(self.name_a), "B": name_of(self.name_b)}

    def runs(self, side: Side) -> list[Run]:
        """The generations of a config, one for each prompt."""
        return [prompt.a if side == "A" else prompt.b for prompt in self.prompts]

    def estimate(self, column: Column, metric: str, which: Which) -> Estimate | None:
        """A metric of a config, or of their difference; None where it was not measured."""
        found = {"A": self.a, "B": self.b, "B - A": self.difference}[column].get(metric)
        return None if found is None else found.mean if which == "mean" else found.median

    def interval_text(self, column: Column, metric: str, which: Which) -> str:
        """The same for people."""
        found = self.estimate(column, metric, which)
        if found is None:
            return ""
        value, low, high = (
            METRICS[metric].text(math.inf if each is None else each, sign=column not in SIDES)
            for each in (found.value, found.low, found.high)
        )
        return value if found.low == found.high else f"{value} ({low} to {high})"

    @property
    def differing(self) -> list[Side]:
        """The configs that make other clips than dense."""
        return [s for s in SIDES if any(run.psnr_db is not None for run in self.runs(s))]

    @property
    def dense_seconds(self) -> float | None:
        """The median over prompts."""
        return statistics.median(p.dense_seconds for p in self.prompts) if self.prompts else None

    @property
    def title(self) -> str:
        """The headline."""
        return "A: {A}, B: {B}".format(**self.names)

    @property
    def clips(self) -> Clips:
        """The clip that it wrote."""
        label = "the prompt with the lowest PSNR: A, B, and where each differs from dense"
        return Clips(
            dict(zip([label], self.clip_files, strict=False)),
            joined=True,
            missing="They are there with compare -o worst.mp4.",
        )

    def points(self, name: str) -> list[QualityPoint]:
        """For the chart that joins several files: medians over prompts."""
        found = []
        for side in SIDES:
            runs = self.runs(side)
            psnrs = [run.psnr_db for run in runs if run.psnr_db is not None]
            if psnrs:
                label = f"{self.names[side]}, median of {len(runs)}"
                speedup = statistics.median(run.speedup for run in runs)
                found.append(QualityPoint(label, speedup, statistics.median(psnrs)))
        return found


class FilesComparison(FileRecord):
    """Two files; a PSNR of None where both are the same."""

    kind = "files"
    marks = frozenset({"mode", "a", "b", "per_frame"})

    chipsparse: str
    a: str
    b: str
    frames: Index
    height: Index
    width: Index
    identical: bool = False
    lossy: Sequence[str] = ()
    psnr_db: Number | None = None
    ssim: Number | None = None
    lpips: Number | None = None
    lpips_missing: str = ""
    largest_difference: Number | None = None
    flicker_change: Number | None = None
    per_frame: Sequence[dict[str, Number | None]] = ()

    @property
    def title(self) -> str:
        """The headline."""
        return f"{name_of(self.b)} against {name_of(self.a)}"

    @property
    def clips(self) -> Clips:
        """Both files."""
        return Clips({"A": self.a, "B": self.b}, reference="A")

"""The clips of a suite: generated, compared with dense, and kept as soon as they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from chipsparse.cli.errors import UserError, described, user_errors
from chipsparse.cli.generation.against_dense import keep_frames, quality
from chipsparse.cli.media import write as media
from chipsparse.cli.prompts import Prompt
from chipsparse.cli.suite.rows import DENSE, FLOOR, MAG, Row
from chipsparse.experiments.clips import ClipMaker, Generation, in_turn, patched
from chipsparse.experiments.lpips import Lpips, find_lpips
from chipsparse.pipelines.diffusers_caches import CacheRun, cached, calibrated_ratios
from chipsparse.pipelines.other_attention import other_attention
from chipsparse.pipelines.stacked_caches import transformers_of
from chipsparse.report.generation import GenerationReport
from chipsparse.tuning.results_file import ResultsFile

Notes = Callable[[], Sequence[str]]

CALIBRATION = "MagCache, calibration"
CALIBRATION_SEED = 2**32  # of noise that no clip has
OTHER_LIBRARY = (
    "the model's attention does not go through PyTorch's scaled_dot_product_attention, so no other "
    "kernel could stand in"
)


@dataclass
class SuiteLab:
    """Generates and compares; what is in the results file is not made again.

    What was refused is tried again: memory that was short, or a version, may be another now.

    Attributes:
        generator: has the pipeline, not patched.
        rows: what to compare, the stock model first.
        results: keeps a record of each clip. Frames of dense ones lie in ``dense`` beside it, all
            clips to look at in ``clips``.
    """

    generator: ClipMaker
    rows: Sequence[Row]
    prompts: Sequence[Prompt]
    results: ResultsFile
    suffix: str
    fps: float
    _lpips: Lpips | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.results.forget(lambda record: "refused" in record)

    def refusal(self, row: Row) -> str | None:
        """Why a row cannot run here, as far as that is known."""
        found = [self.record(row, prompt) for prompt in self.prompts]
        if row.method == MAG:
            found.append(self.results.get(CALIBRATION))
        reasons = (record["refused"] for record in found if record and "refused" in record)
        return row.refused or next(reasons, None)

    def record(self, row: Row, prompt: Prompt) -> Any:
        """What was measured of a clip: a dict, or None."""
        return self.results.get(_name(row, prompt))

    def plan(self) -> int:
        """Tells the progress what is left to make; returns how many clips that are."""
        left = [
            (row, prompt)
            for row in self.rows
            if self.refusal(row) is None
            for prompt in self.prompts
            if self.record(row, prompt) is None
        ]
        work = {_name(row, prompt): row.cost for row, prompt in left}
        if CALIBRATION not in self.results and any(row.method == MAG for row, _ in left):
            work[CALIBRATION] = 1.0
        self.generator.progress.plan(work)
        return len(left)

    def dense(self, prompt: Prompt) -> None:
        """Makes the stock model's clip of a prompt, if it is not there."""
        self._kept(_name(self.rows[0], prompt), partial(self._make_dense, prompt))

    def others(self, prompt: Prompt) -> None:
        """Makes the other clips of a prompt, as far as they are not there."""
        others = self.rows[1:]
        if any(row.method == MAG and self.record(row, prompt) is None for row in others):
            self._calibrate()
        for row in in_turn(others, prompt.index):
            if self.refusal(row) is None:
                self._kept(_name(row, prompt), partial(self._compared, row, prompt))

    def clip_file(self, row: Row, prompt: Prompt) -> Path:
        """Where a clip is to look at: one file for each config of ours, as there is a record."""
        called = (row.name if row.config is None else row.key).replace(",", "").replace(" ", "-")
        name = f"{prompt.seed}-{prompt.digest}-{called}{self.suffix}"
        return self.results.path.parent / "clips" / name

    def _kept(self, name: str, make: Callable[[], dict[str, Any]]) -> None:
        if name not in self.results:
            _ = self.generator.pipe  # loaded before the clock of this work starts
            with self.generator.progress.working(name):
                self.results.measured(name, make)

    def _make_dense(self, prompt: Prompt) -> dict[str, Any]:
        made = self._generate(self.rows[0], prompt)
        keep_frames(self._frames_file(prompt), made.frames)
        self._write_clip(self.rows[0], prompt, made.frames)
        return {"seconds": made.denoising_seconds}

    def _frames_file(self, prompt: Prompt) -> Path:
        return self.results.path.parent / "dense" / f"{prompt.seed}-{prompt.digest}.npy"

    def _dense_frames(self, prompt: Prompt) -> np.ndarray:
        file = self._frames_file(prompt)
        if not file.is_file():  # the folder may be deleted at any time
            self._make_dense(prompt)
        frames: np.ndarray = np.load(file)
        return frames

    def _write_clip(self, row: Row, prompt: Prompt, frames: np.ndarray) -> None:
        file = self.clip_file(row, prompt)
        with user_errors(OSError, what=f"{file.parent} could not be made"):
            file.parent.mkdir(exist_ok=True)
        media.write_media({file: frames}, fps=self.fps)

    def _compared(self, row: Row, prompt: Prompt) -> dict[str, Any]:
        dense = self._dense_frames(prompt)
        try:
            with self._applied(row) as (report, found):
                made = self._generate(row, prompt, report)
                notes = [*found(), *([made.nothing_sparse] if made.nothing_sparse else [])]
        except Exception as error:
            # That something cannot run on a model is a result, and hours of others stay.
            return {"refused": described(error)}
        lpips = self._lpips = self._lpips or find_lpips(*dense.shape[1:3])
        self._write_clip(row, prompt, made.frames)
        return {
            "seconds": made.denoising_seconds,
            **quality(dense, made.frames, lpips.measure),
            "lpips_missing": lpips.why_not,
            "work": made.work_share,
            "remarks": notes,
        }

    @contextmanager
    def _applied(self, row: Row) -> Iterator[tuple[GenerationReport | None, Notes]]:
        """The pipeline as a row wants it, for the time being: its report, if it is ours, and
        what there is to say, asked behind the generation.
        """
        if row.config is not None:
            with patched(self.generator.pipe, row.config) as report:
                yield report, lambda: report.fallbacks
        elif row.cache is not None:
            measured = self.results.get(CALIBRATION) if row.method == MAG else None
            ratios = tuple(measured["ratios"]) if measured else ()
            run = CacheRun(self.generator.pipe, self.generator.steps, ratios)
            with cached(run, row.cache) as warnings:
                yield None, lambda: warnings
        else:
            assert row.method == FLOOR
            with other_attention(transformers_of(self.generator.pipe)) as which:
                yield None, lambda: _kernel(which())

    def _calibrate(self) -> None:
        """Measures MagCache's ratios on this model, once."""

        def measure() -> dict[str, Any]:
            steps = self.generator.steps
            prompt = Prompt(0, self.prompts[0].text, CALIBRATION_SEED)
            row = Row(DENSE, "MagCache's calibration")
            make = partial(self._generate, row, prompt, warm=False)
            try:
                return {"ratios": calibrated_ratios(self.generator.pipe, steps, make)}
            except Exception as error:
                return {"refused": described(error)}

        self._kept(CALIBRATION, measure)

    def _generate(
        self, row: Row, prompt: Prompt, report: GenerationReport | None = None, *, warm: bool = True
    ) -> Generation:
        return self.generator.make(
            prompt.text,
            seed=prompt.seed,
            title=f"prompt {prompt.index + 1} of {len(self.prompts)}, {row.name}",
            report=report,
            way=row.name if warm else None,
        )


def _name(row: Row, prompt: Prompt) -> str:
    """What a clip's record is called."""
    return f"{row.key}, seed {prompt.seed}, prompt {prompt.digest}"


def _kernel(text: str | None) -> list[str]:
    if text is None:
        raise UserError(OTHER_LIBRARY)
    return [text]

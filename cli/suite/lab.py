"""The clips of a suite: generated, compared with dense, and kept as soon as they are made."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chipsparse.cli.errors import UserError, described, reason
from chipsparse.cli.generation import denoise
from chipsparse.cli.generation.lpips import Lpips, find_lpips
from chipsparse.cli.generation.patching import patched
from chipsparse.cli.media import write as media
from chipsparse.cli.planning.settings import GenerationSettings
from chipsparse.cli.suite.rows import DENSE, FLOOR, MAG, Row
from chipsparse.cli.work_progress import WorkProgress
from chipsparse.common.finished_files import place
from chipsparse.common.scratch import scratch_folder
from chipsparse.measure.clip_comparison import compare_clips
from chipsparse.pipelines.diffusers_caches import CacheRun, cached, calibrated_ratios
from chipsparse.pipelines.other_attention import other_attention
from chipsparse.pipelines.stacked_caches import transformers_of
from chipsparse.report.generation import GenerationReport
from chipsparse.tuning.results_file import ResultsFile

CALIBRATION = "MagCache, calibration"
CALIBRATION_SEED = 2**32  # of noise that no clip has
OTHER_LIBRARY = (
    "the model's attention does not go through PyTorch's scaled_dot_product_attention, so no other "
    "kernel could stand in"
)


@dataclass(frozen=True)
class Prompt:
    """A prompt with its seed.

    Attributes:
        index: from 0, in the file.
        text: what to show.
        seed: of the noise.
    """

    index: int
    text: str
    seed: int

    @property
    def digest(self) -> str:
        """What files and measurements call it, so that none of them tells it."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class _On:
    """A pipeline that generates as a row says.

    Attributes:
        report: of ours.
        remarks: what there is to say, asked behind the generation.
    """

    report: GenerationReport | None = None
    remarks: Callable[[], Sequence[str]] = tuple


class SuiteLab:
    """Generates and compares; what is in the results file is not made again.

    What was refused is tried again: memory that was short, or a version, may be another now.

    Args:
        load: loads the pipeline; called when something must be generated.
        settings: of the pipeline call.
        negative_prompt: what not to show, or None.
        rows: what to compare, the stock model first.
        prompts: with which.
        results: keeps a record of each clip. Frames of dense ones lie in ``dense`` beside it, all
            clips to look at in ``clips``.
        suffix: of clips.
        fps: of clips.
        progress: told of each.
    """

    def __init__(
        self,
        load: Callable[[], Any],
        settings: GenerationSettings,
        negative_prompt: str | None,
        rows: Sequence[Row],
        prompts: Sequence[Prompt],
        results: ResultsFile,
        *,
        suffix: str,
        fps: int,
        progress: WorkProgress,
    ) -> None:
        self._load, self._settings, self._negative_prompt = load, settings, negative_prompt
        self._rows, self._prompts, self._results = rows, prompts, results
        self._suffix, self._fps, self._progress = suffix, fps, progress
        results.forget(lambda record: "refused" in record)
        self._warm: set[str] = set()
        self._lpips: Lpips | None = None

    @functools.cached_property
    def _pipe(self) -> Any:
        return self._load()

    def refusal(self, row: Row) -> str | None:
        """Why a row cannot run here, as far as that is known."""
        found = [self.record(row, prompt) for prompt in self._prompts]
        if row.method == MAG:
            found.append(self._results.get(CALIBRATION))
        told = (record["refused"] for record in found if record and "refused" in record)
        return row.refused or next(told, None)

    def record(self, row: Row, prompt: Prompt) -> Any:
        """What was measured of a clip: a dict, or None."""
        return self._results.get(_name(row, prompt))

    def plan(self) -> int:
        """Tells the progress what is left to make; returns how many clips that are."""
        left = [
            (row, prompt)
            for row in self._rows
            if self.refusal(row) is None
            for prompt in self._prompts
            if self.record(row, prompt) is None
        ]
        work = {_name(row, prompt): row.cost for row, prompt in left}
        if CALIBRATION not in self._results and any(row.method == MAG for row, _ in left):
            work[CALIBRATION] = 1.0
        self._progress.plan(work)
        return len(left)

    def dense(self, prompt: Prompt) -> None:
        """Makes the stock model's clip of a prompt, if it is not there."""
        self._measured(self._rows[0], prompt, lambda row: self._make_dense(row, prompt))

    def others(self, prompt: Prompt) -> None:
        """Makes the other clips of a prompt, as far as they are not there.

        Which goes first changes from prompt to prompt, so that a machine that slows down or warms
        up favours none.
        """
        others = list(self._rows[1:])
        if any(row.method == MAG and self.record(row, prompt) is None for row in others):
            self._calibrate()
        first = prompt.index % len(others)
        for row in others[first:] + others[:first]:
            if self.refusal(row) is None:
                self._measured(row, prompt, lambda row: self._compared(row, prompt))

    def clip_file(self, row: Row, prompt: Prompt) -> Path:
        """Where a clip is to look at."""
        name = f"{prompt.seed}-{prompt.digest}-{row.name.replace(' ', '-')}{self._suffix}"
        return self._results.path.parent / "clips" / name

    def _measured(self, row: Row, prompt: Prompt, make: Callable[[Row], dict[str, Any]]) -> None:
        self._kept(_name(row, prompt), lambda: make(row))

    def _kept(self, name: str, make: Callable[[], dict[str, Any]]) -> None:
        if name not in self._results:
            _ = self._pipe  # loaded before the clock of this work starts
            with self._progress.working(name):
                self._results.measured(name, make)

    def _make_dense(self, row: Row, prompt: Prompt) -> dict[str, Any]:
        made = self._generate(row, prompt, _On())
        file = self._frames_file(prompt)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with scratch_folder(file.parent) as scratch:
                np.save(scratch / file.name, made.frames)
                place({file: scratch / file.name}, scratch=scratch)
        except OSError as error:
            raise UserError(
                f"the dense frames in {file.parent} could not be written: {reason(error)}"
            ) from error
        self._write_clip(row, prompt, made.frames)
        return {"seconds": made.denoising_seconds}

    def _frames_file(self, prompt: Prompt) -> Path:
        return self._results.path.parent / "dense" / f"{prompt.seed}-{prompt.digest}.npy"

    def _dense_frames(self, prompt: Prompt) -> np.ndarray:
        file = self._frames_file(prompt)
        if not file.is_file():  # the folder may be deleted at any time
            self._make_dense(self._rows[0], prompt)
        frames: np.ndarray = np.load(file)
        return frames

    def _write_clip(self, row: Row, prompt: Prompt, frames: np.ndarray) -> None:
        file = self.clip_file(row, prompt)
        try:
            file.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"{file.parent} could not be made: {reason(error)}") from error
        media.write_media({file: frames}, fps=self._fps)

    def _compared(self, row: Row, prompt: Prompt) -> dict[str, Any]:
        dense = self._dense_frames(prompt)
        try:
            with self._applied(row) as on:
                made = self._generate(row, prompt, on)
                remarks = [*on.remarks(), *([made.nothing_sparse] if made.nothing_sparse else [])]
        except Exception as error:
            # That something cannot run on a model is a result, and hours of others stay.
            return {"refused": described(error)}
        lpips = self._lpips = self._lpips or find_lpips(*dense.shape[1:3])
        found = compare_clips(dense, made.frames, perceptual=lpips.measure)
        self._write_clip(row, prompt, made.frames)
        return {
            "seconds": made.denoising_seconds,
            "psnr_db": None if found.identical else found.psnr_db,
            "ssim": found.ssim,
            "lpips": found.lpips,
            "lpips_missing": lpips.why_not,
            "work": made.work_share,
            "remarks": remarks,
        }

    @contextmanager
    def _applied(self, row: Row) -> Iterator[_On]:
        """The pipeline as a row wants it, for the time being."""
        if row.config is not None:
            with patched(self._pipe, row.config) as report:
                yield _On(report, lambda: report.fallbacks)
        elif row.cache is not None:
            measured = self._results.get(CALIBRATION) if row.method == MAG else None
            ratios = tuple(measured["ratios"]) if measured else ()
            run = CacheRun(self._pipe, self._settings.num_inference_steps, ratios)
            with cached(run, row.cache) as heard:
                yield _On(remarks=lambda: heard)
        else:
            assert row.method == FLOOR
            with other_attention(transformers_of(self._pipe)) as told:
                yield _On(remarks=lambda: _kernel(told()))

    def _calibrate(self) -> None:
        """Measures MagCache's ratios on this model, once."""

        def measure() -> dict[str, Any]:
            steps = self._settings.num_inference_steps
            prompt = Prompt(0, self._prompts[0].text, CALIBRATION_SEED)
            row = Row(DENSE, "MagCache's calibration")
            make = functools.partial(self._generate, row, prompt, _On(), warm=False)
            try:
                return {"ratios": calibrated_ratios(self._pipe, steps, make)}
            except Exception as error:
                return {"refused": described(error)}

        self._kept(CALIBRATION, measure)

    def _generate(
        self, row: Row, prompt: Prompt, on: _On, *, warm: bool = True
    ) -> denoise.Generation:
        arguments = self._settings.pipeline_call(prompt.text, negative_prompt=self._negative_prompt)
        pipe, steps = self._pipe, self._settings.num_inference_steps
        text = f"prompt {prompt.index + 1} of {len(self._prompts)}, {row.name}"
        if warm and row.name not in self._warm:
            with self._progress.stage(f"{text}: warming up"):
                denoise.warm_up(pipe, arguments, seed=prompt.seed, report=lambda: on.report)
        with self._progress.denoising(text, steps, plain_lines=1) as display:
            made = denoise.generate(
                pipe, arguments, seed=prompt.seed, display=display, report=lambda: on.report
            )
        if made.host_bytes == 0:  # else each patching takes and pins host memory anew
            self._warm.add(row.name)
        return made


def _name(row: Row, prompt: Prompt) -> str:
    """What a clip's record is called."""
    return f"{row.key}, seed {prompt.seed}, prompt {prompt.digest}"


def _kernel(told: str | None) -> list[str]:
    if told is None:
        raise UserError(OTHER_LIBRARY)
    return [told]

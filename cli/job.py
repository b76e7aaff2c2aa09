"""The work of `chipsparse generate`, from checked options to written files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import chipsparse
from chipsparse.cli import denoise, media, profile_range, summary
from chipsparse.cli.command_line import command_words
from chipsparse.cli.media import check_kind
from chipsparse.cli.metadata import generation_metadata
from chipsparse.cli.model import (
    ModelDescription,
    load_pipeline,
    quiet_libraries,
)
from chipsparse.cli.panels import Panel, join_panels
from chipsparse.cli.patching import patched
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.report_file import staged_report
from chipsparse.cli.request import (
    check_prompt_is_enough,
    checked,
    choose_profile,
    look_up,
)
from chipsparse.cli.settings import GenerationSettings, Options, resolve_settings
from chipsparse.profiles import GenerationDefaults, Profile
from chipsparse.report import GenerationReport

ReportSource = Callable[[], GenerationReport | None]


@dataclass(frozen=True)
class Job:
    """Everything that is settled before any weight is loaded."""

    options: Options
    device: torch.device
    dtype: torch.dtype
    model: ModelDescription
    profile: Profile | None
    settings: GenerationSettings

    def call_arguments(self) -> dict[str, Any]:
        """What the pipeline is called with, for sparse and dense alike."""
        return self.settings.pipeline_call(
            self.options.prompt, negative_prompt=self.options.negative_prompt
        )

    @property
    def out_of_range(self) -> list[str]:
        """What the profile was not tuned for; nothing where it is not used."""
        if self.profile is None or self.options.dense:
            return []
        return profile_range.out_of_range(
            self.profile, self.model, self.settings, self.device, self.dtype
        )

    def as_json(self) -> dict[str, Any]:
        """The request part of `--json`."""
        return {
            "chipsparse": chipsparse.__version__,
            "mode": self.options.mode,
            "prompt": self.options.prompt,
            "negative_prompt": self.options.negative_prompt,
            "model": self.model.location,
            "pipeline_class": self.model.pipeline_class.__name__,
            "transformer_class": self.model.transformer_class,
            "profile": None if self.profile is None else self.profile.source,
            "out_of_range": self.out_of_range,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "seed": self.options.seed,
            "fps": self.options.fps,
            "settings": dataclasses.asdict(self.settings),
            "command": self.command(),
        }

    def command(self) -> list[str]:
        """The words of the command that does the same again, whatever profile or device is here."""
        settings = self.settings
        settled = {
            "height": settings.height,
            "width": settings.width,
            "frames": settings.num_frames,
            "steps": settings.num_inference_steps,
            "device": self.device,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        if settings.num_frames is None:
            settled["fps"] = None
        return command_words("generate", self.options, settled)


def run(options: Options) -> summary.Outcome:
    """Checks all that is cheap to check, then loads, generates and writes."""
    device, dtype = checked(options)
    with ProgressDisplay() as display, quiet_libraries(debug=options.debug):
        model = look_up(options, display)
        check_prompt_is_enough(model, "generate has nothing but a prompt for it; use it in Python")
        profile = choose_profile(options, model, optional=options.dense)
        defaults = GenerationDefaults() if profile is None else profile.generation
        settings = resolve_settings(options, model, defaults)
        check_kind(options.output, video=model.accepts("num_frames"))
        job = Job(options, device, dtype, model, profile, settings)
        if job.out_of_range:
            assert profile is not None
            display.tell(profile_range.warning(profile, job.out_of_range))
        with display.stage("loading the model"):
            pipe = load_pipeline(model, device=device, dtype=dtype)
        reports: list[GenerationReport] = []
        try:
            dense, sparse = _generate(job, pipe, display, reports)
        except Exception as error:
            _report_failure(job, reports, error)
            raise
        comparison = summary.compare(dense, sparse) if dense and sparse else None
        clips = _clips(options.output, dense, sparse)
        results = {
            "files": {kind: str(path) for kind, (path, _) in clips.items()},
            "denoising_seconds": {
                name: made.denoising_seconds
                for name, made in (("dense", dense), ("sparse", sparse))
                if made is not None
            },
            "comparison": summary.comparison_json(comparison),
        }
        with display.stage(f"writing {options.output}"), _report_file(job, reports, results):
            written = media.write_media(
                dict(clips.values()),
                fps=options.fps,
                crf=options.crf,
                metadata=generation_metadata(job.as_json()),
            )
    files = {kind: written[path] for kind, (path, _) in clips.items()}
    if options.report is not None:
        files["report"] = [options.report]
    return summary.Outcome(
        request=job.as_json(),
        files=files,
        sparse=sparse,
        dense=dense,
        comparison=comparison,
        peak_process_bytes=denoise.peak_process_bytes(),
    )


def _generate(
    job: Job, pipe: Any, display: ProgressDisplay, reports: list[GenerationReport]
) -> tuple[denoise.Generation | None, denoise.Generation | None]:
    """The dense and the sparse generation, whichever the options ask for.

    Adds the report of the sparse one to `reports` before it begins.
    """
    arguments, seed = job.call_arguments(), job.options.seed

    def make(name: str, report: ReportSource) -> denoise.Generation:
        if job.options.compare:
            with display.stage(f"{name} run: warming up"):
                denoise.warm_up(pipe, arguments, seed=seed, report=report)
        with display.denoising(f"{name} run", job.settings.num_inference_steps) as steps:
            return denoise.generate(pipe, arguments, seed=seed, display=steps, report=report)

    dense = sparse = None
    if job.options.mode != "sparse":
        dense = make("dense", lambda: None)
    if job.options.mode != "dense":
        assert job.profile is not None
        with patched(
            pipe,
            job.profile.sparsity,
            strict=job.options.strict,
            layer_times=job.options.report is not None,
        ) as report:
            reports.append(report)
            sparse = make("sparse", lambda: report)
    return dense, sparse


@contextmanager
def _report_file(
    job: Job, reports: list[GenerationReport], results: dict[str, Any]
) -> Iterator[None]:
    """Writes the file of ``--report``, where one is asked for, if what follows succeeds.

    Beside the report it holds the request and, of a run that came to its end, the files, the times
    of the denoising and how far sparse is from dense.
    """
    if job.options.report is None or not reports:
        yield
        return
    content = {"request": job.as_json(), **results, **reports[-1].to_dict()}
    with staged_report(job.options.report, content):
        yield


def _report_failure(job: Job, reports: list[GenerationReport], error: Exception) -> None:
    """Writes what was done until an error, as far as that is possible: the error matters more."""
    if reports and reports[-1].error is None:
        reports[-1].fail(error)
    with suppress(Exception), _report_file(job, reports, {}):
        pass


def _clips(
    output: Path, dense: denoise.Generation | None, sparse: denoise.Generation | None
) -> dict[str, tuple[Path, np.ndarray]]:
    """What is to be written, by kind."""
    made = sparse or dense
    assert made is not None
    clips = {"output": (output, made.frames)}
    if dense is not None and sparse is not None:
        joined = join_panels(
            Panel(made.frames, f"{name} {summary.seconds_text(made.denoising_seconds)}")
            for name, made in (("dense", dense), ("sparse", sparse))
        )
        clips["dense"] = (media.beside(output, "dense"), dense.frames)
        clips["compare"] = (media.beside(output, "compare"), joined)
    return clips

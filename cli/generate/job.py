"""The work of `chipsparse generate`, from checked options to written files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from chipsparse.cli.commands.generate import GenerateOptions
from chipsparse.cli.errors import UserError, described
from chipsparse.cli.generate import summary
from chipsparse.cli.generate.prepared import Job, check_shared, settle
from chipsparse.cli.generate.runner import Runner, work_name
from chipsparse.cli.generate.series import Item
from chipsparse.cli.generate.summary import Outcome
from chipsparse.cli.generation.prompt_length import cut_text
from chipsparse.cli.media import write as media
from chipsparse.cli.media.images import beside, clip_files
from chipsparse.cli.media.metadata import generation_metadata
from chipsparse.cli.media.panels import Panel, join_panels
from chipsparse.cli.media.report_file import staged_report
from chipsparse.cli.model.description import load_pipeline
from chipsparse.cli.model.lora import load_loras
from chipsparse.cli.planning.request import requested
from chipsparse.cli.ranks.joined import Joined
from chipsparse.cli.ranks.meeting import meet
from chipsparse.cli.ranks.several import called
from chipsparse.cli.results import json_values
from chipsparse.cli.wording import seconds_text
from chipsparse.cli.work_progress import WorkProgress
from chipsparse.experiments.clips import ClipMaker, Generation
from chipsparse.report.generation import GenerationReport

WARNING = "chipsparse: warning: "
EMPTY = "the prompt is empty: the result shows whatever the model likes"


def run(options: GenerateOptions, outcomes: list[Outcome], process: Joined) -> None:
    """Checks all that is cheap to check, then loads, generates and writes.

    Args:
        outcomes: gets one of each clip as soon as it is written. In a series, one that fails is
            shown and noted there, and the others are made; a single one raises.
    """
    with requested(options, process) as (model, device, dtype, display):
        job = settle(options, model, device, dtype)
        check_shared(job, process.parallel)
        facts = called(options, job.profile, prompts=[item.prompt for item in options.items])
        process = meet(process, device, facts)
        for warning in job.warnings:
            display.tell(WARNING + warning)
        with opened(job, WorkProgress(display), lambda: load(job), process) as runner:
            runner.generator.progress.plan(_work(options))
            for item in options.items:
                outcomes.append(_outcome(runner, item))


@contextmanager
def opened(
    job: Job, progress: WorkProgress, load_pipe: Callable[[], Any], process: Joined | None = None
) -> Iterator[Runner]:
    """What makes the images or clips of a job."""
    negative = job.options.negative_prompt

    def arguments(prompt: str) -> dict[str, Any]:
        call = job.settings.pipeline_call(prompt, negative_prompt=negative)
        return {**call, **job.image_arguments}

    generator = ClipMaker(load_pipe, arguments, job.steps, progress)
    _ = generator.pipe  # loaded before anything is timed
    with Runner(job, generator, process or Joined()) as runner:
        yield runner


def load(job: Job) -> Any:
    """The pipeline of a job, with its scheduler and LoRAs."""
    pipe = load_pipeline(job.model, device=job.device, dtype=job.dtype, scheduler=job.scheduler)
    load_loras(pipe, job.options.loras)
    return pipe


def _work(options: GenerateOptions) -> dict[str, float]:
    """What is to be made, for the progress; the sparse ones as if they took as long."""
    names = {"dense": ("dense",), "sparse": ("sparse",), "compare": ("dense", "sparse")}
    return {
        work_name(name, item.label): 1.0 for item in options.items for name in names[options.mode]
    }


def _outcome(runner: Runner, item: Item) -> Outcome:
    job, display = runner.job, runner.generator.progress
    warnings = prompt_warnings(runner, item)
    for warning in warnings:
        display.tell(WARNING + (f"{item.label}: " if item.label else "") + warning)
    try:
        return make(runner, item, warnings)
    except Exception as error:
        if not job.options.many or runner.process.ranks > 1:  # the others wait for this one
            raise
        sentence = described(error)
        display.tell(f"chipsparse: error: {item.label}: {sentence}")
        return Outcome(job.as_json(item, warnings), error=sentence)


def prompt_warnings(runner: Runner, item: Item) -> list[str]:
    """What to know of a prompt before anything is made of it, one sentence each."""
    if not item.prompt.strip():
        return [EMPTY]
    job = runner.job
    longest = job.settings.max_sequence_length or job.model.default("max_sequence_length")
    cut = cut_text(runner.generator.pipe, item.prompt, longest)
    return [] if cut is None else [cut]


def make(runner: Runner, item: Item, warnings: list[str]) -> Outcome:
    """Generates and writes one image or clip."""
    job, progress = runner.job, runner.generator.progress
    mode = job.options.mode
    dense = sparse = None
    runner.report = None
    try:
        if mode != "sparse":
            dense = runner.dense(item)
        if mode != "dense":
            sparse = runner.sparse(item)
    except Exception as error:
        _report_failure(job, item, runner.report, error)
        raise
    made = sparse or dense
    assert made is not None
    runner.process.gather_fallbacks(runner.report)
    if not runner.process.writes:
        return Outcome(job.as_json(item, warnings), sparse=sparse, dense=dense)
    # What the steps of the profile tell beforehand is in the job's warnings already.
    if made.nothing_sparse is not None and job.too_few_steps is None:
        warnings = [*warnings, made.nothing_sparse]
        progress.tell(WARNING + made.nothing_sparse)
    comparison = summary.compare(dense, sparse) if dense and sparse else None
    clips = _clips(item.output, dense, sparse)
    results = {
        "files": {
            kind: [str(file) for file in clip_files(path, len(frames))]
            for kind, (path, frames) in clips.items()
        },
        "denoising_seconds": {
            name: each.denoising_seconds
            for name, each in (("dense", dense), ("sparse", sparse))
            if each is not None
        },
        "comparison": json_values(comparison),
    }
    request = job.as_json(item, warnings)
    frames_of, fps = dict(clips.values()), job.options.fps
    metadata = generation_metadata(request)
    with progress.stage(f"writing {item.output}"), ExitStack() as stack:
        try:
            stack.enter_context(
                _report_file(item.report, {"request": request, **results}, runner.report)
            )
        except UserError as error:  # the clips are finished, and not to be lost for a report
            kept = media.keep_elsewhere(frames_of, fps=fps, metadata=metadata)
            raise UserError(f"{error}; {kept}") from error
        written = media.write_media(frames_of, fps=fps, crf=job.options.crf, metadata=metadata)
    files = {kind: written[path] for kind, (path, _) in clips.items()}
    if item.report is not None:
        files["report"] = [item.report]
    return Outcome(request, files, sparse, dense, comparison)


@contextmanager
def _report_file(
    path: Path | None, facts: dict[str, Any], report: GenerationReport | None
) -> Iterator[None]:
    """Writes the file of ``--report``, where one is asked for, if what follows succeeds.

    Beside the report it holds the request and, of a run that came to its end, the files, the times
    of the denoising and how far sparse is from dense.
    """
    if path is None or report is None:
        yield
        return
    with staged_report(path, {**facts, **report.to_dict()}):
        yield


def _report_failure(
    job: Job, item: Item, report: GenerationReport | None, error: Exception
) -> None:
    """Writes what was done until an error, as far as that is possible: the error matters more."""
    if report is not None and report.error is None:
        report.fail(error)
    with suppress(Exception), _report_file(item.report, {"request": job.as_json(item)}, report):
        pass


def _clips(
    output: Path, dense: Generation | None, sparse: Generation | None
) -> dict[str, tuple[Path, np.ndarray]]:
    """What is to be written, by kind."""
    made = sparse or dense
    assert made is not None
    clips = {"output": (output, made.frames)}
    if dense is not None and sparse is not None:
        joined = join_panels(
            Panel(made.frames, f"{name} {seconds_text(made.denoising_seconds)}")
            for name, made in (("dense", dense), ("sparse", sparse))
        )
        clips["dense"] = (beside(output, "dense"), dense.frames)
        clips["compare"] = (beside(output, "compare"), joined)
    return clips

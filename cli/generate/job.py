"""The work of `chipsparse generate`, from checked options to written files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import typer

from chipsparse.cli.errors import EXIT_FAILED, described, reported_errors, user_errors
from chipsparse.cli.generate.record import (
    Comparison,
    GenerationResult,
    LoraRecord,
    RequestRecord,
    Run,
    SeriesResult,
    Settings,
)
from chipsparse.cli.media import write as media
from chipsparse.cli.media.panels import Panel, join_panels
from chipsparse.cli.media.write import generation_metadata
from chipsparse.cli.options import GenerateOptions, command_words
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.prompts import Item, cut_text
from chipsparse.cli.ranks import Rank, called, meet, start_others, this_rank
from chipsparse.cli.request import Request, resolve, working
from chipsparse.cli.views.terminal import print_result
from chipsparse.cli.views.units import seconds_text
from chipsparse.config import ConfigError
from chipsparse.experiments.clips import (
    ClipMaker,
    Generation,
    patched,
    peak_process_bytes,
)
from chipsparse.experiments.quality import compare_clips
from chipsparse.experiments.records import ClipQuality
from chipsparse.report.generation import GenerationReport
from chipsparse.report.record import record_of as report_record

WARNING = "chipsparse: warning: "
EMPTY = "the prompt is empty: the result shows whatever the model likes"


def run(options: GenerateOptions) -> None:
    """Check all that is cheap to check, then load, generate, write and tell.

    In a series, a clip that fails is shown and noted, and the others are made.
    """
    rank = this_rank(options)
    results: list[GenerationResult] = []
    with reported_errors(debug=options.debug, kept=lambda: _kept(results, many=options.many)):
        try:
            with working(options, rank) as (model, device, dtype, display):
                request = resolve(
                    options, model=model, device=device, dtype=dtype, parallel=rank.parallel
                )
                for item in options.items:
                    media.check_kind(item.output, video=request.model.accepts("num_frames"))
                if rank.starts:
                    return start_others("generate", options, rank.ranks)
                facts = called(
                    options, request.profile, prompts=[item.prompt for item in options.items]
                )
                rank = meet(rank, device, facts)
                for warning in request.warnings:
                    display.tell(WARNING + warning)
                with opened(request, display, request.load, rank) as runner:
                    runner.generator.progress.plan(_work(options))
                    for item in options.items:
                        results.append(_result(runner, item))
        finally:  # what was made of a series that is broken off
            if results and rank.writes:
                many = SeriesResult(asked=len(options.items), clips=results)
                told = many if options.many else results[0]
                print_result(told, as_json=options.json, verbose=options.verbose)
        if any(result.error is not None for result in results):
            raise typer.Exit(EXIT_FAILED)


def _kept(results: list[GenerationResult], *, many: bool) -> str:
    """Return what an interruption leaves, in words."""
    written = sum(result.error is None for result in results)
    if not written:
        return "nothing was written"
    if not many:
        return "everything was written"
    return f"{written} of the series {'was' if written == 1 else 'were'} written"


def _work(options: GenerateOptions) -> dict[str, float]:
    """Return what is to be made, for the progress; the sparse ones as if they took as long."""
    names = {"dense": ("dense",), "sparse": ("sparse",), "compare": ("dense", "sparse")}
    return {
        work_name(name, item.label): 1.0 for item in options.items for name in names[options.mode]
    }


def work_name(name: str, label: str) -> str:
    """Return the progress's name of a generation: "dense" and "sparse" are its kinds of work."""
    return f"{name}, {label}"


def record_of(request: Request, item: Item, warnings: Sequence[str] = ()) -> RequestRecord:
    """Return what was asked for, with ``warnings`` about this clip."""
    options = request.generate_options
    return RequestRecord(
        mode=options.mode,
        prompt=item.prompt,
        negative_prompt=options.negative_prompt,
        image=None if options.image is None else str(options.image),
        strength=options.strength,
        model=request.model.location,
        loras=[LoraRecord(file=str(lora.file), scale=lora.scale) for lora in options.loras],
        scheduler=None if options.scheduler is None else type(request.scheduler).__name__,
        flow_shift=options.flow_shift,
        pipeline_class=request.model.pipeline_class.__name__,
        transformer_class=request.model.transformer_class,
        profile=None if request.profile is None else request.profile.source,
        quality=None if request.profile is None else request.profile.quality,
        out_of_range=request.out_of_range,
        warnings=[*request.warnings, *warnings],
        device=str(request.device),
        dtype=str(request.dtype).removeprefix("torch."),
        seed=item.seed,
        fps=options.fps,
        settings=Settings(**dataclasses.asdict(request.settings)),
        command=_command(request, options, item),
    )


def _command(request: Request, options: GenerateOptions, item: Item) -> list[str]:
    """Return the words of the command that makes it again, whatever profile or device is here."""
    settings, device = request.settings, request.device
    resolved = {
        "prompt": item.prompt,
        "prompts": None,
        "num": None,
        "seed": item.seed,
        "output": item.output,
        "report": item.report,
        "height": settings.height,
        "width": settings.width,
        "frames": settings.num_frames,
        "steps": settings.num_inference_steps,
        "device": device.type if (options.gpus or 1) > 1 else device,  # each takes one of them
        "dtype": str(request.dtype).removeprefix("torch."),
    }
    if settings.num_frames is None:
        resolved["fps"] = None
    return command_words("generate", options, resolved)


@contextmanager
def opened(
    request: Request, progress: ProgressDisplay, load: Callable[[], Any], rank: Rank | None = None
) -> Iterator[Runner]:
    """Give what makes the images or clips of a request; the pipeline is restored at the end."""
    negative = request.options.negative_prompt

    def arguments(prompt: str) -> dict[str, Any]:
        call = request.settings.pipeline_call(prompt, negative_prompt=negative)
        return {**call, **request.image_arguments}

    generator = ClipMaker(load, arguments, request.steps, progress)
    _ = generator.pipe  # loaded before anything is timed
    with Runner(request, generator, rank or Rank()) as runner:
        yield runner


@dataclass
class Runner:
    """One loaded pipeline that makes the clips of a series; a context manager.

    Where times are compared, each side is warmed up first, and the pipeline is patched for each
    sparse generation anew, because dense ones run between them.

    Attributes:
        generator: has the pipeline, not patched.
        rank: this process, of those that make the sparse ones together.
        report: of the latest sparse generation, from when it begins.
    """

    request: Request
    generator: ClipMaker
    rank: Rank = Rank()
    report: GenerationReport | None = field(default=None, init=False)
    _held: GenerationReport | None = field(default=None, init=False)
    _stack: ExitStack = field(default_factory=ExitStack, init=False)

    def __enter__(self) -> Runner:
        if self.request.generate_options.mode == "sparse":
            # Held, so that a series takes and pins host memory once.
            self._held = self._stack.enter_context(self._patch())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def dense(self, item: Item) -> Generation:
        """Return a generation of the pipeline as it was."""
        return self._make("dense", item, None)

    def sparse(self, item: Item) -> Generation:
        """Return a patched one."""
        held = self._patch() if self._held is None else nullcontext(self._held)
        with held as report, user_errors(ConfigError):
            before, self.report = report.generation, None
            try:
                return self._make("sparse", item, report)
            finally:
                # One that failed before its first step leaves the report of the one before.
                begun = report.generation != before
                self.report = report if begun else _empty(report)

    def _patch(self) -> AbstractContextManager[GenerationReport]:
        assert self.request.profile is not None
        return patched(
            self.generator.pipe,
            self.request.profile,
            strict=self.request.generate_options.strict,
            layer_times=self.request.generate_options.report is not None,
            parallel=self.rank.parallel,
        )

    def _make(self, name: str, item: Item, report: GenerationReport | None) -> Generation:
        return self.generator.make(
            item.prompt,
            seed=item.seed,
            title=f"{item.label}: {name} run" if item.label else f"{name} run",
            report=report,
            way=name if self.request.generate_options.compare else None,
            work=work_name(name, item.label),
            step_costs=() if report is None else self.request.step_costs,
        )


def _empty(report: GenerationReport) -> GenerationReport:
    """Return the report of a generation of the same pipeline that did not begin."""
    return GenerationReport(
        strict=report.strict,
        layer_times=report.layer_times,
        pipeline=report.pipeline,
        config=report.config,
    )


def _result(runner: Runner, item: Item) -> GenerationResult:
    request, display = runner.request, runner.generator.progress
    warnings = prompt_warnings(runner, item)
    for warning in warnings:
        display.tell(WARNING + (f"{item.label}: " if item.label else "") + warning)
    try:
        return make(runner, item, warnings)[0]
    except Exception as error:
        if not item.label or runner.rank.ranks > 1:  # the others wait for this one
            raise
        sentence = described(error)
        display.tell(f"chipsparse: error: {item.label}: {sentence}")
        return GenerationResult(request=record_of(request, item, warnings), error=sentence)


def prompt_warnings(runner: Runner, item: Item) -> list[str]:
    """Return what to know of a prompt before anything is made of it, one sentence each."""
    if not item.prompt.strip():
        return [EMPTY]
    request = runner.request
    longest = request.settings.max_sequence_length or request.model.default("max_sequence_length")
    cut = cut_text(runner.generator.pipe, item.prompt, longest)
    return [] if cut is None else [cut]


def make(runner: Runner, item: Item, warnings: list[str]) -> tuple[GenerationResult, np.ndarray]:
    """Generate and write one image or clip; return the result and the frames."""
    request, progress = runner.request, runner.generator.progress
    options = request.generate_options
    dense = sparse = None
    runner.report = None
    try:
        if options.mode != "sparse":
            dense = runner.dense(item)
        if options.mode != "dense":
            sparse = runner.sparse(item)
    except Exception as error:
        _report_failure(request, item, runner.report, error)
        raise
    made = sparse or dense
    assert made is not None
    runner.rank.gather_fallbacks(runner.report)
    if not runner.rank.writes:
        return GenerationResult(request=record_of(request, item, warnings)), made.frames
    # What the steps of the profile tell beforehand is in the request's warnings already.
    if made.nothing_sparse is not None and request.too_few_steps is None:
        warnings = [*warnings, made.nothing_sparse]
        progress.tell(WARNING + made.nothing_sparse)
    comparison = None
    if dense is not None and sparse is not None:
        comparison = compared(compare_clips(dense.frames, sparse.frames), dense, sparse)
    clips = _clips(item.output, dense, sparse)
    metadata = generation_metadata(request, item)
    with progress.stage(f"writing {item.output}"):
        frames_of = dict(clips.values())
        written = media.write_media(frames_of, fps=options.fps, crf=options.crf, metadata=metadata)
    files = {kind: [str(file) for file in written[path]] for kind, (path, _) in clips.items()}
    if item.report is not None:
        files["report"] = [str(item.report)]
    result = GenerationResult(
        request=record_of(request, item, warnings),
        files=files,
        sparse=None if sparse is None else Run.model_validate(sparse),
        dense=None if dense is None else Run.model_validate(dense),
        comparison=comparison,
        peak_process_bytes=peak_process_bytes(),
    )
    _write_report(item.report, result, runner.report)
    return result, made.frames


def compared(clip: ClipQuality, dense: Generation, sparse: Generation) -> Comparison:
    """Return how far sparse is from dense, and how much faster."""
    return Comparison(
        speedup=dense.denoising_seconds / sparse.denoising_seconds,
        psnr_db=clip.psnr_db,
        ssim=clip.ssim,
        identical=clip.identical,
    )


def _write_report(
    path: Path | None, result: GenerationResult, report: GenerationReport | None
) -> None:
    """Write the file of ``--report``, if one is asked for: the result with what each step did."""
    if path is None or report is None:
        return
    content = result.model_copy(update={"report": report_record(report)}).to_json()
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    with media.written_whole("--report", path) as file:
        file.write_text(text + "\n", encoding="utf-8")


def _report_failure(
    request: Request, item: Item, report: GenerationReport | None, error: Exception
) -> None:
    """Write what was done until an error, as far as that is possible: the error matters more."""
    if report is not None and report.error is None:
        report.fail(error)
    with suppress(Exception):
        result = GenerationResult(request=record_of(request, item), error=described(error))
        _write_report(item.report, result, report)


def _clips(
    output: Path, dense: Generation | None, sparse: Generation | None
) -> dict[str, tuple[Path, np.ndarray]]:
    """Return what is to be written, by kind."""
    made = sparse or dense
    assert made is not None
    clips = {"output": (output, made.frames)}
    if dense is not None and sparse is not None:
        joined = join_panels(
            Panel(made.frames, f"{name} {seconds_text(made.denoising_seconds)}")
            for name, made in (("dense", dense), ("sparse", sparse))
        )
        clips["dense"] = (media.beside(output, "dense"), dense.frames)
        clips["compare"] = (media.beside(output, "compare"), joined)
    return clips

"""The work of `chipsparse generate`, from checked options to written files."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import math
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import typer

from chipsparse.cli.errors import EXIT_FAILED, described, reported_errors, user_errors
from chipsparse.cli.generate import record
from chipsparse.cli.generate.metadata import generation_metadata
from chipsparse.cli.launching import called, start_others
from chipsparse.cli.media import write as media
from chipsparse.cli.media.formats import check_kind
from chipsparse.cli.media.panels import stack_panels
from chipsparse.cli.model.lora import lora_anywhere
from chipsparse.cli.options import GenerateOptions, Item, command_words
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.ranks import Rank, meet, this_rank
from chipsparse.cli.request import Request, resolve, working
from chipsparse.cli.views.names import bundled_name
from chipsparse.cli.views.terminal import print_result
from chipsparse.cli.views.units import counted, seconds_text
from chipsparse.common import stopping
from chipsparse.common.files import beside, check_inputs_stay
from chipsparse.common.machine import busy_text
from chipsparse.config import ConfigError
from chipsparse.experiments.clips import ClipMaker, Generation, patched, peak_process_bytes
from chipsparse.experiments.quality import compare_clips
from chipsparse.report.generation import GenerationReport

if TYPE_CHECKING:
    from chipsparse.pipelines.call import Pipeline

SHOWN = 80  # letters of what a text encoder does not read
EMPTY = "the prompt is empty: the result shows whatever the model likes"

Way = Literal["dense", "sparse"]


def run(options: GenerateOptions) -> None:
    """Check all that is cheap to check, then load, generate, write and tell.

    In a series, a clip that fails is shown and noted, and the others are made.
    """
    rank = this_rank(options.gpus, options.guidance_parallel)
    results: list[record.GenerationResult] = []

    def tell() -> None:
        if results and rank.writes:
            many = record.SeriesResult(asked=len(options.items), clips=results)
            result = many if options.many else results[0]
            print_result(result, as_json=options.json, verbose=options.verbose)

    with (
        reported_errors(debug=options.debug, kept=lambda: _kept(results, many=options.many)),
        stopping.done_at_least(tell),
    ):
        try:
            with working(options, rank) as (place, display):
                if options.from_ is not None and rank.writes:
                    display.tell(f"repeating {options.from_} as {options.output}")
                request = resolve(options, place)
                video = request.model.accepts("num_frames")
                for item in options.items:
                    frames = request.settings.num_frames
                    check_kind(item.output, video=video, frames=frames)
                single = request.settings.num_frames in (None, 1)
                check_inputs_stay(options.writes(single=single), options.reads())
                if rank.starts:
                    start_others("generate", options, rank.ranks)
                    return
                prompts = [item.prompt for item in options.items]
                rank = meet(rank, place.device, called(options, request.profile, prompts=prompts))
                display.warn(request.warnings)
                with closing(KeptPipeline(rank)) as kept:
                    kept.load(request, display)
                    kept.use(request, display)
                    # Sparse clips as if they took as long as dense ones.
                    pairs = itertools.product(options.items, options.ways)
                    display.plan({f"{way}, {item.name}": 1.0 for item, way in pairs})
                    for item in options.items:
                        results.append(_result(kept, item))
        finally:  # what was made of a series that is broken off
            tell()
        if any(result.error is not None for result in results):
            raise typer.Exit(EXIT_FAILED)


def _kept(results: list[record.GenerationResult], *, many: bool) -> str:
    written = sum(result.error is None for result in results)
    if not written:
        return "nothing was written"
    if not many:
        return "everything was written"
    return f"{written} of the series {'was' if written == 1 else 'were'} written"


def record_of(request: Request, item: Item, warnings: Sequence[str] = ()) -> record.RequestRecord:
    """Return what was asked for, with ``warnings`` about this clip."""
    options = request.generate_options
    return record.RequestRecord(
        mode=options.mode,
        prompt=item.prompt,
        negative_prompt=options.negative_prompt,
        image=None if options.image is None else str(options.image),
        strength=options.strength,
        model=request.model.location,
        loras=[record.LoraRecord(file=str(lora.file), scale=lora.scale) for lora in options.loras],
        scheduler=None if options.scheduler is None else type(request.scheduler).__name__,
        flow_shift=options.flow_shift,
        pipeline_class=request.model.pipeline_class.__name__,
        transformer_class=request.model.transformer_class,
        profile=None if request.profile is None else request.profile.source,
        quality=None if request.profile is None else request.profile.quality,
        out_of_range=request.out_of_range,
        warnings=[*request.warnings, *warnings],
        device=str(request.device),
        dtype=request.dtype_name,
        seed=item.seed,
        fps=options.fps,
        settings=request.settings,
        command=_command(request, options, item),
    )


def _command(request: Request, options: GenerateOptions, item: Item) -> list[str]:
    """Return the words of the command that makes it again, whatever profile or device is here."""
    settings = request.settings
    device = request.device
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
        "dtype": request.dtype_name,
    }
    if settings.num_frames is None:
        resolved["fps"] = None
    return command_words("generate", options, {**resolved, **_named_anywhere(options)})


def _named_anywhere(options: GenerateOptions) -> dict[str, Any]:
    """Return the files that options name by paths that hold in every folder."""
    named: dict[str, Any] = {
        name: str(Path(path).expanduser().absolute())
        for name in ("image", "config", "model")
        if (path := getattr(options, name)) is not None and Path(path).expanduser().exists()
    }
    if options.model is not None and (bundled := bundled_name(options.model)):
        named["model"] = bundled
    if options.lora:
        named["lora"] = [lora_anywhere(text) for text in options.lora]
    return named


class KeptPipeline:
    """Makes clips with the pipeline of the latest request; to be closed, which restores it.

    It stays patched as long as the settings of requests stay, so that a series takes and pins host
    memory once. Where times are compared, each side is warmed up first, and the pipeline is patched
    for each sparse generation anew, because dense ones run between them.
    """

    request: Request
    display: ProgressDisplay

    def __init__(self, rank: Rank | None = None, *, plain_lines: int = 5) -> None:
        self.rank = rank or Rank()
        self._plain_lines = plain_lines
        self.pipe: Any = None
        self.busy: str | None = None  # what else kept the CPU busy before the model was loaded
        # Of the latest sparse generation, as far as it began; of a pipeline that stays patched.
        self.report: GenerationReport | None = None
        self._held: GenerationReport | None = None
        self._patches = ExitStack()
        self._loaded: tuple[object, ...] | None = None  # all that `Request.load` depends on
        self._settings: GenerateOptions | None = None
        self._maker: Any = None  # a `ClipMaker` for these settings

    def load(self, request: Request, display: ProgressDisplay) -> bool:
        """Load the pipeline; return False where it is there already; raise `UserError`."""
        options = request.options
        wanted = (
            request.model.location,
            request.model.pipeline_class,
            options.scheduler,
            options.flow_shift,
            tuple(options.loras),
        )
        if self._loaded == wanted:
            return False
        self.close()
        self.busy = busy_text() if request.device.type == "cpu" else None
        with display.stage("loading the model"):
            self.pipe = request.load()
        self._loaded = wanted
        return True

    def close(self) -> None:
        """Let go of the pipeline and its memory; it may be broken."""
        with suppress(Exception):
            self._restore()
        self.pipe = self._loaded = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def use(self, request: Request, display: ProgressDisplay) -> None:
        """Take up a request; patches stay where only prompt, seed and file differ."""
        self.request = request
        self.display = display
        settings = dataclasses.replace(request.generate_options, prompt="", seed=0, output=Path())
        if self._settings != settings:
            self._restore()
            self._maker = ClipMaker(request.load, request.pipeline_call, request.steps)
            self._maker.pipe = self.pipe
            self._maker.plain_lines = self._plain_lines
            if request.generate_options.mode == "sparse":
                self._held = self._patches.enter_context(self._patch())
            self._settings = settings
        self._maker.progress = display

    def _restore(self) -> None:
        self._settings = self._maker = self._held = None
        self._patches.close()

    def _patch(self) -> AbstractContextManager[GenerationReport]:
        options = self.request.generate_options
        profile = self.request.profile
        assert profile is not None
        timed = options.report is not None
        parallel = self.rank.parallel
        strict = options.strict
        return patched(self.pipe, profile, strict=strict, layer_times=timed, parallel=parallel)

    def generate(self, item: Item, way: Way) -> Generation:
        """Return one generation of the pipeline as it was, or patched; warm where times compare."""
        self.report = None
        if way == "dense":
            return self._make(item, way, None)
        self.rank.first(lambda: None)  # which may still compare and write the clip before
        held = self._patch() if self._held is None else nullcontext(self._held)
        with held as report, user_errors(ConfigError):
            before = report.generation
            try:
                return self._make(item, way, report)
            finally:
                self.report = None if report.generation == before else report

    def _make(self, item: Item, way: Way, report: GenerationReport | None) -> Generation:
        generation: Generation = self._maker.make(
            item.prompt,
            seed=item.seed,
            title=f"{item.label}, {way}" if item.label else way,
            report=report,
            way=way if self.request.generate_options.compare else None,
            work=f"{way}, {item.name}",
            step_costs=() if report is None else self.request.step_costs,
        )
        self.rank.gather_fallbacks(report)
        return generation


def _result(kept: KeptPipeline, item: Item) -> record.GenerationResult:
    request = kept.request
    display = kept.display
    warnings = prompt_warnings(kept, item)
    try:
        return make(kept, item, warnings)[0]
    except Exception as error:
        if not item.label or kept.rank.ranks > 1:  # the others wait for this one
            raise
        sentence = described(error)
        display.tell(f"chipsparse: error: {item.label}: {sentence}")
        return record.GenerationResult(request=record_of(request, item, warnings), error=sentence)


def prompt_warnings(kept: KeptPipeline, item: Item) -> list[str]:
    """Tell and return what to know of a prompt before anything is made of it, in sentences."""
    request = kept.request
    longest = request.settings.max_sequence_length or request.model.default("max_sequence_length")
    cut = cut_text(kept.pipe, item.prompt, longest) if item.prompt.strip() else EMPTY
    warnings = [] if cut is None else [cut]
    kept.display.warn(warnings, label=item.label)
    return warnings


def cut_text(pipe: Pipeline, prompt: str, max_sequence_length: int | None) -> str | None:
    """Return one sentence about what is cut from a prompt; None where all of it is read.

    Of several text encoders the one that reads most counts.
    """
    from transformers import PreTrainedTokenizerBase

    cuts: list[tuple[int, str]] = []
    for tokenizer in pipe.components.values():
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            continue
        # A tokenizer without a limit of its own says a number like 1e30.
        limit = min(tokenizer.model_max_length, max_sequence_length or math.inf)
        words = tokenizer(prompt, add_special_tokens=False, verbose=False).input_ids
        read = limit - tokenizer.num_special_tokens_to_add()
        if len(words) <= read:
            return None
        lost = tokenizer.decode(words[read:], skip_special_tokens=True).strip()
        cuts.append((limit, lost or counted(len(words) - read, "unknown word")))
    if not cuts:
        return None
    limit, lost = max(cuts)
    shown = textwrap.shorten(lost, SHOWN, placeholder=" ...")
    return (
        f'the prompt is longer than the {limit} tokens that the text encoder reads; cut: "{shown}"'
    )


def make(
    kept: KeptPipeline,
    item: Item,
    warnings: list[str],
) -> tuple[record.GenerationResult, np.ndarray]:
    """Generate and write one image or clip; return the result and the frames."""
    request = kept.request
    options = kept.request.generate_options
    runs: dict[Way, Generation] = {}
    try:
        for way in options.ways:
            runs[way] = kept.generate(item, way)
    except Exception as error:
        if kept.report is not None and kept.report.error is None:
            kept.report.fail(error)
        with suppress(Exception):  # the error matters more
            asked = record_of(request, item)
            failed = record.GenerationResult(request=asked, error=described(error))
            _write_report(item.report, failed, kept.report)
        raise
    made = runs[options.ways[-1]]
    if not kept.rank.writes:
        return record.GenerationResult(request=record_of(request, item, warnings)), made.frames
    # What the steps of the profile tell beforehand is in the request's warnings already.
    if made.nothing_sparse is not None and request.too_few_steps is None:
        warnings = [*warnings, made.nothing_sparse]
        kept.display.warn([made.nothing_sparse])
    outputs = {"output": (item.output, made.frames)}
    comparison = None
    if options.compare:
        dense = runs["dense"]
        quality = compare_clips(dense.frames, made.frames)
        speedup = dense.denoising_seconds / made.denoising_seconds
        comparison = record.Comparison(speedup=speedup, **quality.model_dump())
        panels = [
            (run.frames, f"{way} {seconds_text(run.denoising_seconds)}")
            for way, run in runs.items()
        ]
        outputs["dense"] = beside(item.output, "dense"), dense.frames
        outputs["compare"] = beside(item.output, "compare"), stack_panels([panels])
    named = [
        file for path, frames in outputs.values() for file in media.clip_files(path, len(frames))
    ]
    replaced = [str(file) for file in [*named, item.report] if file is not None and file.exists()]
    with kept.display.stage(f"writing {item.output}"):
        facts = generation_metadata(request, item)
        encoding: dict[str, Any] = {"fps": options.fps, "crf": options.crf, "metadata": facts}
        written = media.write_media(dict(outputs.values()), **encoding)
    files = {kind: [str(file) for file in written[path]] for kind, (path, _) in outputs.items()}
    if item.report is not None:
        files["report"] = [str(item.report)]
    records = {}
    for way, run in runs.items():
        count, height, width, _ = run.frames.shape
        size = {"frames": count, "height": height, "width": width}
        records[way] = record.Run.model_validate({**vars(run), **size})
    result = record.GenerationResult(
        request=record_of(request, item, warnings),
        files=files,
        replaced=replaced,
        busy=kept.busy if options.compare else None,
        sparse=records.get("sparse"),
        dense=records.get("dense"),
        comparison=comparison,
        peak_process_bytes=peak_process_bytes(),
    )
    _write_report(item.report, result, kept.report)
    return result, made.frames


def _write_report(
    path: Path | None,
    result: record.GenerationResult,
    report: GenerationReport | None,
) -> None:
    """Write the file of ``--report``, if one is asked for: the result with what each step did."""
    if path is None:
        return
    content = result.to_json()
    if report is not None:
        content["report"] = report.to_dict()
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    media.write_text("--report", path, text + "\n")

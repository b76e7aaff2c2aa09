"""The result of `chipsparse generate`: what was asked for, made, written and measured."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from chipsparse.cli.views import sections as view
from chipsparse.cli.views.names import bundled_name, files_text, profile_text
from chipsparse.cli.views.sections import QualityPoint, Record, Result, Section, String
from chipsparse.cli.views.units import counted, percent, seconds_text, shortened
from chipsparse.common.bounded import Count, Index, Number, Seed
from chipsparse.common.byte_sizes import format_bytes
from chipsparse.experiments.records import StepResult
from chipsparse.profiles.published import ANY_MODEL, published_psnr
from chipsparse.report.generation import GenerationReport

# Of the models that come with chipsparse, which draw nothing else whatever the prompt.
BUNDLED = "bundled, draws simple shapes only"
LETTERS = "D dense, R refresh, S sparse, k skipped"
# Letters of a prompt that are shown: beside other clips, alone, and in a chart's label.
ROW_PROMPT = 60
WHOLE_PROMPT = 200
LABEL_PROMPT = 40


class Settings(Record):
    """The size and length of what is generated, as far as they are known."""

    width: Count | None = None
    height: Count | None = None
    num_frames: Count | None = None
    num_inference_steps: Index | None = None
    guidance_scale: Number | None = None
    true_cfg_scale: Number | None = None
    max_sequence_length: Count | None = None

    @property
    def size(self) -> str:
        """Size and number of frames; empty where they are not known."""
        if self.width is None or self.height is None:
            return ""
        frames = f", {counted(self.num_frames, 'frame')}" if self.num_frames else ""
        return f"{self.width}x{self.height} pixels{frames}"

    def text(self, flow_shift: float | None = None) -> str:
        """Return size, steps, guidance and flow shift in words; None is left out."""
        steps = self.num_inference_steps
        guidance = self.true_cfg_scale or self.guidance_scale
        texts = [
            self.size,
            "" if steps is None else counted(steps, "step"),
            "" if guidance is None else f"guidance {guidance:g}",
            "" if flow_shift is None else f"flow shift {flow_shift:g}",
        ]
        return ", ".join(text for text in texts if text)


class LoraRecord(Record):
    """A LoRA and its strength."""

    file: String
    scale: Number


class RequestRecord(Record):
    """The request of a clip, as far as it decides about the result."""

    mode: Literal["sparse", "dense", "compare"] = "sparse"
    prompt: String = ""
    negative_prompt: String | None = None
    image: String | None = None
    strength: Number | None = None
    model: String = ""
    loras: Sequence[LoraRecord] = ()
    scheduler: String | None = None
    flow_shift: Number | None = None
    pipeline_class: String = ""
    transformer_class: String = ""
    profile: String | None = None
    quality: String | None = None
    out_of_range: Sequence[String] = ()  # what the profile was not tuned for
    warnings: Sequence[String] = ()
    device: String = ""
    dtype: String = ""
    seed: Seed | None = None
    fps: Number | None = None
    settings: Settings = Settings()
    command: Sequence[String] = ()  # that makes the clip again

    @property
    def settings_text(self) -> str:
        """All that was asked for besides the prompt, seed and profile, in words."""
        texts = [
            self.settings.text(self.flow_shift),
            self.scheduler,
            self.image and f"from {self.image}",
            "" if self.strength is None else f"strength {self.strength:g}",
            self.dtype,
            self.device and f"on {self.device}",
        ]
        return ", ".join(text for text in texts if text)


class Run(Record):
    """A generation, dense or sparse, without its frames; see `experiments.clips`."""

    steps: Sequence[StepResult]
    denoising_seconds: Number
    total_seconds: Number
    height: Index
    width: Index
    frames: Index
    peak_gpu_bytes: Count | None = None
    cache_bytes: Count = 0
    host_bytes: Count = 0
    backends: Mapping[str, str] = {}
    backend_reasons: Sequence[String] = ()
    fallbacks: Sequence[String] = ()
    notes: Sequence[String] = ()
    nothing_sparse: String | None = None
    work_share: Number | None = None

    @property
    def letters(self) -> str:
        """The action of each step, of the first branch where branches differ, as a letter."""
        actions = (step.action for step in self.steps)
        return "".join("k" if name.startswith("skip") else name[0].upper() for name in actions)


class Comparison(Record):
    """Sparse against dense, of the same prompt and seed."""

    speedup: Number  # of the denoising loop
    psnr_db: Number | None = None  # of the 8-bit frames before compression; None where identical
    ssim: Number | None = None  # None for frames smaller than its window
    identical: bool = False

    @property
    def quality(self) -> str:
        """PSNR and SSIM against dense, or that both are equal."""
        if self.psnr_db is None:
            return "the same frames as dense"
        ssim = "" if self.ssim is None else f", SSIM {self.ssim:.4f}"
        return f"PSNR {self.psnr_db:.2f} dB{ssim}"


class GenerationResult(Result):
    """One clip or image."""

    kind: Literal["generation"] = "generation"
    request: RequestRecord = RequestRecord()
    files: Mapping[str, Sequence[String]] = {}  # by kind: "output", "dense", "compare", "report"
    replaced: Sequence[String] = ()  # those of them whose names were taken before
    busy: String | None = None  # other work of the CPU on which a speed-up was measured
    sparse: Run | None = None
    dense: Run | None = None
    comparison: Comparison | None = None
    peak_process_bytes: Count | None = None  # largest resident size
    error: String | None = None  # why there is nothing, in one sentence
    report: GenerationReport | None = None  # in the file of ``--report`` only

    @property
    def made(self) -> Run | None:
        """The generation that the file shows, sparse if both were made; None after an error."""
        return self.sparse or self.dense

    @property
    def title(self) -> str:
        """The prompt, which heads the page."""
        return self.request.prompt or "A generation"

    def written_text(self, kind: str) -> str:
        """Return the names of the files of a kind, and whether they replaced earlier ones."""
        files = self.files[kind]
        replaced = set(self.replaced) & set(files)
        return f"{files_text(files)} (replaced)" if replaced else files_text(files)

    def points(self, name: str) -> list[QualityPoint]:
        """Return the speed-up and PSNR of the comparison; empty without, or for equal frames."""
        comparison = self.comparison
        request = self.request
        if comparison is None or comparison.psnr_db is None:
            return []
        seed = "" if request.seed is None else f"seed {request.seed}"
        texts = [name, shortened(request.prompt, LABEL_PROMPT), seed]
        label = ", ".join(text for text in texts if text)
        return [QualityPoint(label, comparison.speedup, comparison.psnr_db)]

    def sections(self, *, verbose: bool = False) -> list[Section]:
        """Return a summary for the terminal; `report_page` has what the page shows."""
        made = self.made
        if made is None:
            return []
        steps = counted(len(made.steps), "step")
        sections = made.steps[-1].section + 1
        steps += f" in {sections} sections" if sections > 1 else ""
        time = f"{seconds_text(made.denoising_seconds)} for {steps}, "
        time += f"{seconds_text(made.total_seconds)} with text and decoding"
        head = [model_fact(self.request.model), ("gain", gain([self])), ("time", time)]
        if self.comparison is not None:
            published = published_text(self.request.model, self.comparison.speedup)
            head.insert(2, ("published", published))
        names = {"output": "written"}
        head += [(names.get(kind, kind), self.written_text(kind)) for kind in self.files]
        if self.busy is not None:
            head.append(("busy", self.busy))
        head.append(("prompt", shortened(self.request.prompt, WHOLE_PROMPT) or "(empty)"))
        head.append(("seed", str(self.request.seed)))
        if self.sparse is not None:
            head.append(("steps", f"{self.sparse.letters}\n{LETTERS}"))
        details = [*self.details, *(internals(made) if verbose else [])]
        parts: list[view.Part | None] = [view.Facts(head), steps_table(made), view.Facts(details)]
        return [Section("", parts, where="terminal")]

    @property
    def made_with(self) -> list[tuple[str, str]]:
        """Names and texts of the settings, the profile and the LoRAs."""
        request = self.request
        rows = [("settings", request.settings_text)]
        if request.mode != "dense" and request.profile is not None:
            rows.append(("profile", profile_text(request.profile, request.quality)))
        return [*rows, *(("LoRA", f"{lora.file} at {lora.scale:g}") for lora in request.loras)]

    @property
    def details(self) -> list[tuple[str, str]]:
        """Names and texts of the settings, the memory and the notes."""
        return [*self.made_with, ("memory", self._memory), *self.notes]

    @property
    def notes(self) -> list[tuple[str, str]]:
        """Names and texts of warnings, fallbacks and notes, one row each."""
        rows = [("warning", sentence) for sentence in self.request.warnings]
        if self.made is not None:
            rows += [("fallback", sentence) for sentence in self.made.fallbacks]
            rows += [("note", sentence) for sentence in self.made.notes]
        return rows

    @property
    def _memory(self) -> str:
        made = self.made
        texts = []
        assert made is not None
        if made.peak_gpu_bytes is not None:
            dense = self.dense if self.sparse is not None else None
            also = f" (dense {format_bytes(dense.peak_gpu_bytes or 0)})" if dense else ""
            texts.append(f"peak {format_bytes(made.peak_gpu_bytes)} on the GPU{also}")
        elif self.peak_process_bytes is not None:
            texts.append(f"peak {format_bytes(self.peak_process_bytes)} of the process")
        if made.cache_bytes:
            away = f" ({format_bytes(made.host_bytes)} in host memory)" if made.host_bytes else ""
            texts.append(f"caches {format_bytes(made.cache_bytes)}{away}")
        return ", ".join(texts)


class SeriesResult(Result):
    """Several clips of one command, in their order; ``asked``: how many there were to be."""

    kind: Literal["series"] = "series"
    asked: Count
    clips: Sequence[GenerationResult]

    @property
    def title(self) -> str:
        """The number of finished clips, of those asked for."""
        return f"{len(self.clips)} of {counted(self.asked, 'clip')}"

    def sections(self, *, verbose: bool = False) -> list[Section]:
        """Return the sums of all clips, then a row for each."""
        finished = [clip for clip in self.clips if clip.error is None]
        failed = len(self.clips) - len(finished)
        count = f"{len(finished)} of {self.asked} made" + (f", {failed} failed" if failed else "")
        prompts = len({clip.request.prompt for clip in self.clips}) > 1
        head = [model_fact(self.clips[0].request.model), ("clips", count)]
        if finished:
            seconds = sum(clip.made.total_seconds for clip in finished if clip.made)
            total = f"{seconds_text(seconds)} for {counted(len(finished), 'clip')}"
            head += [("gain", gain(finished)), ("time", f"{total} with text and decoding")]
        if not prompts:
            prompt = shortened(self.clips[0].request.prompt, WHOLE_PROMPT)
            head.append(("prompt", prompt or "(empty)"))
        rows = finished[0].details if finished else []
        rows += [row for clip in finished[1:] for row in clip.notes]
        if verbose and finished and finished[-1].made:
            rows += internals(finished[-1].made)
        facts = view.Facts([*dict.fromkeys(rows)])
        return [Section("", [view.Facts(head), self._table(prompts=prompts), facts])]

    def _table(self, *, prompts: bool) -> view.Table:
        compared = any(clip.comparison is not None for clip in self.clips)
        columns = ["written", *(["prompt"] if prompts else []), "seed", "time"]
        columns += ["speed-up", "PSNR"] if compared else []
        rows = []
        for clip in self.clips:
            made = None if clip.error is not None else clip.made
            cells = ["failed" if made is None else clip.written_text("output")]
            if prompts:
                cells.append(shortened(clip.request.prompt, ROW_PROMPT) or "(empty)")
            time = "-" if made is None else seconds_text(made.denoising_seconds)
            cells += [str(clip.request.seed), time]
            if (pair := clip.comparison) is not None:
                psnr = "the same" if pair.psnr_db is None else f"{pair.psnr_db:.2f} dB"
                cells += [f"{pair.speedup:.2f}x", psnr]
            rows.append([*cells, *["-"] * (len(columns) - len(cells))])
        return view.Table(columns, rows, texts=2 if prompts else 1)


def published_text(model: str, speedup: float) -> str:
    """Return what to expect of real weights, beside the gain of a bundled model; else nothing."""
    if bundled_name(model) is None or speedup <= 1:
        return ""
    published = published_psnr(ANY_MODEL, speedup)
    return f"large models are harder: on them, step caches reach {published}"


def model_fact(location: str) -> tuple[str, str]:
    """Return the model as a fact."""
    name = bundled_name(location)
    return "model", location if name is None else f"{name}, {BUNDLED}"


def gain(results: Sequence[GenerationResult]) -> str:
    """Return what was gained over dense, of one clip or of all of a series."""
    made = [result.sparse for result in results if result.sparse is not None]
    pairs = [result.comparison for result in results if result.comparison is not None]
    if not made:
        return "none: the unpatched model ran"
    if pairs:
        worst = min(pairs, key=lambda pair: math.inf if pair.psnr_db is None else pair.psnr_db)
        speedups = _range(f"{speedup:.2f}" for speedup in sorted(pair.speedup for pair in pairs))
        if len(pairs) > 1:
            least = "" if worst.psnr_db is None else "at worst "
            return f"{speedups} times as fast as dense; {least}{worst.quality}"
        dense = next(result.dense for result in results if result.comparison is not None)
        seconds = "" if dense is None else f" ({seconds_text(dense.denoising_seconds)})"
        return f"{speedups} times as fast as dense{seconds}, {worst.quality}"
    if all(run.nothing_sparse is not None or run.work_share == 1 for run in made):
        return "none: nothing ran sparse"
    saved = sorted(1 - run.work_share for run in made if run.work_share is not None)
    if not saved:
        return "not known; --compare measures it"
    share = _range(f"{value:.0%}" for value in saved)
    return f"about {share} fewer operations than dense (estimated; --compare measures the speed-up)"


def _range(ascending: Iterable[str]) -> str:
    values = [*ascending]
    return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def steps_table(made: Run) -> view.Table:
    """Return the steps by action, with their mean time and computed shares."""
    by_action: dict[str, list[StepResult]] = defaultdict(list)
    for step in made.steps:
        by_action[step.action].append(step)
    groups = [*by_action.items(), *([("all", [*made.steps])] if len(by_action) > 1 else [])]
    rows = []
    for action, steps in groups:
        attention = statistics.fmean(step.computed(step.attention_kept) for step in steps)
        mlp = statistics.fmean(step.computed(step.mlp_kept) for step in steps)
        seconds = seconds_text(statistics.fmean(step.seconds for step in steps))
        rows.append([action, str(len(steps)), seconds, percent(attention), percent(mlp)])
    return view.Table(["action", "steps", "mean time", "attention computed", "MLP computed"], rows)


def internals(made: Run) -> list[tuple[str, str]]:
    """Return what only ``--verbose`` says: which kernels ran, and why others did not."""
    rows = [("backends", ", ".join(f"{op}: {name}" for op, name in made.backends.items()))]
    return [*rows, *(("passed over", line) for line in made.backend_reasons)]

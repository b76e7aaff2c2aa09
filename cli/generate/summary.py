"""What a finished `generate` tells on a terminal: model, gain, time and file first."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from chipsparse.cli.generation.denoise import Generation, StepResult, peak_process_bytes
from chipsparse.cli.results import NO_JSON, fields_json
from chipsparse.cli.tables import Facts, number_table, print_facts, print_table
from chipsparse.cli.views.units import shortened
from chipsparse.cli.wording import bundled_name, counted, files_text, profile_text, seconds_text
from chipsparse.common.byte_sizes import format_bytes
from chipsparse.experiments.quality import compare_clips

# Of the models that come with chipsparse, which draw nothing else whatever the prompt.
BUNDLED = "bundled, draws simple shapes only"
# Letters of a prompt that are shown: beside other clips, and alone.
ROW_PROMPT, WHOLE_PROMPT = 60, 200
LEAST_PROMPT = 20  # columns of a terminal for it beside other clips
LETTERS = "D dense, R refresh, S sparse, k skipped"


@dataclass(frozen=True)
class Comparison:
    """Sparse against dense, of the same prompt and seed.

    Attributes:
        speedup: dense over sparse time of the denoising loop.
        psnr_db: over the 8-bit frames before compression; infinite where they are the same.
        ssim: likewise; None for frames smaller than its window.
        psnr_per_frame: of each frame alone, in dB; `compare --json` tells it of files.
    """

    speedup: float
    psnr_db: float
    ssim: float | None
    psnr_per_frame: Sequence[float] = field(default=(), metadata=NO_JSON)
    also_in_json: ClassVar = ("identical",)

    @property
    def identical(self) -> bool:
        """Whether the frames are the same."""
        return math.isinf(self.psnr_db)


@dataclass(frozen=True)
class Outcome:
    """What became of one clip.

    Attributes:
        request: prompt, model, profile, device, seed and settings, as JSON values.
        files: what was written, by kind: "output", "dense", "compare", "report".
        peak_process_bytes: largest resident size of the process, if known.
        error: why there is nothing, in one sentence; None where there is.
    """

    request: dict[str, Any] = field(metadata=NO_JSON)
    files: dict[str, list[Path]] = field(default_factory=dict)
    sparse: Generation | None = None
    dense: Generation | None = None
    comparison: Comparison | None = None
    peak_process_bytes: int | None = field(default_factory=peak_process_bytes)
    error: str | None = None

    @property
    def made(self) -> Generation:
        """The generation that was asked for, of a clip without an error."""
        made = self.sparse or self.dense
        assert made is not None
        return made

    def to_json(self) -> dict[str, Any]:
        """The request and what became of it."""
        return {**self.request, **fields_json(self)}


def compare(dense: Generation, sparse: Generation) -> Comparison:
    """Measures the sparse generation against the dense one."""
    compared = compare_clips(dense.frames, sparse.frames)
    return Comparison(
        speedup=dense.denoising_seconds / sparse.denoising_seconds,
        psnr_db=compared.psnr_db,
        ssim=compared.ssim,
        psnr_per_frame=compared.psnr_per_frame,
    )


def print_summary(outcome: Outcome, console: Console, *, verbose: bool) -> None:
    """What became of a single clip."""
    print_facts(console, [*_model_facts(outcome), *_clip_facts(outcome)])
    console.print()
    print_table(console, _steps_table(outcome.made))
    internals = _internals(outcome.made) if verbose else []
    print_facts(console, [*_details(outcome), *internals])


def print_series(outcomes: list[Outcome], console: Console, *, asked: int, verbose: bool) -> None:
    """A table of all clips, with what they have in common above and what went wrong below."""
    finished = [outcome for outcome in outcomes if outcome.error is None]
    failed = len(outcomes) - len(finished)
    clips = f"{len(finished)} of {asked} made" + (f", {failed} failed" if failed else "")
    prompt = outcomes[0].request["prompt"]
    several = any(outcome.request["prompt"] != prompt for outcome in outcomes)
    lead = [*_model_facts(outcomes[0]), ("clips", clips)]
    if finished:
        lead += [("gain", _gain(finished)), ("time", _time_of_all(finished))]
    if not several:
        lead.append(("prompt", _short(prompt, WHOLE_PROMPT)))
    print_facts(console, lead)
    console.print()
    print_table(console, _series_table(outcomes, prompts=several))
    facts: Facts = []
    for number, outcome in enumerate(outcomes):
        if outcome.error is None:
            facts += _details(outcome) if number == 0 else _notes(outcome)
    facts = list(dict.fromkeys(facts))
    if verbose and finished:
        facts += _internals(finished[-1].made)
    print_facts(console, facts)


# What leads.


def _model_facts(outcome: Outcome) -> Facts:
    location = outcome.request["model"]
    name = bundled_name(location)
    return [("model", location if name is None else f"{name}, {BUNDLED}")]


def _clip_facts(outcome: Outcome) -> Facts:
    facts: Facts = [("gain", _gain([outcome])), ("time", _time(outcome.made))]
    names = {"output": "written", "dense": "dense", "compare": "compare", "report": "report"}
    facts += [(names[kind], files_text(files)) for kind, files in outcome.files.items()]
    request = outcome.request
    facts.append(("prompt", _short(request["prompt"], WHOLE_PROMPT)))
    facts.append(("seed", str(request["seed"])))
    if outcome.sparse is not None:
        facts.append(("steps", f"{_letters(outcome.sparse.steps)}\n{LETTERS}"))
    return facts


def _letters(steps: Sequence[StepResult]) -> str:
    """The action of each step, of the first branch where branches differ, as one of `LETTERS`."""
    return "".join(
        "k" if step.action.startswith("skip") else step.action[0].upper() for step in steps
    )


def _gain(outcomes: Sequence[Outcome]) -> str:
    """That of one clip, or of all of a series."""
    made = [outcome.sparse for outcome in outcomes if outcome.sparse is not None]
    if not made:
        return "none: the unpatched model ran"
    if any(outcome.comparison is not None for outcome in outcomes):
        return _measured(outcomes)
    if all(each.nothing_sparse is not None or each.work_share == 1 for each in made):
        return "none: nothing ran sparse"
    saved = sorted(1 - each.work_share for each in made if each.work_share is not None)
    if not saved:
        return "not known; --compare measures it"
    share = _range([f"{each:.0%}" for each in saved])
    return f"about {share} fewer operations than dense (estimated; --compare measures the speed-up)"


def _measured(outcomes: Sequence[Outcome]) -> str:
    found = [outcome.comparison for outcome in outcomes if outcome.comparison is not None]
    worst = min(found, key=lambda each: each.psnr_db)
    if len(found) > 1:
        speedups = [f"{speedup:.2f}" for speedup in sorted(each.speedup for each in found)]
        least = "" if worst.identical else "at worst "
        return f"{_range(speedups)} times as fast as dense; {least}{_quality(worst)}"
    (dense,) = (outcome.dense for outcome in outcomes if outcome.dense is not None)
    seconds = seconds_text(dense.denoising_seconds)
    return f"{worst.speedup:.2f} times as fast as dense ({seconds}), {_quality(worst)}"


def _range(ascending: Sequence[str]) -> str:
    least, most = ascending[0], ascending[-1]
    return least if least == most else f"{least} to {most}"


def _quality(comparison: Comparison) -> str:
    if comparison.identical:
        return "the same frames as dense"
    ssim = "" if comparison.ssim is None else f", SSIM {comparison.ssim:.4f}"
    return f"PSNR {comparison.psnr_db:.2f} dB{ssim}"


def _time(made: Generation) -> str:
    steps, sections = counted(len(made.steps), "step"), made.steps[-1].section + 1
    steps += f" in {sections} sections" if sections > 1 else ""
    return (
        f"{seconds_text(made.denoising_seconds)} for {steps}, "
        f"{seconds_text(made.total_seconds)} with text and decoding"
    )


def _time_of_all(outcomes: Sequence[Outcome]) -> str:
    seconds = sum(outcome.made.total_seconds for outcome in outcomes)
    return f"{seconds_text(seconds)} for {counted(len(outcomes), 'clip')} with text and decoding"


# The steps and the clips.


def _steps_table(made: Generation) -> Table:
    table = number_table("action", "steps", "mean time", "attention computed", "MLP computed")
    by_action: dict[str, list[StepResult]] = defaultdict(list)
    for step in made.steps:
        by_action[step.action].append(step)
    for action, steps in by_action.items():
        table.add_row(*_row(action, steps))
    if len(by_action) > 1:
        table.add_section()
        table.add_row(*_row("all", made.steps), style="dim")
    return table


def _row(action: str, steps: list[StepResult]) -> list[str]:
    return [
        action,
        str(len(steps)),
        seconds_text(sum(step.seconds for step in steps) / len(steps)),
        _percent([_computed(step, step.attention_kept) for step in steps]),
        _percent([_computed(step, step.mlp_kept) for step in steps]),
    ]


def _series_table(outcomes: list[Outcome], *, prompts: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 1), header_style="bold")
    compared = any(outcome.comparison is not None for outcome in outcomes)
    table.add_column("written", overflow="fold")
    for heading in ("seed", "time", *(["speed-up", "PSNR"] if compared else [])):
        table.add_column(heading, no_wrap=True, justify="right")
    if prompts:
        table.add_column("prompt", min_width=LEAST_PROMPT)
    for outcome in outcomes:
        name, time = "failed", "-"
        if outcome.error is None:
            name = files_text(outcome.files["output"])
            time = seconds_text(outcome.made.denoising_seconds)
        cells = [name, str(outcome.request["seed"]), time]
        if compared:
            cells += _compared(outcome.comparison)
        if prompts:
            cells.append(_short(outcome.request["prompt"], ROW_PROMPT))
        table.add_row(*cells)
    return table


def _compared(comparison: Comparison | None) -> list[str]:
    if comparison is None:
        return ["-", "-"]
    return [
        f"{comparison.speedup:.2f}x",
        "the same" if comparison.identical else f"{comparison.psnr_db:.2f} dB",
    ]


def _short(prompt: str, longest: int) -> str:
    return shortened(prompt, longest) or "(empty)"


# What follows.


def _details(outcome: Outcome) -> Facts:
    """How it was made, and all that is worth knowing of it."""
    request = outcome.request
    facts: Facts = [("settings", _settings(request, outcome.made))]
    if outcome.sparse is not None and request["profile"] is not None:
        facts.append(("profile", profile_text(request["profile"], request["quality"])))
    facts += [("LoRA", f"{lora['file']} at {lora['scale']:g}") for lora in request["loras"]]
    facts.append(("memory", _memory(outcome)))
    return [*facts, *_notes(outcome)]


def _notes(outcome: Outcome) -> Facts:
    facts: Facts = [("warning", sentence) for sentence in outcome.request["warnings"]]
    facts += [("fallback", sentence) for sentence in outcome.made.fallbacks]
    facts += [("note", sentence) for sentence in outcome.made.notes]
    return facts


def _settings(request: dict[str, Any], made: Generation) -> str:
    settings = request["settings"]
    count, height, width, _ = made.frames.shape
    parts = [f"{width}x{height} pixels"]
    if settings["num_frames"] is not None:
        parts.append(counted(count, "frame"))
    parts.append(counted(settings["num_inference_steps"], "step"))
    guidance = settings["true_cfg_scale"] or settings["guidance_scale"]
    if guidance is not None:
        parts.append(f"guidance {guidance:g}")
    if request["scheduler"] is not None:
        parts.append(request["scheduler"])
    if request["flow_shift"] is not None:
        parts.append(f"flow shift {request['flow_shift']:g}")
    if request["image"] is not None:
        parts.append(f"from {request['image']}")
    if request["strength"] is not None:
        parts.append(f"strength {request['strength']:g}")
    return ", ".join([*parts, request["dtype"], f"on {request['device']}"])


def _memory(outcome: Outcome) -> str:
    made, parts = outcome.made, []
    if made.peak_gpu_bytes is not None:
        dense = outcome.dense if outcome.sparse is not None else None
        also = f" (dense {format_bytes(dense.peak_gpu_bytes or 0)})" if dense is not None else ""
        parts.append(f"peak {format_bytes(made.peak_gpu_bytes)} on the GPU{also}")
    elif outcome.peak_process_bytes is not None:
        parts.append(f"peak {format_bytes(outcome.peak_process_bytes)} of the process")
    if made.cache_bytes:
        away = f" ({format_bytes(made.host_bytes)} in host memory)" if made.host_bytes else ""
        parts.append(f"caches {format_bytes(made.cache_bytes)}{away}")
    return ", ".join(parts)


def _internals(made: Generation) -> Facts:
    """What only ``--verbose`` tells."""
    facts: Facts = []
    if made.backends:
        facts.append(("backends", ", ".join(f"{op}: {b}" for op, b in made.backends.items())))
    facts += [("passed over", line) for line in made.backend_reasons]
    return facts


def _computed(step: StepResult, kept: float | None) -> float:
    """The share that a step computed: all of it where nothing ran sparse, none when skipped."""
    if step.action == "skip":
        return 0.0
    return 1.0 if kept is None else kept


def _percent(fractions: list[float]) -> str:
    mean = sum(fractions) / len(fractions)
    return f"{mean:.0%}" if mean in (0, 1) else f"{mean:.1%}"

"""What a finished command tells: a short table, or one JSON object."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from chipsparse.byte_sizes import format_bytes
from chipsparse.cli.denoise import Generation, StepResult
from chipsparse.cli.tables import Facts, facts_table, number_table
from chipsparse.clip_comparison import compare_clips


@dataclass(frozen=True)
class Comparison:
    """Sparse against dense, of the same prompt and seed.

    Attributes:
        speedup: dense over sparse time of the denoising loop.
        psnr_db: over the 8-bit frames before compression; infinite where they are the same.
        ssim: likewise; None for frames smaller than its window.
    """

    speedup: float
    psnr_db: float
    ssim: float | None


@dataclass(frozen=True)
class Outcome:
    """All that a `generate` command did.

    Attributes:
        request: prompt, model, profile, device, seed and settings, as JSON values.
        files: what was written, by kind: "output", "dense", "compare", "report".
        sparse: the sparse generation, if any.
        dense: the dense generation, if any.
        comparison: of both, if both were made.
        peak_process_bytes: largest resident size of the process, if known.
    """

    request: dict[str, Any]
    files: dict[str, list[Path]]
    sparse: Generation | None
    dense: Generation | None
    comparison: Comparison | None
    peak_process_bytes: int | None


def compare(dense: Generation, sparse: Generation) -> Comparison:
    """Measures the sparse generation against the dense one."""
    compared = compare_clips(dense.frames, sparse.frames)
    return Comparison(
        speedup=dense.denoising_seconds / sparse.denoising_seconds,
        psnr_db=compared.psnr_db,
        ssim=compared.ssim,
    )


def to_json(outcome: Outcome) -> str:
    """One JSON object."""
    content = {
        **outcome.request,
        "files": {kind: [str(file) for file in files] for kind, files in outcome.files.items()},
        "sparse": _generation_json(outcome.sparse),
        "dense": _generation_json(outcome.dense),
        "comparison": comparison_json(outcome.comparison),
        "peak_process_bytes": outcome.peak_process_bytes,
    }
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)


def comparison_json(comparison: Comparison | None) -> dict[str, Any] | None:
    """A comparison as JSON values; `psnr_db` is null where the videos are the same."""
    if comparison is None:
        return None
    content = dataclasses.asdict(comparison)
    content["identical"] = math.isinf(comparison.psnr_db)
    return content | {"psnr_db": None} if content["identical"] else content


def print_summary(outcome: Outcome, console: Console) -> None:
    """The table at the end of a command."""
    made = outcome.sparse or outcome.dense
    assert made is not None
    console.print(_steps_table(made))
    console.print()
    console.print(facts_table(_facts(outcome, made)), highlight=False, markup=False)


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


def _facts(outcome: Outcome, made: Generation) -> Facts:
    facts = [("denoising", _denoising(outcome, made))]
    if outcome.comparison is not None:
        facts.append(("quality", _quality(outcome.comparison)))
    facts.append(("memory", _memory(outcome, made)))
    if made.backends:
        facts.append(("backends", ", ".join(f"{op}: {b}" for op, b in made.backends.items())))
    facts += [("passed over", line) for line in made.backend_reasons]
    facts += [("error guard", made.guard)] if made.guard else []
    facts += [("fallback", sentence) for sentence in made.fallbacks]
    facts += [("note", sentence) for sentence in made.notes]
    names = {"output": "written", "dense": "dense", "compare": "compare", "report": "report"}
    facts += [(names[kind], files_text(files)) for kind, files in outcome.files.items()]
    return facts


def _denoising(outcome: Outcome, made: Generation) -> str:
    text = f"{seconds_text(made.denoising_seconds)} for {len(made.steps)} steps"
    if outcome.comparison is None or outcome.dense is None:
        return text
    speedup = outcome.comparison.speedup
    dense = seconds_text(outcome.dense.denoising_seconds)
    return f"{text}; dense {dense}; {speedup:.2f} times as fast as dense"


def _quality(comparison: Comparison) -> str:
    if math.isinf(comparison.psnr_db):
        return "the same frames as dense"
    ssim = "" if comparison.ssim is None else f", SSIM {comparison.ssim:.4f}"
    return f"PSNR {comparison.psnr_db:.2f} dB{ssim}, against dense"


def _memory(outcome: Outcome, made: Generation) -> str:
    parts = []
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


def files_text(files: list[Path]) -> str:
    """The names of one clip's files: one, or the first and the last of numbered ones."""
    return str(files[0]) if len(files) == 1 else f"{files[0]} to {files[-1].name}"


def seconds_text(seconds: float) -> str:
    """A duration for people to read."""
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def _computed(step: StepResult, kept: float | None) -> float:
    """The share that a step computed: all of it where nothing ran sparse, none when skipped."""
    if step.action == "skip":
        return 0.0
    return 1.0 if kept is None else kept


def _percent(fractions: list[float]) -> str:
    mean = sum(fractions) / len(fractions)
    return f"{mean:.0%}" if mean in (0, 1) else f"{mean:.1%}"


def _generation_json(made: Generation | None) -> dict[str, Any] | None:
    if made is None:
        return None
    content = {
        field.name: getattr(made, field.name)
        for field in dataclasses.fields(made)
        if field.name not in ("frames", "steps")
    }
    frames, height, width, _ = made.frames.shape
    content |= {"frames": frames, "height": height, "width": width}
    content["steps"] = [dataclasses.asdict(step) for step in made.steps]
    return content

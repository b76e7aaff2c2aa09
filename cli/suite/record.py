"""What a suite found out, as one JSON object that can be sent: no prompts, no paths, no names."""

from __future__ import annotations

import dataclasses
import platform
import statistics
from collections.abc import Collection, Sequence
from typing import Any

import torch

import chipsparse
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.planning.profile_range import device_name
from chipsparse.cli.planning.settings import GenerationSettings
from chipsparse.cli.prompts import Prompt
from chipsparse.cli.suite.lab import SuiteLab
from chipsparse.cli.suite.rows import OURS, Row
from chipsparse.cli.views.names import name_of, without_folders
from chipsparse.cli.wording import seconds_text
from chipsparse.common.machine import package_version
from chipsparse.profiles.tuned_range import digest

# What serving stacks ask of a clip against dense.
LEAST = {"psnr_db": 20.0, "ssim": 0.82}
MOST = {"lpips": 0.2}
METRICS = (*LEAST, *MOST)
QUIET = 1.25
IDENTICAL = float("inf")


def environment(
    model: ModelDescription,
    settings: GenerationSettings,
    flow_shift: float | None,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """What all clips of a suite have in common; none of it says whose machine it was."""
    return {
        "model": name_of(model.location),
        "pipeline_class": model.pipeline_class.__name__,
        "transformer_class": model.transformer_class,
        "transformer_config": digest(model.transformer_config),
        "settings": dataclasses.asdict(settings),
        "flow_shift": flow_shift,
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "versions": {
            "chipsparse": chipsparse.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            **{name: package_version(name) for name in ("diffusers", "transformers", "triton")},
        },
    }


def suite_json(common: dict[str, Any], lab: SuiteLab, *, with_prompts: bool) -> dict[str, Any]:
    """The clips that were made so far, and what they come to.

    Args:
        common: see `environment`.
        with_prompts: whether the texts of the prompts are in it.
    """
    dense, *others = lab.rows
    made = [prompt for prompt in lab.prompts if lab.record(dense, prompt) is not None]
    seconds = {prompt: lab.record(dense, prompt)["seconds"] for prompt in made}
    entries = [_row_json(lab, row, seconds) for row in others]
    sample = _farthest(lab, made)
    return {
        "mode": "suite",
        **common,
        "thresholds": {**LEAST, **MOST},
        "lpips_missing": _lpips_missing(lab, made),
        "prompts": {
            "asked": len(lab.prompts),
            "made": len(made),
            "seeds": [prompt.seed for prompt in made],
            "texts": [prompt.text for prompt in made] if with_prompts else None,
        },
        "dense_seconds": {
            "median": statistics.median(seconds.values()),
            "least": min(seconds.values()),
            "most": max(seconds.values()),
        },
        "restless": restless(seconds.values()),
        "refused": sum(entry["refused"] is not None for entry in entries),
        "rows": entries,
        "sample": None
        if sample is None
        else {
            "seed": sample.seed,
            "files": {
                row.name: f"clips/{lab.clip_file(row, sample).name}"
                for row in lab.rows
                if lab.record(row, sample) and lab.refusal(row) is None
            },
        },
    }


def _lpips_missing(lab: SuiteLab, prompts: Sequence[Prompt]) -> str | None:
    """Why a clip has no LPIPS, without the folder where the weights are looked for."""
    records = [lab.record(row, prompt) for row in lab.rows[1:] for prompt in prompts]
    reasons = (record.get("lpips_missing") for record in records if record is not None)
    missing = next((text for text in reasons if text), None)
    return None if missing is None else without_folders(missing)


def restless(seconds: Collection[float]) -> str | None:
    """What to know where dense clips, which all take the same work, took very different times."""
    least, most = min(seconds), max(seconds)
    if most <= QUIET * least:
        return None
    return (
        f"the machine was not quiet: dense clips took {seconds_text(least)} to "
        f"{seconds_text(most)}, so speeds mean little"
    )


def passes(clip: dict[str, Any]) -> bool:
    """Whether a clip meets every threshold of what was measured; None of PSNR is no difference."""
    values = {name: clip[name] for name in METRICS if clip[name] is not None}
    return all(
        LEAST.get(name, value) <= value <= MOST.get(name, value) for name, value in values.items()
    )


def _row_json(lab: SuiteLab, row: Row, dense_seconds: dict[Prompt, float]) -> dict[str, Any]:
    refused = lab.refusal(row)
    clips, notes = [], []
    for prompt, seconds in dense_seconds.items():
        record = lab.record(row, prompt)
        if refused is None and record is not None:
            notes += record["remarks"]
            clip = {name: record[name] for name in ("seconds", *METRICS, "work")}
            speedup = seconds / record["seconds"]
            clips.append(
                {"seed": prompt.seed, "speedup": speedup, **clip, "passes": passes(record)}
            )
    same = sum(clip["psnr_db"] is None for clip in clips)
    if 0 < same < len(clips):
        notes.append(
            f"{same} of {len(clips)} clips are bit for bit as dense; the PSNR is the others'"
        )
    elif same:
        notes.append("every clip is bit for bit as dense")
    return {
        "name": row.name,
        "method": row.method,
        "setting": row.setting,
        "refused": None if refused is None else without_folders(refused),
        "remarks": [without_folders(text) for text in dict.fromkeys(notes)],
        "clips": clips,
        "summary": _summary(clips) if clips else None,
    }


def _summary(clips: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means and worst values of quality, medians of time; a metric that a clip lacks has none."""
    found: dict[str, Any] = {
        "clips": len(clips),
        "passed": sum(clip["passes"] for clip in clips),
        "seconds": statistics.median(clip["seconds"] for clip in clips),
        "speedup": statistics.median(clip["speedup"] for clip in clips),
    }
    for name in METRICS:
        values = [clip[name] for clip in clips if clip[name] is not None]
        # A PSNR of null is the same clip, which no mean can have in it.
        if name != "psnr_db" and len(values) < len(clips):
            values = []
        worst = max if name in MOST else min
        found[name] = {"mean": statistics.fmean(values), "worst": worst(values)} if values else None
    return found


def _farthest(lab: SuiteLab, prompts: Sequence[Prompt]) -> Prompt | None:
    """The prompt on which one of our clips is farthest from dense, of those that are complete."""
    ours = [row for row in lab.rows if row.method == OURS and lab.refusal(row) is None]
    complete = (
        prompt
        for prompt in prompts
        if all(lab.refusal(row) or lab.record(row, prompt) for row in lab.rows)
    )

    def lowest(prompt: Prompt) -> float:
        psnrs = [lab.record(row, prompt)["psnr_db"] for row in ours]
        return min((psnr for psnr in psnrs if psnr is not None), default=IDENTICAL)

    return min(complete, key=lowest, default=None)

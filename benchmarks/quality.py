"""Quality against dense: keep fractions, delta rules, controls; paired by prompt and seed."""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.clips import Clips, Workload
from benchmarks.contact_sheet import contact_sheet
from benchmarks.controls import (
    cached_output_only,
    in_permuted_order,
    kept_columns_only,
    neurons_chosen_by,
    of_another_block,
    random_columns,
)
from benchmarks.records import Record, environment
from benchmarks.run import Run
from chipsparse.config import SparsityConfig
from chipsparse.measure.quality import psnr, ssim

Control = Callable[[], AbstractContextManager[Any]]
UNSKIPPED: dict[str, Any] = {"schedule.skip_steps": [], "schedule.skip_threshold": None}
KEEP_FRACTIONS = (0.05, 0.1, 0.2, 0.3)
IMAGE_KEEP_FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5)
DRIFT_KEEP_FRACTIONS, DRIFT_STEPS = (0.1, 0.3, 0.5), 50
COLUMNS = {
    "case": "",
    "psnr_median": ".1f",
    "psnr_min": ".1f",
    "ssim_median": ".3f",
    "attention_kept": ".1%",
    "mlp_kept": ".0%",
}


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        config: what is computed.
        control: the context of the generations.
        steps: denoising steps, None for the profile's.
    """

    config: SparsityConfig
    control: Control = nullcontext
    steps: int | None = None


def video_rows(base: SparsityConfig) -> dict[str, Row]:
    """The table of a video model: the profile itself, then with changes and no step skipped."""
    unskipped = base.override(UNSKIPPED)
    alone: dict[str, Any] = {"mlp.enabled": False}

    def row(changes: dict[str, Any], control: Control = nullcontext) -> Row:
        return Row(unskipped.override(changes), control)

    def attention(rule: str, keep: float, **changes: Any) -> dict[str, Any]:
        return {"attention.delta_rule": rule, "attention.density": keep, **changes}

    rows = {"profile": Row(base)}
    for rule in ("merge", "difference"):
        for parts, change in (("attention", alone), ("attention + MLP", {})):
            for keep in KEEP_FRACTIONS:
                rows[f"{rule}, keep {keep:.0%}, {parts}"] = row(attention(rule, keep, **change))
        rows[f"{rule}, keep 10%, attention, residuals in FP8"] = row(
            attention(rule, 0.1, **alone, **{"memory.residuals": "fp8"})
        )
    for keep in KEEP_FRACTIONS:
        rows[f"pooled, keep {keep:.0%}, attention"] = row(attention("pooled", keep, **alone))
        rows[f"control: kept columns only, keep {keep:.0%}, attention"] = row(
            attention("merge", keep, **alone), kept_columns_only
        )
    rows["control: cached output only, attention"] = row(alone, cached_output_only)
    for rule in ("merge", "difference"):
        rows[f"control: random columns, {rule}, keep 10%, attention"] = row(
            attention(rule, 0.1, **alone), random_columns
        )
    tenth = attention("merge", 0.1, **alone)
    rows["control: raster order, merge, keep 10%, attention"] = row({**tenth, "tile": None})
    for queries in (64, 192, 256):
        rows[f"merge, keep 10%, attention, groups of {queries} rows"] = row(
            {**tenth, "attention.block_size_q": queries}
        )
    rows["control: MLP only"] = row({"attention.enabled": False})
    rows["control: token order alone, all layers dense"] = row(
        {"schedule.first_dense_layers": 10_000}
    )
    rows["control: dense again"] = row({"attention.enabled": False, **alone})
    return rows


def image_rows(base: SparsityConfig) -> dict[str, Row]:
    """The table of an image model: neurons alone, columns alone, both; drift; controls."""
    unskipped = base.override(UNSKIPPED)
    columns, neurons = {"mlp.enabled": False}, {"attention.enabled": False}
    parts: dict[str, dict[str, Any]] = {
        "MLP": neurons,
        "attention": columns,
        "attention + MLP": {},
    }

    def row(
        changes: dict[str, Any], control: Control = nullcontext, steps: int | None = None
    ) -> Row:
        return Row(unskipped.override(changes), control, steps)

    def kept(keep: float) -> dict[str, Any]:
        return {"attention.density": keep, "mlp.density": keep}

    reused = {"mlp.density": 0.0}
    rows = {"profile": Row(base)}
    for part, change in parts.items():
        for keep in IMAGE_KEEP_FRACTIONS:
            rows[f"keep {keep:.0%}, {part}"] = row({**kept(keep), **change})
    # After the second step nothing is computed in full any more.
    drift = {
        "schedule.warmup_steps": 2,
        "schedule.refresh_steps": [],
        "schedule.final_dense_steps": 0,
        "schedule.dense_steps": [],
        "schedule.actions": None,
    }
    for part, change in parts.items():
        for keep in DRIFT_KEEP_FRACTIONS:
            rows[f"drift over {DRIFT_STEPS} steps, keep {keep:.0%}, {part}"] = row(
                {**kept(keep), **drift, **change}, steps=DRIFT_STEPS
            )
        rows[f"control: drift over {DRIFT_STEPS} steps, cached output only, {part}"] = row(
            {**reused, **drift, **change}, cached_output_only, steps=DRIFT_STEPS
        )
    for part, change in parts.items():
        rows[f"control: cached output only, {part}"] = row({**reused, **change}, cached_output_only)
    for keep in (0.1, 0.3):
        rows[f"control: neurons of another group, keep {keep:.0%}, MLP"] = row(
            {**kept(keep), **neurons}, partial(neurons_chosen_by, of_another_block)
        )
        rows[f"control: permuted neuron order, keep {keep:.0%}, MLP"] = row(
            {**kept(keep), **neurons}, partial(neurons_chosen_by, in_permuted_order)
        )
        rows[f"control: random columns, keep {keep:.0%}, attention"] = row(
            {**kept(keep), **columns}, random_columns
        )
        rows[f"control: kept columns only, keep {keep:.0%}, attention"] = row(
            {**kept(keep), **columns}, kept_columns_only
        )
        rows[f"control: raster order, keep {keep:.0%}, attention + MLP"] = row(
            {**kept(keep), "tile": None}
        )
    rows["control: token order alone, all layers dense"] = row(
        {"schedule.first_dense_layers": 10_000}
    )
    rows["control: dense again"] = row({**columns, **neurons})
    return rows


def rows_for(workload: Workload) -> dict[str, Row]:
    """The table of the workload's model."""
    base = workload.profile.sparsity
    return image_rows(base) if workload.makes_images else video_rows(base)


def measure(workload: Workload, dense: Clips, name: str, row: Row) -> Record:
    """Generates one row and compares it with the dense clips of as many steps."""
    with row.control():
        clips = workload.generate(row.config, **_changes(row))
    assert clips.report is not None
    pairs = list(zip(dense.frames, clips.frames, strict=True))
    psnrs = [psnr(a, b) for a, b in pairs]
    ssims = [ssim(a, b) for a, b in pairs]
    sparse = [record for record in clips.report.steps if record.action == "sparse"]
    attention = [r.attention_kept for r in sparse if r.attention_kept is not None]
    mlp = [r.mlp_kept for r in sparse if r.mlp_kept is not None]
    return {
        "op": "quality",
        "case": name,
        "psnr_median": statistics.median(psnrs),
        "psnr_mean": statistics.mean(psnrs),
        "psnr_min": min(psnrs),
        "psnr": psnrs,
        "ssim_median": statistics.median(ssims),
        "ssim_mean": statistics.mean(ssims),
        "ssim": ssims,
        "attention_kept": statistics.mean(attention) if attention else None,
        "mlp_kept": statistics.mean(mlp) if mlp else None,
        "steps": clips.report.steps[-1].steps_total,
        "actions": dict(clips.report.actions()),
        "fallbacks": list(clips.report.fallbacks),
        "prompts": len(pairs),
        **environment(workload.device),
    }


def run(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds a record for each case whose name contains ``args.case``, and draws the dense clips."""
    with to.attempt("quality"):
        workload = Workload.of(args, device, dtype)
        dense: dict[int | None, Clips] = {None: workload.generate(None)}
        for name, row in rows_for(workload).items():
            if args.case is not None and args.case not in name:
                continue
            if row.steps not in dense:
                dense[row.steps] = workload.generate(None, **_changes(row))
            record = measure(workload, dense[row.steps], name, row)
            to.add(record)
            text = f"{record['psnr_median']:6.2f} dB  {record['ssim_median']:.4f}"
            print(f"{name:60s} {text}", flush=True)
        if args.sheet is not None:
            contact_sheet(dense[None].frames).save(args.sheet)


def _changes(row: Row) -> dict[str, Any]:
    return {} if row.steps is None else {"num_inference_steps": row.steps}

"""Quality against dense: keep fractions, delta rules, controls; paired by prompt and seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.clips import Clips, Workload
from benchmarks.records import Record, environment
from chipsparse.config import SparsityConfig
from chipsparse.quality import psnr, ssim

KEEP_FRACTIONS = (0.05, 0.1, 0.2, 0.3)
COLUMNS = {
    "case": "",
    "psnr_median": ".1f",
    "psnr_min": ".1f",
    "ssim_median": ".3f",
    "attention_kept": ".1%",
    "mlp_kept": ".0%",
}


def cases(base: SparsityConfig) -> dict[str, SparsityConfig]:
    """The profile itself, and every row of the table: the profile with changes, no step skipped."""
    attention = {"mlp.enabled": False}
    rows: dict[str, dict[str, Any]] = {}
    for rule in ("merge", "difference"):
        for parts, change in (("attention", attention), ("attention + MLP", {})):
            for keep in KEEP_FRACTIONS:
                rows[f"{rule}, keep {keep:.0%}, {parts}"] = {
                    "attention.delta_rule": rule,
                    "attention.keep_fraction": keep,
                    **change,
                }
    for keep in KEEP_FRACTIONS:
        rows[f"control: kept columns only, keep {keep:.0%}, attention"] = {
            "attention.delta_rule": "kept_only",
            "attention.keep_fraction": keep,
            **attention,
        }
    rows["control: cached output only, attention"] = {
        "attention.delta_rule": "reuse",
        **attention,
    }
    for rule in ("merge", "difference"):
        rows[f"control: random columns, {rule}, keep 10%, attention"] = {
            "attention.delta_rule": rule,
            "attention.selection": "random",
            "attention.keep_fraction": 0.1,
            **attention,
        }
    rows["control: raster order, merge, keep 10%, attention"] = {
        "attention.keep_fraction": 0.1,
        "attention.delta_rule": "merge",
        "token_order.voxel": None,
        **attention,
    }
    for group_rows in (64, 192, 256):
        rows[f"merge, keep 10%, attention, groups of {group_rows} rows"] = {
            "attention.delta_rule": "merge",
            "attention.keep_fraction": 0.1,
            "attention.group_rows": group_rows,
            **attention,
        }
    rows["control: MLP only"] = {"attention.enabled": False}
    rows["control: token order alone, all layers dense"] = {"schedule.first_dense_layers": 10_000}
    rows["control: dense again"] = {"attention.enabled": False, **attention}
    unskipped = base.override({"schedule.skip_steps": []})
    return {"profile": base} | {name: unskipped.override(row) for name, row in rows.items()}


def measure(workload: Workload, dense: Clips, name: str, config: SparsityConfig) -> Record:
    """Generates with one config and compares it with the dense clips."""
    clips = workload.generate(config)
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
        "actions": dict(clips.report.actions()),
        "prompts": len(pairs),
        **environment(workload.device),
    }


def run(
    workload: Workload, *, only: str | None = None, save: Callable[[list[Record]], None]
) -> tuple[list[Record], Clips]:
    """All cases whose name contains ``only``; returns the records and the dense clips.

    ``save`` gets all records so far after each case: a run cut short keeps what it measured.
    """
    dense = workload.generate(None)
    records: list[Record] = []
    for name, config in cases(workload.profile.sparsity).items():
        if only is None or only in name:
            records.append(measure(workload, dense, name, config))
            save(records)
            last = records[-1]
            print(
                f"{name:60s} {last['psnr_median']:6.2f} dB  {last['ssim_median']:.4f}", flush=True
            )
    return records, dense

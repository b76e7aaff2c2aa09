"""What `chipsparse tune` tells at its end: a short table, or one JSON object."""

from __future__ import annotations

import dataclasses
import json

from rich.console import Console

from chipsparse.cache_kinds import PARTS
from chipsparse.cli.layer_budgets import layer_groups
from chipsparse.cli.summary import seconds_text
from chipsparse.cli.tables import Facts, facts_table
from chipsparse.cli.tune_job import Tuned
from chipsparse.plan import SparsityPlan


def print_summary(tuned: Tuned, console: Console) -> None:
    """The table."""
    console.print(facts_table(_facts(tuned)), highlight=False, markup=False)


def to_json(tuned: Tuned) -> str:
    """One JSON object."""
    content = {
        "profile": str(tuned.profile),
        "results": str(tuned.results),
        "tuned": dataclasses.asdict(tuned.tuned),
        "predicted": {"psnr_db": tuned.predicted.psnr_db, "seconds": tuned.predicted.seconds},
        "configs_tried": tuned.tried,
        "sparsity": dataclasses.asdict(tuned.config),
    }
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)


def _facts(tuned: Tuned) -> Facts:
    measured = tuned.tuned.measured
    speedup = measured.dense_seconds / measured.seconds if measured.seconds else 0.0
    facts = [("profile", str(tuned.profile)), ("quality", _quality(tuned))]
    facts += [
        (
            "time",
            f"{seconds_text(measured.seconds)}, dense {seconds_text(measured.dense_seconds)}: "
            f"{speedup:.2f} times as fast",
        ),
        ("steps", tuned.plan.describe()),
        *_budgets(tuned.plan),
        ("verified", f"{tuned.tried} configs on {measured.prompts} held-out prompts"),
        ("measurements", str(tuned.results)),
    ]
    return facts


def _quality(tuned: Tuned) -> str:
    measured = tuned.tuned.measured
    if measured.psnr_db_worst is None or measured.psnr_db_median is None:
        return "the same pictures as dense"
    text = f"PSNR {measured.psnr_db_worst:.1f} dB at worst, median {measured.psnr_db_median:.1f}"
    if measured.ssim_worst is not None:
        text += f"; SSIM {measured.ssim_worst:.3f} at worst"
    if measured.lpips_worst is not None:
        text += f"; LPIPS {measured.lpips_worst:.3f} at worst"
    return text


def _budgets(plan: SparsityPlan) -> Facts:
    """Which layers keep how much."""
    facts: Facts = []
    for part in PARTS:
        by_share: dict[str, list[str]] = {}
        for group in layer_groups(plan):
            share = plan.keep_fraction(group.layers[0], part)
            text = "dense" if share is None else f"{share:.0%}"
            by_share.setdefault(text, []).append(group.ranges)
        texts = [f"{share} in {','.join(ranges)}" for share, ranges in sorted(by_share.items())]
        name = "MLP" if part == "mlp" else part
        facts.append((name, next(iter(by_share)) if len(by_share) == 1 else "; ".join(texts)))
    return facts

"""What `chipsparse tune` tells at its end, for people."""

from __future__ import annotations

from rich.console import Console

from chipsparse.cli.tables import print_facts
from chipsparse.cli.tune.job import Tuned
from chipsparse.cli.wording import seconds_text


def print_summary(tuned: Tuned, console: Console) -> None:
    """The table."""
    measured = tuned.tuned.measured
    speedup = measured.dense_seconds / measured.seconds if measured.seconds else 0.0
    candidate = tuned.found.candidate
    sparse = candidate.steps.sparse
    facts = [
        ("profile", str(tuned.profile)),
        ("quality", _quality(tuned)),
        (
            "time",
            f"{seconds_text(measured.seconds)}, dense {seconds_text(measured.dense_seconds)}: "
            f"{speedup:.2f} times as fast",
        ),
        ("schedule", candidate.describe),
        ("full steps", ", ".join(map(str, candidate.steps.full))),
        *([("sparse steps", ", ".join(map(str, sparse)))] if sparse else []),
        ("chosen from", f"{tuned.configs_tried} configs; verified on {measured.prompts} prompts"),
        ("measurements", str(tuned.results)),
    ]
    print_facts(console, facts)


def _quality(tuned: Tuned) -> str:
    measured = tuned.tuned.measured
    if measured.psnr_db_worst is None or measured.psnr_db_median is None:
        return "the same clips as dense"
    text = f"PSNR {measured.psnr_db_worst:.1f} dB at worst, median {measured.psnr_db_median:.1f}"
    if measured.ssim_worst is not None:
        text += f"; SSIM {measured.ssim_worst:.3f} at worst"
    if measured.lpips_worst is not None:
        text += f"; LPIPS {measured.lpips_worst:.3f} at worst"
    return text

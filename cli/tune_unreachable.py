"""What `chipsparse tune` says where nothing that it tried meets the target."""

from __future__ import annotations

import math

from chipsparse.tuned_range import TunedTarget, target_text
from chipsparse.tuning.search import Unreachable
from chipsparse.tuning.targets import measurement


def unreachable_text(target: TunedTarget, error: Unreachable, budget: float) -> str:
    """One sentence: what cannot be had, what can, and the options that ask for it."""
    best = measurement(error.best.pairs)
    speedup = best.dense_seconds / best.seconds
    # The option, what was asked for, what was reached, and that as a number that is surely met.
    bounds = [
        ("--min-psnr", target.min_psnr_db, best.psnr_db_worst, 10, math.floor),
        ("--min-ssim", target.min_ssim, best.ssim_worst, 1000, math.floor),
        ("--max-lpips", target.max_lpips, best.lpips_worst, 1000, math.ceil),
        ("--min-speedup", target.min_speedup, speedup, 10, math.floor),
        ("--max-seconds", target.max_seconds, best.seconds, 10, math.ceil),
    ]
    options = []
    for name, asked, reached, digits, rounded in bounds:
        if asked is None:
            continue
        missed = reached is not None and (
            reached > asked if name.startswith("--max") else reached < asked
        )
        value = rounded(reached * digits) / digits if missed and reached is not None else asked
        options.append(f"{name} {value:g}")
    found = [
        "the same pictures as dense"
        if best.psnr_db_worst is None
        else f"a PSNR of {best.psnr_db_worst:.2f} dB"
    ]
    if best.ssim_worst is not None:
        found.append(f"an SSIM of {best.ssim_worst:.4f}")
    if best.lpips_worst is not None:
        found.append(f"an LPIPS of {best.lpips_worst:.4f}")
    cannot = (
        f"was not found within --budget {budget:g}" if error.out_of_budget else "cannot be met here"
    )
    more = ", or with a larger --budget" if error.out_of_budget else ""
    return (
        f"{target_text(vars(target))} {cannot}: the closest on the held-out prompts "
        f"({error.best.candidate.describe}) has {' and '.join(found)} at worst and takes "
        f"{best.seconds:.2f} s, {speedup:.2f} times as fast as dense; run the same command with "
        f"{' '.join(options)}{more}: what was measured is kept"
    )

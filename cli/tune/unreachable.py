"""What `chipsparse tune` says where nothing that it tried meets the target."""

from __future__ import annotations

import math

from chipsparse.profiles.tuned_range import TunedTarget, target_text
from chipsparse.tuning.search import Unreachable
from chipsparse.tuning.targets import measurement, median_seconds


def unreachable_text(target: TunedTarget, error: Unreachable, budget: float) -> str:
    """One sentence: what cannot be had, what can, and the options that ask for it."""
    pairs = error.best.pairs
    best = measurement(pairs)
    # Not of what is rounded for people, which may be more than was reached.
    seconds, dense_seconds = median_seconds(pairs)
    speedup = dense_seconds / seconds
    psnr_db = min(pair.psnr_db for pair in pairs)
    ssim = min((pair.ssim for pair in pairs if pair.ssim is not None), default=None)
    lpips = max((pair.lpips for pair in pairs if pair.lpips is not None), default=None)
    # The option, what was asked for, what was reached, that as a number that is surely met, and the
    # number that an option has to be above.
    bounds = [
        ("--min-psnr", target.min_psnr_db, psnr_db, 10, math.floor, 0),
        ("--min-ssim", target.min_ssim, ssim, 1000, math.floor, 0),
        ("--max-lpips", target.max_lpips, lpips, 1000, math.ceil, 0),
        ("--min-speedup", target.min_speedup, speedup, 100, math.floor, 1),
        ("--max-seconds", target.max_seconds, seconds, 10, math.ceil, 0),
    ]
    options = []
    for name, asked, reached, digits, rounded, above in bounds:
        if asked is None:
            continue
        missed = reached is not None and (
            reached > asked if name.startswith("--max") else reached < asked
        )
        value = rounded(reached * digits) / digits if missed and reached is not None else asked
        if value > above:
            options.append(f"{name} {value:g}")
    found = [
        "the same clips as dense"
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
    ways = [f"with {' '.join(options)}"] if options else []
    if error.out_of_budget:
        ways.append("with a larger --budget")
    again = f"; run the same command {', or '.join(ways)}: what was measured is kept"
    return (
        f"{target_text(vars(target))} {cannot}: the closest on the held-out prompts "
        f"({error.best.candidate.describe}) has {' and '.join(found)} at worst and takes "
        f"{seconds:.2f} s, {speedup:.2f} times as fast as dense{again if ways else ''}"
    )

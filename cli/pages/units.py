"""Numbers as a page writes them."""

from __future__ import annotations

import math

TIMES = "\N{MULTIPLICATION SIGN}"


def percent(share: float) -> str:
    """A share, with a decimal where that says something."""
    return f"{share:.0%}" if share in (0.0, 1.0) or share >= 0.995 else f"{share:.1%}"


def decibels(value: float | None) -> str:
    """A PSNR; none, or infinite, where there is no difference."""
    return "identical" if value is None or math.isinf(value) else f"{value:.2f} dB"


def times(ratio: float) -> str:
    """How many times as fast."""
    return f"{ratio:.2f}{TIMES}"


def shortened(text: str, longest: int) -> str:
    """A text of at most so many letters."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."

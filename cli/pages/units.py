"""Numbers as a page writes them."""

from __future__ import annotations

from collections.abc import Iterable

TIMES = "\N{MULTIPLICATION SIGN}"


def seconds_unit(values: Iterable[float]) -> tuple[str, float]:
    """The name and the size of a unit of time in which the largest is a handy number."""
    largest = max(values, default=0.0)
    return ("ms", 1e-3) if largest < 1 else ("s", 1.0) if largest < 600 else ("min", 60.0)


def bytes_unit(values: Iterable[float]) -> tuple[str, float]:
    """Likewise of memory."""
    large = max(values, default=0.0) >= 1 << 30
    return ("GiB", float(1 << 30)) if large else ("MiB", float(1 << 20))


def percent(share: float) -> str:
    """A share, with a decimal where that says something."""
    return f"{share:.0%}" if share in (0.0, 1.0) or share >= 0.995 else f"{share:.1%}"


def decibels(value: float | None) -> str:
    """A PSNR; None where there is no difference."""
    return "identical" if value is None else f"{value:.2f} dB"


def times(ratio: float) -> str:
    """How many times as fast."""
    return f"{ratio:.2f}{TIMES}"


def shortened(text: str, longest: int) -> str:
    """A text of at most so many letters."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."

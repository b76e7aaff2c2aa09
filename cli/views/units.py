"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from chipsparse.config import Part
from chipsparse.parallel.degrees import Parallel

TIMES = "\N{MULTIPLICATION SIGN}"
PART_NAMES: dict[Part, str] = {"attention": "attention", "mlp": "MLP"}


def counted(count: int, noun: str) -> str:
    """Return ``1 step``, ``2 steps`` or ``1,024 groups``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def seconds_text(seconds: float) -> str:
    """Return a duration in milliseconds, seconds or minutes."""
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def percent(share: float) -> str:
    """Return a share as a percentage, with a decimal where that says something."""
    return f"{share:.0%}" if share in (0.0, 1.0) or share >= 0.995 else f"{share:.1%}"


def decibels(value: float | None) -> str:
    """Return a PSNR in dB; "identical" for None and for infinity."""
    return "identical" if value is None or math.isinf(value) else f"{value:.2f} dB"


def times(ratio: float) -> str:
    """Return a speed-up."""
    return f"{ratio:.2f}{TIMES}"


def shortened(text: str, longest: int) -> str:
    """Return a text of at most ``longest`` letters."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def seconds_unit(values: Iterable[float]) -> tuple[str, float]:
    """Return the name and the seconds of a unit that suits the largest value."""
    largest = max(values, default=0.0)
    return ("ms", 1e-3) if largest < 1 else ("s", 1.0) if largest < 600 else ("min", 60.0)


def bytes_unit(values: Iterable[float]) -> tuple[str, float]:
    """Return the name and the bytes of a unit that suits the largest value."""
    large = max(values, default=0.0) >= 1 << 30
    return ("GiB", float(1 << 30)) if large else ("MiB", float(1 << 20))


def sharing_text(parallel: Parallel) -> str:
    """Return how many processes share what of a generation."""
    if parallel.guidance == 1:
        return f"{parallel.ranks}, which share the tokens and heads of a call"
    branch = "one each" if parallel.ulysses == 1 else f"{parallel.ulysses} for each"
    return f"{parallel.ranks}, on both guidance branches: {branch}"

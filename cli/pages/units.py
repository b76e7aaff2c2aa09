"""Units in which the largest of some values is a handy number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True)
class Unit:
    """A unit.

    Attributes:
        name: as it is written behind a number.
        size: in seconds or bytes.
    """

    name: str
    size: float


MILLISECONDS, SECONDS, MINUTES = Unit("ms", 1e-3), Unit("s", 1.0), Unit("min", 60.0)
MEBIBYTES, GIBIBYTES = Unit("MiB", float(1 << 20)), Unit("GiB", float(1 << 30))


def of_seconds(values: Iterable[float]) -> Unit:
    """For durations in seconds."""
    largest = max(values, default=0.0)
    return MILLISECONDS if largest < 1 else SECONDS if largest < 600 else MINUTES


def of_bytes(values: Iterable[float]) -> Unit:
    """For amounts of memory in bytes."""
    return GIBIBYTES if max(values, default=0.0) >= GIBIBYTES.size else MEBIBYTES


def percent(share: float) -> str:
    """A share, with a decimal where that says something."""
    return f"{share:.0%}" if share in (0.0, 1.0) or share >= 0.995 else f"{share:.1%}"


def tick_percent(share: float) -> str:
    """A share along an axis, with no more digits than it has."""
    return f"{100 * share:.6g}%"


def decibels(value: float | None) -> str:
    """A PSNR; None where there is no difference."""
    return "identical" if value is None else f"{value:.2f} dB"


def times(ratio: float) -> str:
    """How many times as fast."""
    return f"{ratio:.2f}{TIMES}"


def shortened(text: str, longest: int) -> str:
    """A text of at most so many letters."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def picture_text(settings: Mapping[str, Any]) -> str:
    """Size and number of frames as settings have them; empty where they do not."""
    width, height, frames = (settings.get(name) for name in ("width", "height", "num_frames"))
    if width is None or height is None:
        return ""
    return f"{width}{TIMES}{height} pixels" + (f", {frames} frames" if frames else "")

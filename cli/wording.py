"""Numbers with their nouns, times and places, as sentences need them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from chipsparse.config import Part
from chipsparse.parallel.degrees import Parallel
from chipsparse.profiles.profile import ASSETS

PART_NAMES: dict[Part, str] = {"attention": "attention", "mlp": "MLP"}


def counted(count: int, noun: str) -> str:
    """``1 step``, ``2 steps``, ``1,024 groups``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def bundled_name(place: str) -> str | None:
    """The name of what comes with chipsparse, such as ``tiny-wan``; None for anything else."""
    path, bundled = Path(place).resolve(), ASSETS.resolve()
    return str(path.relative_to(bundled)) if path.is_relative_to(bundled) else None


def profile_text(source: str, quality: str | None) -> str:
    """A profile, and which of its qualities is taken."""
    place = short_place(source)
    return place if quality is None else f"{quality}, from {place}"


def short_place(place: str) -> str:
    """A path for people: what comes with chipsparse is known by its name."""
    name = bundled_name(place)
    return place if name is None else f"{name}, bundled"


def files_text(files: Sequence[Path | str]) -> str:
    """Return the names of one clip's files: one, or the first and the last of numbered ones."""
    return str(files[0]) if len(files) == 1 else f"{files[0]} to {Path(files[-1]).name}"


def seconds_text(seconds: float) -> str:
    """A duration for people to read."""
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def sharing_text(parallel: Parallel) -> str:
    """How many share what."""
    if parallel.guidance == 1:
        return f"{parallel.ranks}, which share the tokens and heads of a call"
    each = "one each" if parallel.ulysses == 1 else f"{parallel.ulysses} for each"
    return f"{parallel.ranks}, on both guidance branches: {each}"

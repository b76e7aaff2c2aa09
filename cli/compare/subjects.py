"""What the two arguments of `chipsparse compare` are: files, or configs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from chipsparse.cli.errors import UserError
from chipsparse.profiles.profile import ASSETS, profile_classes
from chipsparse.profiles.qualities import QUALITIES

DENSE = "dense"
OWN_PROFILE = "profile"
CONFIG_SUFFIXES = (".yaml", ".yml")

Kind = Literal["dense", "config", "files"]


@dataclass(frozen=True)
class Subject:
    """One side of a comparison.

    Attributes:
        text: what the user typed.
        path: of the config or the files; None for the stock model and the model's own profile.
        quality: which one of that profile; None for its default.
    """

    text: str
    kind: Kind
    path: Path | None
    quality: str | None = None


def read_subject(text: str) -> Subject:
    """Tells what an argument is, by its name alone.

    ``dense`` is the stock model, ``profile`` the model's own profile, a quality's name that quality
    of it, the name of a bundled profile that one, what ends in .yaml or .yml a config, and
    everything else a path of files.
    """
    if text == DENSE:
        return Subject(text, "dense", None)
    if text == OWN_PROFILE:
        return Subject(text, "config", None)
    if text in QUALITIES:
        return Subject(text, "config", None, quality=text)
    if text in profile_classes():
        return Subject(text, "config", ASSETS / "profiles" / f"{text}.yaml")
    path = Path(text)
    return Subject(text, "config" if path.suffix.lower() in CONFIG_SUFFIXES else "files", path)


def read_subjects(a: str, b: str) -> tuple[Subject, Subject]:
    """Both sides; raises `UserError` where one is a config and the other is not."""
    first, second = read_subject(a), read_subject(b)
    if (first.kind == "files") != (second.kind == "files"):
        files, config = (first, second) if first.kind == "files" else (second, first)
        raise UserError(
            f"{config.text} is a config and {files.text} is taken for a file; compare two files, "
            f"or two configs: {DENSE}, {OWN_PROFILE}, a quality, a bundled profile's name, or a "
            ".yaml file"
        )
    if first.kind == second.kind == "dense":
        raise UserError("both are the stock model; give a config to compare it with")
    return first, second

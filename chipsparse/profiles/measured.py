"""What was measured of each class of transformers; ``python -m docs.tables`` writes it down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from chipsparse.common.text_files import read_text
from chipsparse.profiles.profile import ASSETS, PROFILES, Profile

MEASURED_FILE = ASSETS / "measured.yaml"
# The model that quality was measured on, as pages and commands call it.
SMALL_MODEL = "a model of 53 M parameters that was trained for it"


@dataclass(frozen=True)
class Measured:
    """What was measured of one class, with the configs that are shipped today.

    Attributes:
        speed: qualities whose steps were all run, by the model and size that ran. Its weights were
            random, and the GPU was one NVIDIA H200.
        quality: whether a small model of this class was compared with its dense clips.
    """

    speed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    quality: bool = False

    @property
    def runs(self) -> str:
        """The qualities that were run, with the models and sizes of each."""
        if not self.speed:
            return "nothing"
        sizes_of: dict[tuple[str, ...], list[str]] = {}
        for size, names in self.speed.items():
            sizes_of.setdefault(names, []).append(size)
        return "; ".join(
            f"{', '.join(names)} ({', '.join(sizes)})" for names, sizes in sizes_of.items()
        )

    @property
    def speed_text(self) -> str:
        """What was run and on what, in words."""
        return f"{self.runs}: one H200, random weights" if self.speed else self.runs

    @property
    def quality_text(self) -> str:
        """What quality was measured on, in words."""
        return f"{SMALL_MODEL}, no full-size weights" if self.quality else "nothing"


def measured_of(transformer_class: str) -> Measured:
    """Return what was measured of a class; nothing where the file does not name it."""
    facts = yaml.safe_load(read_text(MEASURED_FILE)).get(transformer_class) or {}
    speed = {size: tuple(names) for size, names in (facts.get("speed") or {}).items()}
    return Measured(speed, facts.get("quality", False))


def measured_with(profile: Profile, *, experts: int = 1) -> Measured:
    """Return what was measured with a profile: nothing unless it is the one shipped for its class.

    Args:
        profile: the profile that a generation takes.
        experts: number of transformers in the pipeline. Nothing was measured with two.
    """
    shipped = PROFILES / f"{profile.model_class}.yaml"
    if experts > 1 or Path(profile.source).resolve() != shipped.resolve():
        return Measured()
    return measured_of(profile.model_class)

"""The actions of a step, the parts of a layer, and the errors and warnings about a config."""

from __future__ import annotations

import enum
from typing import Literal

Part = Literal["attention", "mlp"]
PARTS: tuple[Part, ...] = ("attention", "mlp")
LayerPart = tuple[int, Part]
ActionName = Literal["dense", "refresh", "sparse", "skip"]


class Action(str, enum.Enum):
    """The computation of one layer at one step.

    DENSE records the LSE. REFRESH also chooses columns and fills the caches. SPARSE computes only
    the kept columns and neurons. SKIP makes its output of earlier ones.
    """

    DENSE = "dense"
    REFRESH = "refresh"
    SPARSE = "sparse"
    SKIP = "skip"

    __str__ = str.__str__


class ConfigError(ValueError):
    """A config asks for something that this model or machine cannot do."""


class FallbackError(ConfigError):
    """Something would run dense, or denser than the config asks, and the run is strict."""


class DenseWarning(UserWarning):
    """A generation computes nothing sparse although its config asks for it."""


class QualityWarning(UserWarning):
    """A generation is further from the dense one than its config is elsewhere, for its sampler."""

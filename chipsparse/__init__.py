"""Faster diffusion transformers, without training, on stock diffusers pipelines.

>>> with chipsparse.enable(pipe, quality="balanced"):
...     video = pipe("a cat walks on the grass").frames[0]
"""

from __future__ import annotations

import importlib

from chipsparse.common.version import __version__ as __version__

TYPE_CHECKING = False  # `typing` takes longer to import than all else here
if TYPE_CHECKING:
    from typing import Any

    from chipsparse.api import Handle, disable, enable
    from chipsparse.cli.compare.clips import compare
    from chipsparse.config import (
        AttentionConfig,
        ConfigError,
        DenseWarning,
        FallbackError,
        LayerBudget,
        MemoryConfig,
        MLPConfig,
        QualityWarning,
        ScheduleConfig,
        SparsityConfig,
    )
    from chipsparse.experiments.comparison import ClipComparison, FrameComparison
    from chipsparse.parallel.degrees import Parallel
    from chipsparse.parallel.peers import PeerError
    from chipsparse.profiles.profile import (
        GenerationDefaults,
        Profile,
        bundled_model,
        default_profile,
        find_profile,
        load_profile,
    )
    from chipsparse.report.generation import GenerationReport, LayerRecord, StepRecord
    from chipsparse.sparse.cache.memory_plan import BudgetError
    from chipsparse.sparse.plan import Action

__all__ = [
    "Action",
    "AttentionConfig",
    "BudgetError",
    "ClipComparison",
    "ConfigError",
    "DenseWarning",
    "FallbackError",
    "FrameComparison",
    "GenerationDefaults",
    "GenerationReport",
    "Handle",
    "LayerBudget",
    "LayerRecord",
    "MLPConfig",
    "MemoryConfig",
    "Parallel",
    "PeerError",
    "Profile",
    "QualityWarning",
    "ScheduleConfig",
    "SparsityConfig",
    "StepRecord",
    "bundled_model",
    "compare",
    "default_profile",
    "disable",
    "enable",
    "find_profile",
    "load_profile",
]

# The module of each name, imported at its first use: PyTorch and diffusers take seconds, and until
# the command minds Ctrl-C nothing else is to take long.
_LATER = {
    "AttentionConfig": "config",
    "ConfigError": "config",
    "DenseWarning": "config",
    "FallbackError": "config",
    "LayerBudget": "config",
    "MLPConfig": "config",
    "MemoryConfig": "config",
    "QualityWarning": "config",
    "ScheduleConfig": "config",
    "SparsityConfig": "config",
    "GenerationDefaults": "profiles.profile",
    "Profile": "profiles.profile",
    "bundled_model": "profiles.profile",
    "default_profile": "profiles.profile",
    "find_profile": "profiles.profile",
    "load_profile": "profiles.profile",
    "Parallel": "parallel.degrees",
    "Action": "plan",
    "BudgetError": "cache.memory_plan",
    "ClipComparison": "experiments.comparison",
    "FrameComparison": "experiments.comparison",
    "GenerationReport": "report.generation",
    "Handle": "api",
    "LayerRecord": "report.generation",
    "PeerError": "parallel.peers",
    "StepRecord": "report.generation",
    "compare": "cli.compare.clips",
    "disable": "api",
    "enable": "api",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'chipsparse' has no attribute {name!r}")
    return getattr(importlib.import_module(f"chipsparse.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

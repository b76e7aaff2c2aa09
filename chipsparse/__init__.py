"""Faster diffusion transformers, without training, on stock diffusers pipelines.

>>> with chipsparse.enable(pipe, quality="balanced"):
...     video = pipe("a cat walks on the grass").frames[0]
"""

from __future__ import annotations

import importlib

from chipsparse.common.version import __version__ as __version__

TYPE_CHECKING = False  # `typing` takes longer to import than all else here
if TYPE_CHECKING:
    from chipsparse.api import Handle, disable, enable
    from chipsparse.cli.compare.clips import compare
    from chipsparse.config import (
        Action,
        Actions,
        AttentionConfig,
        Branches,
        ByCost,
        ConfigError,
        DenseWarning,
        FallbackError,
        LayerBudget,
        Listed,
        MemoryConfig,
        MLPConfig,
        Periodic,
        QualityWarning,
        ScheduleConfig,
        SparsityConfig,
        Spread,
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
    from chipsparse.report.generation import GenerationReport
    from chipsparse.report.records import LayerRecord, StepRecord
    from chipsparse.sparse.cache.memory_plan import BudgetError

__all__ = [
    "Action",
    "Actions",
    "AttentionConfig",
    "Branches",
    "BudgetError",
    "ByCost",
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
    "Listed",
    "MLPConfig",
    "MemoryConfig",
    "Parallel",
    "PeerError",
    "Periodic",
    "Profile",
    "QualityWarning",
    "ScheduleConfig",
    "SparsityConfig",
    "Spread",
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
    "Listed": "config",
    "MLPConfig": "config",
    "MemoryConfig": "config",
    "Periodic": "config",
    "QualityWarning": "config",
    "ScheduleConfig": "config",
    "SparsityConfig": "config",
    "Spread": "config",
    "GenerationDefaults": "profiles.profile",
    "Profile": "profiles.profile",
    "bundled_model": "profiles.profile",
    "default_profile": "profiles.profile",
    "find_profile": "profiles.profile",
    "load_profile": "profiles.profile",
    "Parallel": "parallel.degrees",
    "Action": "config",
    "Actions": "config",
    "Branches": "config",
    "BudgetError": "sparse.cache.memory_plan",
    "ByCost": "config",
    "ClipComparison": "experiments.comparison",
    "FrameComparison": "experiments.comparison",
    "GenerationReport": "report.generation",
    "Handle": "api",
    "LayerRecord": "report.records",
    "PeerError": "parallel.peers",
    "StepRecord": "report.records",
    "compare": "cli.compare.clips",
    "disable": "api",
    "enable": "api",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'chipsparse' has no attribute {name!r}")
    return getattr(importlib.import_module(f"chipsparse.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

"""chipsparse: faster diffusion transformers, without training, on stock diffusers pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chipsparse.config import (
    AttentionConfig,
    ConfigError,
    FallbackError,
    LayerBudget,
    MemoryConfig,
    MLPConfig,
    ScheduleConfig,
    SparsityConfig,
    TokenOrderConfig,
)
from chipsparse.profiles import Profile, find_profile, load_profile

if TYPE_CHECKING:
    from chipsparse.api import Handle, enable
    from chipsparse.kept_columns import KeptColumns

__version__ = "0.1.0"

__all__ = [
    "AttentionConfig",
    "ConfigError",
    "FallbackError",
    "Handle",
    "KeptColumns",
    "LayerBudget",
    "MLPConfig",
    "MemoryConfig",
    "Profile",
    "ScheduleConfig",
    "SparsityConfig",
    "TokenOrderConfig",
    "enable",
    "find_profile",
    "load_profile",
]


def __getattr__(name: str) -> Any:
    """Imports the part that needs diffusers only when it is used."""
    if name in ("enable", "Handle"):
        from chipsparse import api

        return getattr(api, name)
    if name == "KeptColumns":
        from chipsparse.kept_columns import KeptColumns

        return KeptColumns
    raise AttributeError(f"module 'chipsparse' has no attribute {name!r}")

"""Profiles that commands write: like any other, of `tune` with what they were tuned for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from chipsparse.cli.media.write import written_whole
from chipsparse.cli.settings import GenerationSettings
from chipsparse.config import SparsityConfig
from chipsparse.profiles.profile import (
    load_profile,
)
from chipsparse.profiles.tuned_range import TunedFor

# Fields that a search chooses, which are written even where they are at their defaults.
CHOSEN = ("density", "between", "forecast", "forecast_after", "correct")
HEADER = "# Written by `chipsparse {}`. What the fields mean: docs/config.md.\n"


def write_profile(
    path: Path,
    *,
    command: str,
    model_class: str,
    description: str,
    settings: GenerationSettings,
    config: SparsityConfig,
    tuned: TunedFor | None = None,
) -> None:
    """Writes all of the profile or nothing; raises `UserError` where that fails."""
    content = {
        "model_class": model_class,
        "description": description,
        "generation": settings.call_arguments(),
        "sparsity": _changed(config),
    }
    if tuned is not None:
        content["tuned"] = _plain(dataclasses.asdict(tuned))
    text = HEADER.format(command) + yaml.safe_dump(
        content, sort_keys=False, allow_unicode=True, width=100
    )
    with written_whole("--output", path) as file:
        file.write_text(text, encoding="utf-8")
        assert load_profile(file).sparsity == config


def _changed(config: SparsityConfig) -> dict[str, Any]:
    """The fields that are not at their defaults, and always what tuning chooses."""
    values, defaults = (_plain(dataclasses.asdict(c)) for c in (config, SparsityConfig()))
    changed: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            value = {
                field: each
                for field, each in value.items()
                if each != defaults[name][field] or field in CHOSEN
            }
        elif value == defaults[name]:
            continue
        if value:
            changed[name] = value
    return changed


def _plain(value: Any) -> Any:
    """Tuples as lists, as YAML has them; budgets without what they leave to the others."""
    if isinstance(value, dict):
        if "layers" in value and isinstance(value["layers"], str):
            return {name: _plain(each) for name, each in value.items() if each is not None}
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value

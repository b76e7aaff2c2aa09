"""Profiles that commands write; those of `tune` say what they were tuned for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from chipsparse.cli.media.write import written_whole
from chipsparse.cli.request import Request
from chipsparse.config import SparsityConfig
from chipsparse.profiles.profile import load_profile
from chipsparse.profiles.tuned_range import TunedFor

# Fields that a search chooses, which are written even where they are at their defaults.
CHOSEN = ("density", "forecast", "forecast_after", "correct")
HEADER = "# Written by `chipsparse {}`. What the fields mean: docs/config.md.\n"


def write_profile(
    path: Path,
    request: Request,
    *,
    command: str,
    description: str,
    config: SparsityConfig,
    tuned: TunedFor | None = None,
) -> None:
    """Write a profile for generations like the request, or nothing; raise `UserError`."""
    content = {
        "model_class": request.model.transformer_class,
        "description": description,
        "generation": request.settings.call_arguments(),
        "sparsity": _changed(config),
    }
    if tuned is not None:
        content["tuned"] = dataclasses.asdict(tuned)
    text = HEADER.format(command) + yaml.safe_dump(
        content,
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )
    with written_whole("--output", path) as file:
        file.write_text(text, encoding="utf-8")
        assert load_profile(file).sparsity == config


def _changed(config: SparsityConfig) -> dict[str, Any]:
    """Return the fields that are not at their defaults, and always what tuning chooses."""
    values = config.words()
    defaults = SparsityConfig().words()
    changed: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            usual = {f: x for f, x in defaults[name].items() if f not in CHOSEN}
            fields = {f: x for f, x in value.items() if f not in usual or x != usual[f]}
            if fields:
                changed[name] = fields
        elif value != defaults[name]:
            changed[name] = value
    if "layers" in changed:  # a budget leaves out what it leaves to the others
        budgets = changed["layers"]
        changed["layers"] = [{f: x for f, x in b.items() if x is not None} for b in budgets]
    return changed

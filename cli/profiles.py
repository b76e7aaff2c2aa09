"""Profiles: the one that a command takes, what it was tuned for, and those that are written."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import yaml

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.media.write import written_whole
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.options import GenerationOptions
from chipsparse.cli.settings import GenerationSettings
from chipsparse.cli.wording import counted
from chipsparse.common.machine import cpu_model
from chipsparse.config import SparsityConfig
from chipsparse.profiles.profile import (
    MODEL_PROFILE_NAME,
    Profile,
    default_profile,
    find_profile,
    load_profile,
    profile_classes,
)
from chipsparse.profiles.qualities import DEFAULT_QUALITY
from chipsparse.profiles.tuned_range import TunedFor, digest, outside

# Fields that a search chooses, which are written even where they are at their defaults.
CHOSEN = ("density", "between", "forecast", "forecast_after", "correct")
HEADER = "# Written by `chipsparse {}`. What the fields mean: docs/config.md.\n"


def choose_profile(
    options: GenerationOptions, model: ModelDescription, *, optional: bool = False
) -> Profile | None:
    """Return the profile of ``--config`` or of the model: its ``--quality``, with memory budgets.

    Args:
        optional: None, not `UserError`, where there is no profile.
    """
    with user_errors(ValueError):
        profile = _profile(options, model)
        profile = None if profile is None else profile.for_steps(options.steps)
        if profile is not None and options.quality is not None:
            profile = profile.of_quality(options.quality)
    if profile is None:
        if optional:
            return None
        raise UserError(
            f"there is no profile for the model class {model.transformer_class} (there is for "
            f"{', '.join(profile_classes())}); give one with --config, or --quality "
            f"{DEFAULT_QUALITY}, which is made for no model in particular"
        )
    if not profile.serves(model.transformer_class):
        raise UserError(
            f"{profile.source} is for {profile.model_class}, but the model "
            f"{model.location} has a {model.transformer_class}"
        )
    with user_errors(ValueError):
        return profile.override(options.memory_budgets())


def required_profile(options: GenerationOptions, model: ModelDescription) -> Profile:
    """Return the profile, where nothing can be done without one; see `choose_profile`."""
    profile = choose_profile(options, model)
    assert profile is not None
    return profile


def _profile(options: GenerationOptions, model: ModelDescription) -> Profile | None:
    """Return the profile that the options mean; None where the model has none."""
    if options.config is not None:
        return load_profile(options.config)
    own = Path(model.location) / MODEL_PROFILE_NAME
    if model.transformer_class not in profile_classes() and not own.exists():
        return None if options.quality is None else default_profile()
    return find_profile(model.location, model.transformer_class)


# What a profile was tuned for.


def out_of_range(
    profile: Profile,
    model: ModelDescription,
    settings: GenerationSettings,
    device: torch.device,
    dtype: torch.dtype,
    *,
    flow_shift: float | None,
    here: bool = True,
) -> list[str]:
    """Return how a generation differs from what its profile was tuned for, a phrase each.

    Such as ``30 steps, not 50``; nothing for a profile that was not tuned. A device that is not
    ``here`` has no name and is not looked at.
    """
    if profile.tuned is None:
        return []
    facts = range_of(settings, flow_shift, device if here else torch.device("cpu"), dtype)
    if not here:
        del facts["device"]
    return outside(profile.tuned, {**facts, "transformer_config": digest(model.transformer_config)})


def out_of_range_text(profile: Profile, differences: list[str]) -> str:
    """Return one sentence about the differences."""
    return (
        f"{profile.source} was tuned for other generations than this one "
        f"({'; '.join(differences)}): its quality and speed were not measured here"
    )


def range_of(
    settings: GenerationSettings,
    flow_shift: float | None,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Return a generation's part of a profile's range; a flow shift of None is the scheduler's."""
    values = dataclasses.asdict(settings)
    del values["max_sequence_length"]
    return {
        **values,
        "flow_shift": flow_shift,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device_name(device),
    }


def device_name(device: torch.device) -> str:
    """Return the name of a device in results and profiles."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()}, {counted(torch.get_num_threads(), 'thread')}"


# Profiles that commands write.


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
        content["tuned"] = _plain(tuned.to_dict())
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

"""Which model and which profile a command is about, settled before any weight is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from chipsparse.cli.errors import UserError
from chipsparse.cli.model import (
    ModelDescription,
    choose_device,
    choose_dtype,
    describe_model,
    is_local,
)
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.settings import CommonOptions
from chipsparse.profiles import (
    MODEL_PROFILE_NAME,
    Profile,
    bundled_model,
    find_profile,
    load_profile,
)


def checked(options: CommonOptions) -> tuple[torch.device, torch.dtype]:
    """Checks what can be checked without a model; returns what to compute on, and in."""
    options.check()
    device = choose_device(options.device)
    options.check_vram(device)
    return device, choose_dtype(options.dtype, device)


def look_up(options: CommonOptions, display: ProgressDisplay) -> ModelDescription:
    """What the files of ``--model`` say."""
    location = str(bundled_model()) if options.model is None else options.model
    if is_local(location):
        return describe_model(location)
    with display.stage(f"looking up {location} on the Hugging Face hub"):
        return describe_model(location)


def check_prompt_is_enough(
    model: ModelDescription, instead: str, *, given: frozenset[str] = frozenset()
) -> None:
    """Raises `UserError`, with a way out, where the pipeline cannot run on a prompt alone.

    Args:
        model: has the pipeline.
        instead: the way out.
        given: arguments that it gets besides.
    """
    missing = model.needed_arguments() - {"prompt"} - given
    if missing:
        raise UserError(
            f"{model.pipeline_class.__name__} also needs {', '.join(sorted(missing))}; {instead}"
        )


def choose_profile(
    options: CommonOptions, model: ModelDescription, *, optional: bool = False
) -> Profile | None:
    """The profile of ``--config`` or of the model, with the memory budgets of the options.

    Args:
        options: what the user typed.
        model: what the profile must be for.
        optional: None, not `UserError`, where there is no profile.
    """
    own = Path(model.location) / MODEL_PROFILE_NAME
    try:
        if options.config is None:
            return _budgeted(find_profile(model.location, model.transformer_class), options)
        profile = load_profile(options.config)
    except ValueError as error:
        if optional and options.config is None and not own.exists():
            return None
        raise UserError(str(error)) from error
    if not profile.serves(model.transformer_class):
        raise UserError(
            f"{options.config} is for {profile.model_class}, but the model "
            f"{model.location} has a {model.transformer_class}"
        )
    return _budgeted(profile, options)


def required_profile(options: CommonOptions, model: ModelDescription) -> Profile:
    """As `choose_profile`, where nothing can be done without one."""
    profile = choose_profile(options, model)
    assert profile is not None
    return profile


def _budgeted(profile: Profile, options: CommonOptions) -> Profile:
    sparsity = profile.sparsity.override(options.memory_budgets())
    return dataclasses.replace(profile, sparsity=sparsity)

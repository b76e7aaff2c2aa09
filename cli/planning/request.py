"""Which model and which profile a command is about, settled before any weight is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.generation_options import GenerationOptions
from chipsparse.cli.model.description import (
    ModelDescription,
    choose_device,
    choose_dtype,
    describe_model,
    is_local,
    quiet_libraries,
)
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.ranks.joined import Joined
from chipsparse.profiles.profile import (
    MODEL_PROFILE_NAME,
    Profile,
    bundled_model,
    default_profile,
    find_profile,
    load_profile,
    profile_classes,
)
from chipsparse.profiles.qualities import DEFAULT_QUALITY


def device_and_dtype(options: GenerationOptions) -> tuple[torch.device, torch.dtype]:
    """What to compute on, and in; raises `UserError` where that is not here."""
    device = choose_device(options.device)
    options.check_vram(device)
    return device, choose_dtype(options.dtype, device)


class Request(NamedTuple):
    """The model of a command, where it computes, and what shows the progress."""

    model: ModelDescription
    device: torch.device
    dtype: torch.dtype
    display: ProgressDisplay


@contextmanager
def requested(options: GenerationOptions, process: Joined) -> Iterator[Request]:
    """What a command is about, as far as no weight tells, while it works quietly."""
    device, dtype = device_and_dtype(options)
    device = process.device(device)
    with process.display() as display, quiet_libraries(debug=options.debug):
        yield Request(look_up(options, display), device, dtype, display)


def look_up(options: GenerationOptions, display: ProgressDisplay) -> ModelDescription:
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
        instead: the way out.
        given: arguments that it gets besides.
    """
    missing = model.needed_arguments() - {"prompt"} - given
    if missing:
        raise UserError(
            f"{model.pipeline_class.__name__} also needs {', '.join(sorted(missing))}; {instead}"
        )
    if model.lacks_text_encoder():
        raise UserError(
            f"{model.location} has no text encoder, so {model.pipeline_class.__name__} cannot read "
            f"a prompt; {instead}"
        )


def choose_profile(
    options: GenerationOptions, model: ModelDescription, *, optional: bool = False
) -> Profile | None:
    """The profile of ``--config`` or of the model: its ``--quality``, with the memory budgets.

    Args:
        optional: None, not `UserError`, where there is no profile.
    """
    with user_errors(ValueError):
        profile = _found(options, model)
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
    """As `choose_profile`, where nothing can be done without one."""
    profile = choose_profile(options, model)
    assert profile is not None
    return profile


def _found(options: GenerationOptions, model: ModelDescription) -> Profile | None:
    """The profile that the options mean; None where the model has none. Raises `ValueError`."""
    if options.config is not None:
        return load_profile(options.config)
    own = Path(model.location) / MODEL_PROFILE_NAME
    known = model.transformer_class in profile_classes()
    if not known and not own.exists():
        return None if options.quality is None else default_profile()
    return find_profile(model.location, model.transformer_class)

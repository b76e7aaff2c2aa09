"""The command that does the same again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from chipsparse.cli.generation_options import GenerationOptions
from chipsparse.cli.options import argument_names, option_name

if TYPE_CHECKING:
    import torch

    from chipsparse.cli.planning.settings import GenerationSettings

# What shows or hides something and changes no result.
SHOWING = frozenset({"json", "debug", "verbose"})


def command_words(
    command: str, options: GenerationOptions, settled: Mapping[str, Any]
) -> list[str]:
    """What was typed, with what it left to the profile and to the machine.

    Args:
        settled: values that stand in place of those, by the names that the options have.

    Returns:
        The words of the command, which `shlex.join` makes a line of.
    """
    typed = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    values = {**typed, **settled}
    arguments = [values.pop(name) for name in argument_names(type(options))]
    arguments = [str(each) for each in arguments if each is not None]
    words: list[str] = []
    for name, value in values.items():
        option = option_name(name)
        if value is None or value is False or name in SHOWING:
            continue
        if value is True:
            words.append(option)
            continue
        for each in value if isinstance(value, (list, tuple)) else (value,):
            words += [option, str(each)]
    if any(each.startswith("-") for each in arguments):  # else it would be taken for an option
        return ["chipsparse", command, *words, "--", *arguments]
    return ["chipsparse", command, *arguments, *words]


def settled_values(
    settings: GenerationSettings, device: torch.device, dtype: torch.dtype, gpus: int | None
) -> dict[str, Any]:
    """What stands in place of options that were left to the profile and to the machine."""
    several = gpus is not None and gpus > 1  # each process takes one of them
    return {
        "height": settings.height,
        "width": settings.width,
        "frames": settings.num_frames,
        "steps": settings.num_inference_steps,
        "device": device.type if several else device,
        "dtype": str(dtype).removeprefix("torch."),
    }

"""Whether a generation is like those that a tuned profile was measured with."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.planning.settings import GenerationSettings
from chipsparse.cli.wording import counted
from chipsparse.common.machine import cpu_model
from chipsparse.profiles.profile import Profile
from chipsparse.profiles.tuned_range import digest, outside


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
    """How a generation differs from what its profile was tuned for; nothing for one that was not.

    Each is one phrase, such as ``30 steps, not 50``. A device that is not ``here`` has no name and
    is not looked at.
    """
    if profile.tuned is None:
        return []
    facts = range_of(settings, flow_shift, device if here else torch.device("cpu"), dtype)
    if not here:
        del facts["device"]
    return outside(profile.tuned, {**facts, "transformer_config": digest(model.transformer_config)})


def sentence(profile: Profile, differences: list[str]) -> str:
    """One sentence about them."""
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
    """What a generation has of a profile's range; a flow shift of None is the scheduler's own."""
    values = dataclasses.asdict(settings)
    del values["max_sequence_length"]
    return {
        **values,
        "flow_shift": flow_shift,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device_name(device),
    }


def device_name(device: torch.device) -> str:
    """The device, as results and profiles name it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()}, {counted(torch.get_num_threads(), 'thread')}"

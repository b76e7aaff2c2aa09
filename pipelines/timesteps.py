"""The scheduler's own value of a timestep that pipelines change before they pass it on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def value_passed_as(
    timestep: Any, schedule: Any, change: Callable[[torch.Tensor], torch.Tensor] = lambda v: v
) -> float | None:
    """The only value of a schedule that a pipeline passes as this timestep; waits for the device.

    Args:
        timestep: what the transformer is called with, a number or a tensor of any shape: the
            largest one counts.
        schedule: the scheduler's timesteps, or None.
        change: what the pipeline makes of them, in the timestep's dtype.

    Returns:
        None where no value of the schedule gives this timestep, or several do.
    """
    if schedule is None:
        return None
    called = torch.as_tensor(timestep).max().cpu()
    values = torch.as_tensor(schedule).cpu()
    (places,) = torch.nonzero(change(values.to(called.dtype)) == called, as_tuple=True)
    return float(values[places[0]]) if places.numel() == 1 else None


def largest(timestep: Any) -> float:
    """The largest of a timestep for each sample or token, or its only one; waits for the device."""
    return float(torch.as_tensor(timestep).max())

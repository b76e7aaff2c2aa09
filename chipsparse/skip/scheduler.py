"""Schedulers of diffusers, which `skip` knows without importing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Scheduler(Protocol):
    """The members that are read of a scheduler; each class has some of them."""

    step: Callable[..., Any]
    config: Any  # a mapping whose items are attributes, too
    timesteps: torch.Tensor
    sigmas: torch.Tensor
    alphas_cumprod: torch.Tensor
    step_index: int | None  # of the next step; None before the first
    _sigma_to_alpha_sigma_t: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class SchedulerOutput(Protocol):
    """The result of a step, unless it is a tuple that begins with the latents."""

    prev_sample: torch.Tensor


Stepped = SchedulerOutput | Sequence[torch.Tensor]

"""The flow shift of a scheduler: how far its noise levels are moved towards the noisy end.

Larger pictures and longer videos want a larger one, since more pixels tell what a noisy one shows;
Wan's authors give 3 for 480p and 5 for 720p. The shift of levels is from Esser et al., "Scaling
rectified flow transformers for high-resolution image synthesis" (2024).
"""

from __future__ import annotations

import math
from typing import Any

# Ways to space the levels that take the place of the shift.
SPACINGS = ("use_karras_sigmas", "use_lu_lambdas", "use_exponential_sigmas", "use_beta_sigmas")


def with_flow_shift(scheduler: Any, shift: float) -> Any:
    """The same scheduler with another shift, as diffusers' ``from_config`` makes it.

    The level ``t`` in 0..1 becomes ``shift * t / (1 + (shift - 1) * t)``. Raises `ValueError` where
    the shift is not above 0 and finite, or the scheduler has none to change.
    """
    if not 0.0 < shift < math.inf:
        raise ValueError(f"the flow shift must be above 0 and finite, got {shift}")
    config = scheduler.config
    name = type(scheduler).__name__
    if config.get("use_dynamic_shifting"):
        raise ValueError(f"{name} takes its flow shift from the size here (use_dynamic_shifting)")
    for spacing in SPACINGS:
        if config.get(spacing):
            raise ValueError(
                f"{name} spaces its noise levels without a flow shift here ({spacing})",
            )
    if "shift" in config:
        return type(scheduler).from_config(config, shift=shift)
    if "flow_shift" in config and config.get("use_flow_sigmas"):
        return type(scheduler).from_config(config, flow_shift=shift)
    raise ValueError(f"{name} has no flow shift here: its noise levels are none of flow matching")

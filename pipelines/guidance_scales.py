"""The guidance scales of a pipeline, and how often they switch within a generation."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

SCALES = ("guidance_scale", "cfg_scale", "guidance_scale_2")


class GuidanceScales:
    """Counts the switches of guidance scales in one generation.

    A switch is a change of a scale that is constant otherwise: a callback ends guidance, say.
    Scales that change at every step (dynamic guidance) have none: the transformer's outputs do not
    depend on them, and their effect on the latents has no jump.

    The first change of a generation that comes right after its first step may be either. So it
    counts a step later, once the scale stays.
    """

    def __init__(self) -> None:
        self._step = -1
        self._values: dict[str, Real] = {}
        self._moves: dict[str, list[bool]] = {}  # of each scale: whether it changed, step by step
        self._switches = 0

    def switches(self, step: int, scales: Mapping[str, Real]) -> int:
        """Return the number of switches in the generation up to a step.

        Args:
            step: the step of the call. Only the first call of each step is looked at.
            scales: the scales now, by name.
        """
        if step == self._step:
            return self._switches
        is_first = self._step < 0
        if not is_first and self._has_switched(scales):
            self._switches += 1
        self._step = step
        self._values = dict(scales)
        return self._switches

    def _has_switched(self, scales: Mapping[str, Real]) -> bool:
        switched = False
        for name in {**self._values, **scales}:
            moves = self._moves.setdefault(name, [])
            moves.append(scales.get(name) != self._values.get(name))
            if moves[-2:] == [False, True] or moves == [True, False]:
                switched = True
        return switched


def scales_of(*owners: Any) -> dict[str, Real]:
    """Return the guidance scales among the attributes of a pipeline and its guider, by name."""
    return {
        f"{place} {name}": value
        for place, owner in enumerate(owners)
        for name, value in getattr(owner, "__dict__", {}).items()
        if name.endswith(SCALES) and isinstance(value, Real)
    }

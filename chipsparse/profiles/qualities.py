"""Named qualities: how much of a generation is computed, for people who do not tune.

A profile lists the qualities that it has. Each is put together from three mappings, the later going
before the earlier: what ``assets/qualities.yaml`` says for its name, the profile's ``sparsity``,
which all have in common, and what the profile says for its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chipsparse.common.validation import build, shown
from chipsparse.config import SparsityConfig

QUALITIES = {
    "faithful": "closest to dense, the slowest of the three",
    "balanced": "the default",
    "fast": "the fastest, furthest from dense",
    "published": "few full steps, all others sparse: the schedule that was published first",
}
DEFAULT_QUALITY = "balanced"
WHOLE = "schedule"  # replaced, not merged: its forms exclude each other


def check_quality(name: str) -> None:
    """Raises `ValueError`, with the known names, for one that no profile can have."""
    if name not in tuple(QUALITIES):  # which, unlike a dict, takes a list too
        raise ValueError(f"there is no quality {shown(name)}; known are {', '.join(QUALITIES)}")


def read_qualities(
    listed: Mapping[str, Any], common: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, SparsityConfig]:
    """Return the configs of a profile's qualities, by name.

    Args:
        listed: what the profile says for each, null where it adds nothing.
        common: its ``sparsity``.
        defaults: what a name stands for in every profile.

    Raises:
        ValueError: on an unknown name, or as making a config; with the field's path.
    """
    configs = {}
    for name, own in listed.items():
        path = f"qualities.{name}"
        if name not in QUALITIES:
            raise ValueError(f"{path}: unknown quality; allowed: {', '.join(QUALITIES)}")
        if own is not None and not isinstance(own, Mapping):
            raise ValueError(f"{path}: expected a mapping as under sparsity, got {shown(own)}")
        usual = _merged(defaults[name], common)
        config = build(SparsityConfig, _merged(usual, own or {}), path)
        configs[name] = config.over(build(SparsityConfig, usual))
    return configs


def _merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return groups of fields merged field by field, except `WHOLE`."""
    result: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            before = result.get(name)
            if name != WHOLE and isinstance(value, Mapping) and isinstance(before, Mapping):
                value = {**before, **value}
            result[name] = value
    return result

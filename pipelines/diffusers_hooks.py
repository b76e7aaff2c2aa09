"""The hooks that diffusers puts on modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GROUP_OFFLOADING = "group_offloading"  # what diffusers calls that hook


def hooks_on(module: Any) -> Mapping[str, Any]:
    """Those on one module, by the names that diffusers gives them."""
    registry = getattr(module, "_diffusers_hook", None)
    return {} if registry is None else registry.hooks

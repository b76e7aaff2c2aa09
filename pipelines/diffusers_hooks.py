"""The hooks that diffusers and others put on modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chipsparse.pipelines.patches import Patches

GROUP_OFFLOADING = "group_offloading"  # what diffusers calls that hook


def hooks_on(module: Any) -> Mapping[str, Any]:
    """Those on one module, by the names that diffusers gives them."""
    registry = getattr(module, "_diffusers_hook", None)
    return {} if registry is None else registry.hooks


def has_foreign_hooks(module: Any, patches: Patches, *, is_whole_model: bool) -> bool:
    """Whether a module runs hooks that are not among the patches.

    That of accelerate's model offload is none: it does nothing while the model is on its device.
    """
    if hooks_on(module) or (hasattr(module, "_hf_hook") and not is_whole_model):
        return True
    return any(
        number not in patches.hook_numbers
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for number in hooks
    )

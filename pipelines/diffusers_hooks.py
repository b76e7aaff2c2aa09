"""The hooks that diffusers and others put on modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from chipsparse.pipelines.patches import Patches

GROUP_OFFLOADING = "group_offloading"  # what diffusers calls that hook
# By which guidance computes a branch with a part of the model left out or blurred (perturbed
# attention, skip-layer, auto and smoothed-energy guidance). They replace what
# ``scaled_dot_product_attention`` computes, or read tokens as the rows of an image, and so want the
# model's own attention and its own order of tokens.
GUIDANCE_HOOKS = {
    "diffusers.hooks.layer_skip": "leaves out a part of some layers",
    "diffusers.hooks.smoothed_energy_guidance_utils": "blurs the queries of some layers",
}


def hooks_on(module: Any) -> Mapping[str, Any]:
    """Those on one module, by the names that diffusers gives them."""
    registry = getattr(module, "_diffusers_hook", None)
    return {} if registry is None else registry.hooks


def hooked_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules of a model that have hooks of accelerate or diffusers; shared ones may repeat.

    Every call of a transformer asks, and to ask each of ``modules()`` takes six times as long.
    """
    found = [model]
    for module in found:
        held = vars(module)
        if "_diffusers_hook" in held or "_hf_hook" in held:
            yield module
        found += [part for part in held["_modules"].values() if part is not None]


def has_foreign_hooks(module: Any, patches: Patches, *, is_whole_model: bool) -> bool:
    """Return whether a module runs hooks that are not among the patches.

    That of accelerate's model offload is none: it does nothing while the model is on its device.
    """
    if hooks_on(module) or (hasattr(module, "_hf_hook") and not is_whole_model):
        return True
    return any(
        number not in patches.hook_numbers
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for number in hooks
    )


def why_not_cached(model: Any) -> str | None:
    """The change that hooks of guidance make to a model now, in words; None without any."""
    for module in hooked_modules(model) if isinstance(model, torch.nn.Module) else ():
        for hook in hooks_on(module).values():
            done = GUIDANCE_HOOKS.get(type(hook).__module__)
            if done is not None:
                return f"guidance {done} ({type(hook).__name__})"
    return None

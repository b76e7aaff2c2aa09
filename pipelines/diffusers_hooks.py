"""The hooks that diffusers and others put on modules, and which caches of diffusers are refused.

Most caches (``enable_cache``) can be on a patched transformer. They pass over blocks or attention
modules, whose layers then miss what the others of their branch record, and make up for it at their
next call (see `AttentionLayer`).
"""

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

# Caches that take their place in the schedule from how often they were called.
COUNTING_CACHES = {"MagCacheHeadHook": "MagCache", "TaylorSeerCacheHook": "TaylorSeer"}


def hooks_on(module: Any) -> Mapping[str, Any]:
    """Return the hooks on one module, by the names that diffusers gives them."""
    registry = getattr(module, "_diffusers_hook", None)
    return {} if registry is None else registry.hooks


def hooked_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules of a model that have hooks of accelerate or diffusers; shared ones may repeat.

    Every call of a transformer asks, and to ask each of ``modules()`` takes six times as long.
    """
    modules = [model]
    for module in modules:
        held = vars(module)
        if "_diffusers_hook" in held or "_hf_hook" in held:
            yield module
        modules += [part for part in held["_modules"].values() if part is not None]


def has_foreign_hooks(module: Any, patches: Patches, *, is_whole_model: bool) -> bool:
    """Return whether a module runs hooks that are not among the patches.

    The hook of accelerate's model offload is not foreign: it does nothing while the model is on its
    device.
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
    for hook in hooks_of(model) if isinstance(model, torch.nn.Module) else ():
        done = GUIDANCE_HOOKS.get(type(hook).__module__)
        if done is not None:
            return f"guidance {done} ({type(hook).__name__})"
    return None


def why_caches_refused(transformer: torch.nn.Module, *, skips: bool) -> str | None:
    """Return why a transformer with the caches that are on it now cannot run sparse, or None."""
    for hook in hooks_of(transformer):
        name = type(hook).__name__
        if name == "FasterCacheDenoiserHook" and not hook.is_guidance_distilled:
            return (
                "FasterCache computes a part of the batch at some steps and the whole at others, "
                "so what chipsparse cached of one would be read for the other; give it "
                "is_guidance_distilled=True, or call disable_cache() on the transformer"
            )
        if skips and name in COUNTING_CACHES:
            return (
                f"{COUNTING_CACHES[name]} counts the transformer's calls as denoising steps, so it "
                "would lose its place where chipsparse skips one; take a schedule "
                "that skips none, such as schedule.spread with sparse: 1, "
                "or call disable_cache() on the transformer"
            )
    return None


def hooks_of(transformer: torch.nn.Module) -> Iterator[Any]:
    """The diffusers hooks on a model and its modules, by whatever function they were put there."""
    for module in hooked_modules(transformer):
        yield from hooks_on(module).values()


def transformers_of(pipe: Any) -> list[Any]:
    """The denoising models of a pipeline; Wan 2.2 has two."""
    return [
        module
        for name, module in pipe.components.items()
        if name.startswith("transformer") and isinstance(module, torch.nn.Module)
    ]

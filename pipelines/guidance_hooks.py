"""Hooks by which guidance computes a branch with a part of the model left out or blurred.

Perturbed attention, skip-layer, auto and smoothed-energy guidance put them on the model for one
branch of a step. They replace what ``scaled_dot_product_attention`` computes, or read tokens as the
rows of an image, and so want the model's own attention and its own order of tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from chipsparse.pipelines.diffusers_hooks import hooks_on

HOOKS = {
    "diffusers.hooks.layer_skip": "leaves out a part of some layers",
    "diffusers.hooks.smoothed_energy_guidance_utils": "blurs the queries of some layers",
}


def why_not_cached(model: Any) -> str | None:
    """What hooks of guidance do to a model now, in words; None without any, or where it is none."""
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        for hook in hooks_on(module).values():
            done = HOOKS.get(type(hook).__module__)
            if done is not None:
                return f"guidance {done} ({type(hook).__name__})"
    return None

"""Caches of diffusers on a patched transformer (``enable_cache``): which of them cannot be there.

Most can. They pass over blocks or attention modules, whose layers then miss what the others of
their branch record, and make up for it at their next call (see `AttentionLayer`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from chipsparse.pipelines.diffusers_hooks import hooked_modules, hooks_on

# Caches that take their place in the schedule from how often they were called.
COUNTING = {"MagCacheHeadHook": "MagCache", "TaylorSeerCacheHook": "TaylorSeer"}


def why_refused(transformer: torch.nn.Module, *, skips: bool) -> str | None:
    """Why a transformer with the caches that are on it now cannot run sparse, or None."""
    for hook in hooks_of(transformer):
        name = type(hook).__name__
        if name == "FasterCacheDenoiserHook" and not hook.is_guidance_distilled:
            return (
                "FasterCache computes a part of the batch at some steps and the whole at others, "
                "so what chipsparse cached of one would be read for the other; give it "
                "is_guidance_distilled=True, or call disable_cache() on the transformer"
            )
        if skips and name in COUNTING:
            return (
                f"{COUNTING[name]} counts the transformer's calls as denoising steps, so it would "
                "lose its place where chipsparse skips one; set schedule.between to all, or "
                "call disable_cache() on the transformer"
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

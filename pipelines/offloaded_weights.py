"""The memory that a model's weights will take on a device during a call, beside what is there."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

from chipsparse.pipelines.diffusers_hooks import GROUP_OFFLOADING, hooked_modules, hooks_on

# Of diffusers' group offloading: one computes, one arrives, and what belongs to no block stays.
GROUPS_AT_ONCE = 3


def pending_bytes(model: torch.nn.Module, device: torch.device) -> int:
    """Bytes of a model's weights that come to a device during a call, less those that leave it.

    - Offloading by models (accelerate's ``CpuOffload``) brings all weights, after it has sent the
      model before this one away.
    - Offloading in groups (diffusers) has a few groups there at a time.
    - Sequential offloading (accelerate, weights on ``meta``) brings one module at a time.

    May be negative: the model that leaves may be the larger one.
    """
    away = [parameter for parameter in model.parameters() if parameter.device != device]
    if device.type == "cpu" or not away:
        return 0
    groups = _group_sizes(model)
    if groups:
        return min(_nbytes(away), sum(sorted(groups)[-GROUPS_AT_ONCE:]))
    if any(parameter.is_meta for parameter in away):
        return max(_nbytes(module.parameters(recurse=False)) for module in model.modules())
    return _nbytes(away) - _leaving_bytes(model, device)


def autocast_bytes(model: torch.nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the copies in a dtype that ``torch.autocast`` keeps of a model's weights.

    It keeps those of float32 weights that could be trained, until it is left, unless its cache is
    off. Counted are all of them, whether they are there already or not.
    """
    if not torch.is_autocast_cache_enabled():
        return 0
    return sum(
        parameter.numel() * dtype.itemsize
        for parameter in model.parameters()
        if parameter.dtype == torch.float32 and parameter.requires_grad
    )


def _group_sizes(model: torch.nn.Module) -> list[int]:
    groups = {}
    for module in hooked_modules(model):
        hook = hooks_on(module).get(GROUP_OFFLOADING)
        if hook is not None:
            groups[id(hook.group)] = hook.group
    return [
        _nbytes(chain(group.parameters, *(module.parameters() for module in group.modules)))
        for group in groups.values()
    ]


def _leaving_bytes(model: torch.nn.Module, device: torch.device) -> int:
    """Bytes of the model that accelerate sends away when this one is called."""
    before: Any = getattr(getattr(model, "_hf_hook", None), "prev_module_hook", None)
    if not isinstance(getattr(before, "model", None), torch.nn.Module):
        return 0
    return _nbytes(
        parameter for parameter in before.model.parameters() if parameter.device == device
    )


def _nbytes(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of parameters, those that are named twice counted once."""
    return sum({id(parameter): parameter.nbytes for parameter in parameters}.values())

"""The device and dtype in which a transformer computes, and what its weights will take there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from chipsparse.common.machine import with_index
from chipsparse.pipelines.diffusers_hooks import GROUP_OFFLOADING, hooked_modules, hooks_on

UNUSED_PLACES = ("cpu", "disk", "meta")  # of a device map, where there is a GPU in it
# Of diffusers' group offloading: one computes, one arrives, and what belongs to no block stays.
GROUPS_AT_ONCE = 3


@dataclass(frozen=True)
class Execution:
    """The device and dtype in which the blocks of a transformer compute."""

    device: torch.device
    dtype: torch.dtype  # of what attention and feed-forward layers are given
    autocast: bool = False  # then the weights may have another dtype

    def __str__(self) -> str:
        how = ", under torch.autocast" if self.autocast else ""
        return f"{str(self.dtype).removeprefix('torch.')} on {self.device}{how}"


def execution_of(model: torch.nn.Module, weight: torch.Tensor, hidden: torch.Tensor) -> Execution:
    """The device and dtype of a call of a model, whose weights and inputs hooks may move."""
    check_undivided(model)
    device = _execution_device(model, weight, hidden)
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        wide = hidden.dtype == torch.float64  # autocast leaves it
        dtype = hidden.dtype if wide else torch.get_autocast_dtype(kind)
        return Execution(device, dtype, autocast=True)
    return Execution(device, hidden.dtype)


def check_undivided(model: torch.nn.Module) -> None:
    """Refuses a model whose parts run on several devices, by its device map."""
    places = getattr(model, "hf_device_map", None) or {}
    names = {str(_as_device(place)) for place in places.values() if place not in UNUSED_PLACES}
    if len(names) > 1:
        raise ValueError(
            f"this {type(model).__name__} is split over {', '.join(sorted(names))}; chipsparse "
            "runs a transformer on one device: load the pipeline with a device_map that leaves it "
            "whole, or call enable_model_cpu_offload()",
        )


def _execution_device(
    model: torch.nn.Module,
    weight: torch.Tensor,
    hidden: torch.Tensor,
) -> torch.device:
    """The weights' device; of those that are brought for the call, where they are brought to."""
    if weight.device.type not in ("cpu", "meta"):
        return weight.device
    for module in hooked_modules(model):
        for device in _hook_devices(module):
            return with_index(_as_device(device))
    return hidden.device if weight.is_meta else weight.device


def _hook_devices(module: Any) -> Iterator[Any]:
    """The devices to which hooks of accelerate and diffusers bring the weights of a module."""
    outer = getattr(module, "_hf_hook", None)
    for hook in getattr(outer, "hooks", [outer]):  # it may be several in one
        if getattr(hook, "execution_device", None) is not None:
            yield hook.execution_device
    group = hooks_on(module).get(GROUP_OFFLOADING)
    if group is not None:
        yield group.group.onload_device


def _as_device(place: Any) -> torch.device:
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)


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

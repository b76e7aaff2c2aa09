"""The device and dtype in which a transformer computes: not always those of its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from chipsparse.common.machine import with_index
from chipsparse.pipelines.diffusers_hooks import GROUP_OFFLOADING, hooked_modules, hooks_on

UNUSED_PLACES = ("cpu", "disk", "meta")  # of a device map, where there is a GPU in it


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
            "whole, or call enable_model_cpu_offload()"
        )


def _execution_device(
    model: torch.nn.Module, weight: torch.Tensor, hidden: torch.Tensor
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

"""A pipeline as it was before a run: what a run left on it, and everything put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# What diffusers makes in `cache_context`, and what it and accelerate leave of their own hooks.
REGISTRY = {"_diffusers_hook"}
LEFT_BY_HOOKS = {"_diffusers_hook", "forward", "_cache_config"}


class Kept:
    """Remembers the modules of a pipeline: weights, attributes, hooks, classes, processors."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._attributes = dict(vars(pipe))
        self._config = pipe._internal_dict
        self.modules = _modules(pipe)
        self._facts = {name: _facts(module) for name, module in self.modules.items()}
        self._processors = {
            name: (module.processor, dict(vars(module.processor)))
            for name, module in self.modules.items()
            if hasattr(module, "processor")
        }
        # Where each is held, by which name, itself, its memory and its values.
        self._tensors: list[tuple[dict[str, Any], str, Any, torch.Tensor, torch.Tensor]] = [
            (held, key, tensor, tensor.data, tensor.detach().clone())
            for module in self.modules.values()
            for held in (module._parameters, module._buffers)
            for key, tensor in held.items()
            if tensor is not None
        ]
        self._trained = {id(tensor): tensor.requires_grad for _, _, tensor, _, _ in self._tensors}

    def stock_processor(self, name: str) -> Any:
        """The processor that a module had."""
        return self._processors[name][0]

    def left(self, *, with_hooks: bool, values: bool) -> list[str]:
        """What is other than before on the modules, one sentence each.

        Args:
            with_hooks: whether the run had hooks of diffusers or accelerate, which leave a trace
                when they are taken off.
            values: whether the weights must be those of before.
        """
        ignored = LEFT_BY_HOOKS if with_hooks else REGISTRY
        found = []
        now = _modules(self._pipe)
        for name in now.keys() ^ self.modules.keys():
            found.append(f"module {name} {'came' if name in now else 'is gone'}")
        for name in now.keys() & self._facts.keys():
            for what, value in _facts(now[name]).items():
                before = self._facts[name][what]
                if what == "attributes":
                    found += [f"{name} has got {key}" for key in value - before - ignored]
                    found += [f"{name} has lost {key}" for key in before - value]
                elif value != before:
                    found.append(f"{what} of {name}: {before} before, {value} after")
        for name, (processor, attributes) in self._processors.items():
            if vars(processor) != attributes:
                found.append(f"the processor of {name} holds {vars(processor)}")
        for held, key, tensor, _, value in self._tensors:
            stands = held.get(key)
            # A module that is moved to another device gets other buffers.
            if values and stands is not tensor and isinstance(tensor, torch.nn.Parameter):
                found.append(f"another tensor stands for {key}")
            elif values and (stands is None or not _same(stands, value)):
                found.append(f"the values of {key} are others")
        return sorted(found)

    def restore(self) -> None:
        """Puts all of it back."""
        for held, key, tensor, data, value in self._tensors:
            held[key] = tensor
            tensor.data = data
            tensor.requires_grad_(self._trained[id(tensor)])  # which a LoRA ends
            with torch.no_grad():
                data.copy_(value)
        for name, module in self.modules.items():
            for key in vars(module).keys() - self._facts[name]["attributes"]:
                delattr(module, key)
        for name, (processor, _) in self._processors.items():
            self.modules[name].processor = processor
        for key in vars(self._pipe).keys() - self._attributes.keys():
            delattr(self._pipe, key)
        vars(self._pipe).update(self._attributes)


def _modules(pipe: Any) -> dict[str, torch.nn.Module]:
    return {
        f"{name}.{inner}".rstrip("."): module
        for name, component in pipe.components.items()
        if isinstance(component, torch.nn.Module)
        for inner, module in component.named_modules()
    }


def _facts(module: torch.nn.Module) -> dict[str, Any]:
    return {
        "class": type(module),
        "attributes": frozenset(vars(module)),
        "hooks": (len(module._forward_hooks), len(module._forward_pre_hooks)),
        "strides": {key: each.stride() for key, each in module.named_parameters(recurse=False)},
        "device": {key: str(each.device) for key, each in module.named_parameters(recurse=False)},
    }


def _same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        tensor.device == other.device and tensor.dtype == other.dtype and torch.equal(tensor, other)
    )


def linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    """The plain linears of a transformer's blocks, with their names."""
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and "blocks" in name and "lora" not in name:
            yield name, module

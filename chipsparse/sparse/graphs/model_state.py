"""A snapshot of what a model computes with besides its arguments, to detect a later change.

A captured step reads weights at the addresses that they had, and runs none of the model's Python.
What it depends on is all that the modules hold: parameters and buffers, other tensors, submodules,
hooks, adapters with their scales, processors with theirs, and settings that are plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PLAIN = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (dict, list, set)
# Values in which nothing can change: another one in their place is another object.
UNCHANGING = frozenset({*PLAIN, FunctionType, MethodType, BuiltinFunctionType})
# Values of tensors on another device than the model's are compared up to this size: a kernel may
# have got them as numbers. Of larger ones, such as weights that are offloaded, the address is.
MOST_COMPARED = 1 << 16
# How deep containers within containers are looked into. Of objects only those are that a module
# holds, as its processor, not what they lead to: that may be other models.
DEPTH = 4

# Further facts by name, compared by ==: what calls depend on outside of the model, as autocast.
Surroundings = Callable[[], Mapping[str, object]]


class ModelState:
    """The contents of a model at one time. To compare takes about a microsecond a module."""

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        *,
        ignored: Collection[str] = (),  # attributes that may hold whatever they like
        surroundings: Surroundings = dict,
    ) -> None:
        self._device_type = device.type
        self._ignored = frozenset(ignored)
        self._surroundings = surroundings
        self._around = dict(surroundings())
        self._empty: list[tuple[str, Collection[Any]]] = []
        # Containers with the keys and values that they had.
        self._held: list[tuple[str, Collection[Any], list[Any], list[Any]]] = []
        # Names of tensors, and what reads their addresses.
        self._tensors: list[tuple[str, Callable[[], object]]] = []
        self._compared: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._seen: set[int] = set()
        for name, module in model.named_modules():
            self._keep(name, vars(module), DEPTH)
        del self._seen
        self._empties = [container for _, container in self._empty]
        self._addresses = [address() for _, address in self._tensors]

    def change(self) -> str | None:
        """Return the name of something that changed since; None where nothing did."""
        now = dict(self._surroundings())
        for name, value in self._around.items():
            if now.get(name) != value:
                return name
        if any(self._empties):
            return next(name for name, container in self._empty if container)
        for name, container, keys, values in self._held:
            if not _are_same(container, keys, values):
                return _first_change(name, container, keys, values)
        for (name, address), before in zip(self._tensors, self._addresses, strict=True):
            if address() != before:
                return name
        for name, tensor, value in self._compared:
            if not torch.equal(tensor, value):
                return name
        return None

    def _keep(
        self,
        name: str,
        container: Collection[Any],
        depth: int,
        *,
        objects: bool = True,
    ) -> None:
        """Write down what a dict, list, tuple or set holds, and all that its values hold."""
        if not container:
            self._empty.append((name, container))
            return
        if id(container) in self._seen:
            return
        self._seen.add(id(container))
        keys = _keys(container)
        values = _values(container)
        if not isinstance(container, tuple):
            self._held.append((name, container, keys, values))
        for key, value in zip(keys, values, strict=True):
            if type(value) in UNCHANGING or key in self._ignored:
                continue
            inner = f"{name}.{key}" if name else str(key)
            if isinstance(value, torch.Tensor):
                self._keep_tensor(inner, value)
            elif depth == 0 or isinstance(value, (torch.nn.Module, type)):
                continue  # a module stands for itself: it has a name of its own
            elif isinstance(value, (*CONTAINERS, tuple)):
                self._keep(inner, value, depth - 1, objects=objects)
            elif objects and hasattr(value, "__dict__"):
                self._keep(inner, vars(value), depth, objects=False)

    def _keep_tensor(self, name: str, tensor: torch.Tensor) -> None:
        if id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        if _is_wrapper(tensor):
            self._tensors.append((name, partial(_inner_addresses, tensor)))
            return
        self._tensors.append((name, tensor.data_ptr))
        elsewhere = tensor.device.type not in (self._device_type, "meta")
        if elsewhere and tensor.numel() <= MOST_COMPARED:
            self._compared.append((name, tensor, tensor.detach().clone()))


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Return True where a tensor is made of others, as a quantized one, and has no own memory."""
    return bool(is_traceable_wrapper_subclass(tensor))


def _inner_addresses(tensor: torch.Tensor) -> object:
    if not _is_wrapper(tensor):
        return tensor.data_ptr()
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [_inner_addresses(getattr(tensor, name)) for name in names]


def _keys(container: Collection[Any]) -> list[Any]:
    return list(range(len(container)) if isinstance(container, list | tuple) else container)


def _values(container: Collection[Any]) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _are_same(container: Collection[Any], keys: list[Any], values: list[Any]) -> bool:
    if len(container) != len(keys):
        return False
    if isinstance(container, set):
        return all(key in container for key in keys)
    now = container
    if isinstance(container, dict):
        if list(container) != keys:
            return False
        now = container.values()
    return all(map(is_, now, values)) or all(map(_alike, now, values))


def _alike(value: object, other: object) -> bool:
    """Return True for one object, equal plain values, or lists of the same objects."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    # Models move tables anew that are there already.
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(is_, value, other))
    return isinstance(value, PLAIN) and value == other


def _first_change(name: str, container: Collection[Any], keys: list[Any], values: list[Any]) -> str:
    """Return the name of what was added to a container, taken from it or changed in it."""
    now = dict(zip(_keys(container), _values(container), strict=True))
    then = dict(zip(keys, values, strict=True))
    for key in [*now, *then]:
        if key not in now or key not in then or not _alike(now[key], then[key]):
            return f"{name}.{key}" if name else str(key)
    return name

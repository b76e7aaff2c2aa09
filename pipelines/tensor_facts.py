"""Facts read of tensors, remembered as long as they live and nobody writes to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

Fact = TypeVar("Fact")
Seen = list[tuple[TensorWeakRef, int | None]]  # each tensor and its version


class TensorFacts(Generic[Fact]):
    """A function of tensors that waits for the device once for each of them, not at every call.

    Pipelines pass the same masks and embeddings at every step, one of each for a guidance branch.
    """

    def __init__(self, read: Callable[..., Fact]) -> None:
        self._read = read
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __call__(self, *tensors: torch.Tensor) -> Fact:
        """The fact about these tensors, at least one, as they are now."""
        known: tuple[Seen, Fact] | None = self._known.get(tensors[0])
        if known is None or not _unchanged(known[0], tensors):
            seen = [(TensorWeakRef(tensor), _version(tensor)) for tensor in tensors]
            self._known[tensors[0]] = known = (seen, self._read(*tensors))
        return known[1]


def remembered(read: Callable[..., Fact]) -> cached_property[TensorFacts[Fact]]:
    """An attribute of a class: the `TensorFacts` of each instance."""
    return cached_property(lambda _: TensorFacts(read))


def _version(tensor: torch.Tensor) -> int | None:
    """Counts what was written to it; None where PyTorch does not."""
    return None if tensor.is_inference() else tensor._version


def _unchanged(seen: Seen, tensors: tuple[torch.Tensor, ...]) -> bool:
    return len(seen) == len(tensors) and all(
        known() is tensor and version == _version(tensor)
        for (known, version), tensor in zip(seen, tensors, strict=True)
    )

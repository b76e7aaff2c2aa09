"""What was read of a tensor, remembered as long as the tensor lives and nobody writes to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

Fact = TypeVar("Fact")


class TensorFacts(Generic[Fact]):
    """A function of a tensor that waits for the device once for each tensor, not at every call.

    Pipelines pass the same masks and embeddings at every step, one of each for a guidance branch.

    Args:
        read: computes the fact; may wait for the device.
    """

    def __init__(self, read: Callable[[torch.Tensor], Fact]) -> None:
        self._read = read
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __call__(self, tensor: torch.Tensor) -> Fact:
        """The fact about this tensor as it is now."""
        version = None if tensor.is_inference() else tensor._version
        known: tuple[int | None, Fact] | None = self._known.get(tensor)
        if known is None or known[0] != version:
            known = (version, self._read(tensor))
            self._known[tensor] = known
        return known[1]

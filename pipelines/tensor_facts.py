"""Facts read of tensors, remembered as long as they live and nobody writes to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from chipsparse.common.tensor_writes import is_compared, write_count

Fact = TypeVar("Fact")


@dataclass(frozen=True, eq=False)
class _Read:
    """A tensor when a fact was read of it."""

    tensor: TensorWeakRef
    address: int
    writes: int | None
    copy: torch.Tensor | None  # of an inference tensor, whose writes are not counted

    @classmethod
    def of(cls, tensor: torch.Tensor, *, undisturbed: bool) -> _Read:
        compared = is_compared(tensor, undisturbed=undisturbed)
        copy = tensor.clone() if compared else None
        return cls(TensorWeakRef(tensor), tensor.data_ptr(), write_count(tensor), copy)

    def is_still(self, tensor: torch.Tensor, *, undisturbed: bool) -> bool:
        if self.copy is None and is_compared(tensor, undisturbed=undisturbed):
            return False  # it was read where nobody but the pipeline could write to it
        if self.tensor() is not tensor or self.address != tensor.data_ptr():
            return False
        if self.writes != write_count(tensor):
            return False
        return self.copy is None or torch.equal(self.copy, tensor)


class TensorFacts(Generic[Fact]):
    """A function of tensors that waits for the device once for each of them, not at every call.

    Pipelines pass the same masks and embeddings at every step, one of each for a guidance branch.
    Unless the calls are undisturbed, inference tensors are compared at every call.
    """

    def __init__(
        self,
        read: Callable[..., Fact],
        undisturbed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._read = read
        self._undisturbed = undisturbed
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __call__(self, *tensors: torch.Tensor) -> Fact:
        """The fact about these tensors, at least one, as they are now."""
        known: tuple[list[_Read], Fact] | None = self._known.get(tensors[0])
        undisturbed = self._undisturbed()
        if known is None or not _are_still(known[0], tensors, undisturbed=undisturbed):
            seen = [_Read.of(tensor, undisturbed=undisturbed) for tensor in tensors]
            self._known[tensors[0]] = known = (seen, self._read(*tensors))
        return known[1]


def _are_still(seen: list[_Read], tensors: tuple[torch.Tensor, ...], *, undisturbed: bool) -> bool:
    return len(seen) == len(tensors) and all(
        read.is_still(tensor, undisturbed=undisturbed)
        for read, tensor in zip(seen, tensors, strict=True)
    )

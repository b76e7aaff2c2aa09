"""The conditions of a guidance branch's calls, and their changes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

# Names of arguments, of all transformers, that stay what they are as long as nobody asks for
# something else. Latents, timesteps, positions and outputs of ControlNets are not among them.
CONDITIONS = re.compile(
    "encoder|pooled|embed|guidance|mask|cond|control_|pose_|face_|feats|kwargs|history|clean"
    "|input_ids|fps"
)
PLAIN = (bool, int, float, str, type(None))


class _Seen(NamedTuple):
    """A tensor, kept so that its memory is not used again, and what is known without reading it."""

    tensor: torch.Tensor  # itself, not copied
    place: tuple[Any, ...]  # its address, sizes, strides and dtype
    version: int  # how often it was written to; 0 where PyTorch does not count that

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Seen:
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        return cls(tensor, place, _version(tensor))

    def is_same(self, before: _Seen) -> bool:
        """Return True where both hold the same; waits for the device if the memory is another."""
        if self.place == before.place:
            return self.version == before.version
        if self.place[1:2] + self.place[3:] != before.place[1:2] + before.place[3:]:
            return False
        return _version(before.tensor) == before.version and torch.equal(self.tensor, before.tensor)


class Conditioning:
    """The conditions of one call."""

    def __init__(self, arguments: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        watched = {name: value for name, value in arguments.items() if CONDITIONS.search(name)}
        self._parts = {
            (name, *place): value
            for name, whole in {**watched, **others}.items()
            for place, value in _parts(whole)
        }

    def change(self, before: Conditioning) -> str | None:
        """Return the name of a condition that has changed, or None."""
        new, old = self._parts, before._parts
        for key in new.keys() | old.keys():
            if key not in new or key not in old or not _are_same(new[key], old[key]):
                return key[0]
        return None


def _parts(whole: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the tensors and plain values of something with their place in it, and nothing else."""
    if isinstance(whole, torch.Tensor):
        yield (), _Seen.of(whole)
    elif isinstance(whole, PLAIN):
        yield (), whole
    elif isinstance(whole, Mapping | list | tuple):
        items = whole.items() if isinstance(whole, Mapping) else enumerate(whole)
        for key, inner in items:
            for place, value in _parts(inner):
                yield (key, *place), value


def _are_same(new: Any, old: Any) -> bool:
    if isinstance(new, _Seen) and isinstance(old, _Seen):
        return new.is_same(old)
    return type(new) is type(old) and bool(new == old)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version

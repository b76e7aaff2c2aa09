"""The conditions of a guidance branch's calls, and their changes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from chipsparse.common.tensor_writes import is_compared, write_count

# Names of arguments, of all transformers, that stay what they are as long as nobody asks for
# something else. Latents, timesteps, positions and outputs of ControlNets are not among them.
CONDITIONS = re.compile(
    "encoder|pooled|embed|guidance|mask|cond|control_|pose_|face_|feats|kwargs|history|clean"
    "|input_ids|fps",
)
PLAIN = (bool, int, float, str, type(None))


@dataclass(eq=False)
class _Seen:
    """A tensor at one call, kept so that its memory is not used again, and what tells of changes.

    PyTorch counts the writes to a tensor, except to one made under ``torch.inference_mode``. For
    such a tensor a copy is kept, unless nobody could write to it: to compare waits for the device.
    """

    tensor: torch.Tensor  # itself, not copied
    address: tuple[int, tuple[int, ...]]  # of its first number, and its strides
    form: tuple[Any, ...]  # its shape, dtype and device
    writes: int | None  # None: an inference tensor, whose writes are not counted
    copy: torch.Tensor | None = None  # of an inference tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Seen:
        address = tensor.data_ptr(), tensor.stride()
        form = tensor.shape, tensor.dtype, tensor.device
        return cls(tensor, address, form, write_count(tensor))

    def is_same(self, before: _Seen) -> bool:
        """Return True where both hold the same; waits for the device if the memory is another."""
        if self.form != before.form:
            return False
        if before.copy is not None:
            return torch.equal(self.tensor, before.copy)
        if self.address == before.address:
            return self.writes == before.writes
        unwritten = write_count(before.tensor) == before.writes
        return unwritten and torch.equal(self.tensor, before.tensor)


class Conditions:
    """The conditions of one call.

    Args:
        arguments: those of the call, by name.
        others: what else the output depends on, by name.
        undisturbed: whether nobody but the pipeline runs between the calls. Inference tensors on a
            GPU are then not compared.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        others: Mapping[str, Any],
        *,
        undisturbed: bool = False,
    ) -> None:
        watched = {name: value for name, value in arguments.items() if CONDITIONS.search(name)}
        self._undisturbed = undisturbed
        self._parts = {
            (name, *place): value
            for name, whole in {**watched, **others}.items()
            for place, value in _parts(whole)
        }

    def change(self, before: Conditions | None) -> str | None:
        """Return the name of a condition that differs from those of the call before, or None.

        Takes the copies that the next call is compared with.
        """
        new = self._parts
        old = new if before is None else before._parts
        changed = None
        for key in new.keys() | old.keys():
            if key not in new or key not in old or not _are_same(new[key], old[key]):
                changed = key[0]
                break
        for key, part in new.items():
            if isinstance(part, _Seen) and is_compared(part.tensor, undisturbed=self._undisturbed):
                known = old.get(key)
                if changed is None and isinstance(known, _Seen) and known.copy is not None:
                    part.copy = known.copy
                else:
                    part.copy = part.tensor.clone()
        return changed


def _parts(whole: object) -> Iterator[tuple[tuple[Any, ...], Any]]:
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


def _are_same(new: object, old: object) -> bool:
    if isinstance(new, _Seen) and isinstance(old, _Seen):
        return new.is_same(old)
    return type(new) is type(old) and bool(new == old)

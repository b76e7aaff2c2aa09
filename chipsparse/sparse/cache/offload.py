"""Caches in host memory, which pass through two slots per part on the device.

The cache of a layer's part (attention or MLP) has a home on the host for each of its tensors and,
while the layer computes, a slot on the device. Meanwhile the next layer's tensors arrive in the
other slot.

Nothing is ordered by the host. What must not overtake what:

- a slot is filled after its last reader and after its last tensors were written back;
- the computation starts after the slot is filled;
- a write-back starts after the computation that made the tensors, and after all loads from that
  home;
- a load starts after the last write-back to its home.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from chipsparse.config import Part
from chipsparse.reasons.reason import Reason
from chipsparse.report.recorder import Traffic
from chipsparse.sparse.cache.copies import HostCopies, Mark, copies_for
from chipsparse.sparse.cache.host_memory import HostBlock, HostMemory
from chipsparse.sparse.cache.placement import Sizes, slot_sizes
from chipsparse.sparse.cache.tensors import Kept
from chipsparse.sparse.cost_model.run_times import SLOTS

Key = tuple[str, int, Part]  # branch, layer, part

ALIGNMENT = 512  # bytes; as PyTorch aligns allocations


@dataclass(frozen=True)
class _Form:
    """The dtype, shape and strides of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Form:
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride())

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last element, gaps between them included.

        The padding of the last neuron's tokens comes after it: a slot has room for that, a copy
        does without.
        """
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.stride, strict=True)
        return (1 + sum((size - 1) * stride for size, stride in steps)) * self.dtype.itemsize

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        whole = memory[: self.nbytes].view(self.dtype)
        return whole.as_strided(self.shape, self.stride)


@dataclass(eq=False)
class _Home:
    """The host memory of one part's tensors, uint8 ``[n]`` each, and what was stored there."""

    memory: dict[Kept, torch.Tensor]
    forms: dict[Kept, _Form] = field(default_factory=dict)
    written: Mark = None  # by a copy from the device
    read: Mark = None  # by a copy to the device


@dataclass(eq=False)
class _Slot:
    """Memory on the device for the tensors of one part, uint8 ``[n]`` each."""

    memory: dict[Kept, torch.Tensor]
    key: Key | None = None
    loaded: set[Kept] = field(default_factory=set)
    filled: Mark = None  # by a copy from the host
    used: Mark = None  # by the computation, last
    emptied: Mark = None  # by a copy to the host
    busy: bool = False  # between load or store and release
    turn: int = 0


@dataclass(eq=False)
class _Opened:
    homes: dict[Key, _Home] = field(default_factory=dict)
    slots: dict[Part, list[_Slot]] = field(default_factory=dict)
    blocks: list[HostBlock] = field(default_factory=list)


class OffloadPool:
    """The caches of one generation that live in host memory."""

    def __init__(
        self,
        host: HostMemory,  # may be shared with other pools
        notify: Callable[[Reason], None],  # is told what is slower than planned
        *,
        copies: Callable[[torch.device], HostCopies] = copies_for,
    ) -> None:
        self.host = host
        self._notify = notify
        self._copies_for = copies
        self._copies: HostCopies = HostCopies()
        self._opened = _Opened()
        self._turn = 0
        self._traffic: dict[tuple[int, Part], Traffic] = {}

    def open(self, sizes: Mapping[Key, Sizes], device: torch.device) -> None:
        """Make room for tensors of at most these bytes; a `MemoryError` leaves all as before."""
        if not sizes:
            return
        if not self._opened.blocks:
            self._copies = self._copies_for(device)
        total = sum(map(_aligned_total, sizes.values()))
        block = self.host.acquire(total, pin=device.type == "cuda", notify=self._notify)
        self._opened.blocks.append(block)
        memory = block.memory
        for key, of_part in sizes.items():
            self._opened.homes[key] = _Home(_cut(memory, of_part))
            memory = memory[_aligned_total(of_part) :]
        self._open_slots(sizes, device)

    def _open_slots(self, sizes: Mapping[Key, Sizes], device: torch.device) -> None:
        present = self.slots
        wanted = slot_sizes({**{(part,): slot for part, slot in present.items()}, **sizes})
        for part, of_slot in wanted.items():
            if of_slot == present.get(part):
                continue
            if part in present:
                self._copies.synchronize()
            total = _aligned_total(of_slot)
            with torch.inference_mode(False):
                memory = [
                    torch.empty(total, dtype=torch.uint8, device=device) for _ in range(SLOTS)
                ]
            # What had the memory before may still be computing there.
            self._opened.slots[part] = [
                _Slot(_cut(whole, of_slot), used=self._copies.mark()) for whole in memory
            ]

    def reset(self) -> None:
        """Forget all tensors and free the slots, once copies are done; keep the host memory."""
        opened = self._opened
        self._opened = _Opened()
        try:
            if opened.blocks:
                self._copies.synchronize()
        finally:
            for block in opened.blocks:
                self.host.release(block)
            self._copies = HostCopies()
            self._traffic = {}

    def leave(self) -> None:
        """Forget all tensors on a GPU that is stuck; their host memory is never freed."""
        self._opened = _Opened()
        self._copies = HostCopies()
        self._traffic = {}
        self.host.leave()

    def close(self) -> None:
        """Forget all tensors, and give host memory back to the system."""
        self.reset()
        self.host.free_spare()

    @property
    def slots(self) -> dict[Part, dict[Kept, int]]:
        """The bytes of each tensor in one slot of each part."""
        return {
            part: {kept: memory.numel() for kept, memory in slots[0].memory.items()}
            for part, slots in self._opened.slots.items()
        }

    def take_traffic(self) -> dict[tuple[int, Part], Traffic]:
        """Return what was copied for each part of a layer since this was last called."""
        moved = self._traffic
        self._traffic = {}
        return moved

    def _count(self, key: Key, *, to_device: int = 0, to_host: int = 0) -> None:
        before = self._traffic.get(key[1:], Traffic())
        self._traffic[key[1:]] = Traffic(before.to_device + to_device, before.to_host + to_host)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors that are stored in host memory."""
        homes = self._opened.homes.values()
        return sum(form.nbytes for home in homes for form in home.forms.values())

    def forget(self, key: Key) -> None:
        """Void what was stored for a part; the next tensors get the same memory."""
        home = self._opened.homes.get(key)
        if home is not None:
            home.forms.clear()

    def drop(self, key: Key) -> None:
        """Give up a part's home; its memory is freed with all others."""
        self._opened.homes.pop(key, None)

    def __contains__(self, key: Key) -> bool:
        """Return True where a part's cache lives here: it has a home, filled or not."""
        return key in self._opened.homes

    def has(self, key: Key, kept: Kept) -> bool:
        """Return True where a tensor of a part is stored here."""
        home = self._opened.homes.get(key)
        return home is not None and kept in home.forms

    def load(self, key: Key, wanted: Collection[Kept]) -> dict[Kept, torch.Tensor]:
        """Bring stored tensors to the device; they may be changed until `release`."""
        home = self._opened.homes[key]
        slot = self._fill(key, wanted)
        self._copies.wait([slot.filled])
        self._take(slot)
        return {
            kept: form.view(slot.memory[kept])
            for kept, form in home.forms.items()
            if kept in wanted
        }

    def prefetch(self, key: Key, wanted: Collection[Kept]) -> None:
        """Start to load stored tensors, where a slot is not in use."""
        slots = self._opened.slots[key[2]]
        if not all(slot.busy for slot in slots) and any(self.has(key, kept) for kept in wanted):
            self._fill(key, wanted)

    def store(self, key: Key, tensors: Mapping[Kept, torch.Tensor]) -> None:
        """Keep tensors: new ones, or ones that `load` gave after they were changed.

        Their memory may be reused as soon as this returns. Raises `RuntimeError` where a tensor is
        larger than planned.
        """
        if not tensors:
            return
        home = self._opened.homes[key]
        slot = self._slot_of(key)
        self._take(slot)
        views = {}
        for kept, tensor in tensors.items():
            form = _Form.of(tensor)
            planned = home.memory[kept].numel()
            if form.nbytes > planned:
                raise RuntimeError(
                    f"{kept.field} of layer {key[1]} takes {form.nbytes} bytes "
                    f"({list(tensor.shape)} in {tensor.dtype}), and {planned} were planned",
                )
            home.forms[kept] = form
            views[kept] = form.view(slot.memory[kept])
        new = [kept for kept, view in views.items() if view.data_ptr() != tensors[kept].data_ptr()]
        if new:  # nothing may still arrive in the slot, and nothing still leave it
            self._copies.wait([slot.filled, slot.emptied])
        for kept in new:
            views[kept].copy_(tensors[kept])
        slot.used = self._copies.mark()
        for kept in tensors:
            count = home.forms[kept].nbytes
            slot.emptied = home.written = self._copies.to_host(
                home.memory[kept][:count],
                slot.memory[kept][:count],
                [slot.used, home.read],
            )
            self._count(key, to_host=count)

    def release(self, key: Key) -> None:
        """End the use of a part's tensors; what `load` gave for them is void from here on."""
        slot = self._held_by(key)
        if slot is None:
            return
        slot.used = self._copies.mark()
        slot.busy = False
        slot.key = None
        slot.loaded.clear()

    def _fill(self, key: Key, wanted: Collection[Kept]) -> _Slot:
        """Start the copies of these tensors that are not in the slot of their part yet."""
        home = self._opened.homes[key]
        slot = self._slot_of(key)
        for kept, form in home.forms.items():
            if kept in wanted and kept not in slot.loaded:
                count = form.nbytes
                slot.filled = home.read = self._copies.to_device(
                    slot.memory[kept][:count],
                    home.memory[kept][:count],
                    [slot.used, slot.emptied, home.written],
                )
                slot.loaded.add(kept)
                self._count(key, to_device=count)
        return slot

    def _take(self, slot: _Slot) -> None:
        self._turn += 1
        slot.busy = True
        slot.turn = self._turn

    def _held_by(self, key: Key) -> _Slot | None:
        return next((slot for slot in self._opened.slots[key[2]] if slot.key == key), None)

    def _slot_of(self, key: Key) -> _Slot:
        """Return the slot of a part, or the one that was not used for longest, emptied."""
        slot = self._held_by(key)
        if slot is None:
            free = [slot for slot in self._opened.slots[key[2]] if not slot.busy]
            slot = min(free, key=lambda slot: (slot.key is not None, slot.turn))
            slot.key = key
            slot.loaded.clear()
            self._turn += 1
            slot.turn = self._turn
        return slot


def _cut(memory: torch.Tensor, sizes: Sizes) -> dict[Kept, torch.Tensor]:
    """Cut memory, uint8 ``[n]``, into pieces of these sizes at aligned offsets."""
    pieces = {}
    first = 0
    for kept, size in sizes.items():
        pieces[kept] = memory[first : first + size]
        first += _aligned(size)
    return pieces


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _aligned_total(sizes: Sizes) -> int:
    return sum(map(_aligned, sizes.values()))

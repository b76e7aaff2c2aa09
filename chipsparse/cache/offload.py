"""Caches in host memory, which pass through two slots per kind on the device.

Every tensor has a place in host memory and, while a layer uses it, a slot. `load` brings it there
and lets the computation wait for it, `prefetch` starts that early, `store` keeps a new or changed
tensor, `release` ends its use. While one layer computes in one slot, the next one's tensor arrives
in the other.

Nothing is ordered by the host. What must not overtake what:

- a slot is filled after its last reader and after its last tensor was written back;
- the computation starts after the slot is filled;
- a write-back starts after the computation that made the tensor, and after all loads from that
  place in host memory;
- a load starts after the last write-back to its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from chipsparse.cache.copies import HostCopies, Mark, copies_for
from chipsparse.cache.host_memory import HostBlock, HostMemory
from chipsparse.cache.kinds import KINDS
from chipsparse.cache.placement import SLOTS, slot_sizes
from chipsparse.cache.tensors import CachedTensor
from chipsparse.config import Part
from chipsparse.report.recorder import Traffic

Key = tuple[str, int, str]  # branch, layer, kind

ALIGNMENT = 512  # bytes; as PyTorch aligns allocations
POISON = 0xFF  # NaN in every floating dtype


@dataclass(frozen=True)
class _Form:
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Form:
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride())

    @property
    def nbytes(self) -> int:
        """From the first to the last element, gaps between them included.

        What pads the tokens of the last neuron is behind it: a slot has room for that, a copy
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
class _Place:
    """Where a tensor lives in host memory."""

    memory: torch.Tensor
    form: _Form | None = None  # None: nothing was stored yet
    written: Mark = None
    read: Mark = None


@dataclass(eq=False)
class _Slot:
    memory: torch.Tensor
    key: Key | None = None
    filled: Mark = None  # by a copy from the host
    used: Mark = None  # by the computation, last
    emptied: Mark = None  # by a copy to the host
    busy: bool = False  # between load or store and release
    turn: int = 0


@dataclass(eq=False)
class _Opened:
    places: dict[Key, _Place] = field(default_factory=dict)
    slots: dict[str, list[_Slot]] = field(default_factory=dict)
    blocks: list[HostBlock] = field(default_factory=list)


class OffloadPool:
    """The tensors of one generation that live in host memory.

    Args:
        host: where memory comes from and goes back to; may be shared with other pools.
        notify: gets a sentence about what is slower or elsewhere than planned.
        copies: makes copies for a device.
        poison: overwrite slots as soon as nothing needs them, so that a late use shows (tests).
    """

    def __init__(
        self,
        host: HostMemory,
        notify: Callable[[str], None],
        *,
        copies: Callable[[torch.device], HostCopies] = copies_for,
        poison: bool = False,
    ) -> None:
        self.host = host
        self._notify = notify
        self._copies_for = copies
        self._poison = poison
        self._copies: HostCopies = HostCopies()
        self._opened = _Opened()
        self._turn = 0
        self._traffic: dict[tuple[int, Part], Traffic] = {}

    def open(self, sizes: Mapping[Key, int], device: torch.device) -> None:
        """Makes room for tensors of at most so many bytes each, beside what is there already.

        Raises:
            MemoryError: if the host has no room; the pool is then as before.
        """
        if not sizes:
            return
        if not self._opened.blocks:
            self._copies = self._copies_for(device)
        total = sum(_aligned(size) for size in sizes.values())
        block = self.host.acquire(total, pin=device.type == "cuda", notify=self._notify)
        self._opened.blocks.append(block)
        first = 0
        for key, size in sizes.items():
            self._opened.places[key] = _Place(block.memory[first : first + size])
            first += _aligned(size)
        self._open_slots(sizes, device)

    def _open_slots(self, sizes: Mapping[Key, int], device: torch.device) -> None:
        places = enumerate(sizes.items())
        largest = slot_sizes({(place, kind): size for place, ((_, _, kind), size) in places})
        with torch.inference_mode(False):
            for kind, size in largest.items():
                present = self._opened.slots.get(kind, [])
                if present and present[0].memory.numel() >= size:
                    continue
                if present:
                    self._settle()
                memory = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
                # What had the memory before may still be computing there.
                self._opened.slots[kind] = [
                    _Slot(each, used=self._copies.mark()) for each in memory
                ]

    def reset(self) -> None:
        """Forgets all tensors; frees the slots, and keeps the host memory for the next generation.

        Waits for copies under way. Harmless where nothing is open.
        """
        opened, self._opened = self._opened, _Opened()
        try:
            if opened.blocks:
                self._settle()
        finally:
            for block in opened.blocks:
                self.host.release(block)
            self._copies = HostCopies()
            self._traffic = {}

    def _settle(self) -> None:
        try:
            self._copies.synchronize()
        except KeyboardInterrupt:  # memory may not be freed before the last copy is done
            self._copies.synchronize()
            raise

    def close(self) -> None:
        """As `reset`, and gives the host memory back to the system."""
        self.reset()
        self.host.free_spare()

    @property
    def slots(self) -> dict[str, int]:
        """Bytes of one slot of each kind on the device."""
        return {kind: slots[0].memory.numel() for kind, slots in self._opened.slots.items()}

    def take_traffic(self) -> dict[tuple[int, Part], Traffic]:
        """What was copied of the caches of each part of a layer since this was last asked."""
        moved, self._traffic = self._traffic, {}
        return moved

    def _count(self, key: Key, *, to_device: int = 0, to_host: int = 0) -> None:
        _, layer, kind = key
        place = layer, KINDS[kind].part
        before = self._traffic.get(place, Traffic())
        self._traffic[place] = Traffic(before.to_device + to_device, before.to_host + to_host)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all stored tensors."""
        forms = (place.form for place in self._opened.places.values())
        return sum(form.nbytes for form in forms if form is not None)

    def drop(self, key: Key) -> None:
        """Gives up the place of a tensor, which lives elsewhere from now on."""
        del self._opened.places[key]

    def __contains__(self, key: Key) -> bool:
        """Whether a tensor lives here: it has a place, filled or not."""
        return key in self._opened.places

    def has(self, key: Key) -> bool:
        """Whether a tensor was stored."""
        place = self._opened.places.get(key)
        return place is not None and place.form is not None

    def load(self, key: Key) -> torch.Tensor:
        """A stored tensor on the device, for use until `release`. It may be changed in place."""
        slot = self._slot_of(key) or self._fill(key)
        place = self._opened.places[key]
        assert place.form is not None
        self._copies.wait([slot.filled])
        self._take(slot)
        return place.form.view(slot.memory)

    def prefetch(self, key: Key) -> None:
        """Starts to load a stored tensor, where a slot is not in use."""
        slots = self._opened.slots[key[2]]
        if self.has(key) and self._slot_of(key) is None and not all(slot.busy for slot in slots):
            self._fill(key)

    def takes(self, key: Key, tensor: torch.Tensor) -> bool:
        """Whether a tensor is no larger than planned."""
        return _Form.of(tensor).nbytes <= self._opened.places[key].memory.numel()

    def store(self, key: Key, tensor: torch.Tensor) -> None:
        """Keeps a tensor: a new one, or the one that `load` gave after it was changed.

        Its memory may be reused as soon as this returns.
        """
        assert self.takes(key, tensor)
        place, slot = self._opened.places[key], self._slot_of(key) or self._next(key[2])
        slot.key = key
        self._take(slot)
        place.form = form = _Form.of(tensor)
        view = form.view(slot.memory)
        if view.data_ptr() != tensor.data_ptr():
            # Nothing may still arrive in the slot, and nothing still leave it.
            self._copies.wait([slot.filled, slot.emptied])
            view.copy_(tensor)
        slot.used = self._copies.mark()
        count = form.nbytes
        slot.emptied = place.written = self._copies.to_host(
            place.memory[:count], slot.memory[:count], [slot.used, place.read]
        )
        self._count(key, to_host=count)

    def release(self, *keys: Key) -> None:
        """Ends the use of tensors; what `load` gave for them is void from here on."""
        slots = [slot for key in keys if (slot := self._slot_of(key)) is not None]
        if not slots:
            return
        used = self._copies.mark()
        for slot in slots:
            slot.used, slot.busy, slot.key = used, False, None
            if self._poison:
                self._copies.wait([slot.filled, slot.emptied])
                slot.memory.fill_(POISON)
                slot.used = self._copies.mark()

    def _fill(self, key: Key) -> _Slot:
        slot, place = self._next(key[2]), self._opened.places[key]
        assert place.form is not None
        count = place.form.nbytes
        slot.key = key
        slot.filled = place.read = self._copies.to_device(
            slot.memory[:count], place.memory[:count], [slot.used, slot.emptied, place.written]
        )
        self._turn += 1
        slot.turn = self._turn
        self._count(key, to_device=count)
        return slot

    def _take(self, slot: _Slot) -> None:
        self._turn += 1
        slot.busy, slot.turn = True, self._turn

    def _next(self, kind: str) -> _Slot:
        """The slot that was not used for longest; what was loaded ahead in it is dropped."""
        free = [slot for slot in self._opened.slots[kind] if not slot.busy]
        return min(free, key=lambda slot: (slot.key is not None, slot.turn))

    def _slot_of(self, key: Key) -> _Slot | None:
        return next((slot for slot in self._opened.slots[key[2]] if slot.key == key), None)


class HostedTensor(CachedTensor):
    """A layer's tensor that lives in host memory, and is on the device for the time it is used.

    Args:
        pool: holds the tensor.
        key: under which it does.
        rewritten: whether layers change it in place, so that it must be stored after each use.
    """

    def __init__(self, pool: OffloadPool, key: Key, *, rewritten: bool) -> None:
        self._pool = pool
        self._key = key
        self._rewritten = rewritten
        self._loaded: torch.Tensor | None = None

    @property
    def is_set(self) -> bool:
        """Whether the layer has recorded it, wherever it is now."""
        return super().is_set or self._pool.has(self._key)

    def load(self) -> None:
        """Brings it to the device, where it was recorded, until `put_away`."""
        if self._pool.has(self._key):
            self._tensor = self._loaded = self._pool.load(self._key)

    def fits(self) -> bool:
        """Whether what the layer made in its place is no larger than planned."""
        return self._tensor is None or self._pool.takes(self._key, self._tensor)

    def put_away(self) -> None:
        """Stores what the layer made or changed, and frees the device; the slot stays in use."""
        tensor, loaded = self._tensor, self._loaded
        self._tensor = self._loaded = None
        if tensor is not None and (tensor is not loaded or self._rewritten):
            self._pool.store(self._key, tensor)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT

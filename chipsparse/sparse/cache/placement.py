"""The home of every layer's caches: the device, host memory, or nowhere.

A pure decision from byte counts and two capacities. The cache of a layer's part (attention or MLP)
has one home as a whole. Caches on the host pass through two slots per part on the device. A
part that fits nowhere runs dense at every step. The parts that save most work per byte are placed
first, and of equal ones the later layers: the first attend most evenly, so their columns hold the
least softmax mass (benchmarks/results/captured_mass_h200.json).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from chipsparse.common.byte_sizes import format_bytes
from chipsparse.config import Action, LayerPart, Part, SparsityConfig
from chipsparse.sparse.cache.tensors import Kept, read_and_written
from chipsparse.sparse.cost_model.run_times import SLOTS

Sizes = Mapping[Kept, int]  # bytes of each tensor

# What moves both ways at a sparse step stays on the device first.
FIRST_ON_DEVICE: tuple[Part, ...] = ("mlp", "attention")
NO_ROOM = "its caches do not fit into the memory budgets"
TOO_SLOW_TO_MOVE = (
    "its caches do not fit on the device, and to move them is estimated to take longer than to "
    "compute it"
)


@dataclass(frozen=True)
class Capacity:
    """Bytes that caches may take."""

    device: int  # on the device, slots included
    host: int  # in host memory besides; 0 where nothing may or need go there

    def __str__(self) -> str:
        device, host = (format_bytes(max(0, size)) for size in (self.device, self.host))
        return f"{device} on the device and {host} of host memory"


@dataclass(frozen=True)
class PartNeed:
    """The tensors that one layer part wants to keep, and what that saves."""

    layer: int
    part: Part
    sizes: Sizes
    saved: float  # work that a sparse step of it saves, in any unit that all parts share
    movable: bool = True  # False where moving it between host and device takes longer than it saves

    @property
    def key(self) -> LayerPart:
        """The layer and part."""
        return self.layer, self.part

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(self.sizes.values())


@dataclass(frozen=True)
class Placement:
    """The decision for one guidance branch."""

    # Bytes of each (layer, part) that stays on the device.
    device: Mapping[LayerPart, Sizes] = field(default_factory=dict)
    # The same of those that live in host memory.
    host: Mapping[LayerPart, Sizes] = field(default_factory=dict)
    # Why each (layer, part) that is kept nowhere runs dense.
    dense: Mapping[LayerPart, str] = field(default_factory=dict)

    @property
    def slots(self) -> dict[Part, dict[Kept, int]]:
        """Bytes of one slot of each part that has caches on the host."""
        return slot_sizes(self.host)

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots, which branches share."""
        return SLOTS * _total(self.slots)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device of one branch, without slots."""
        return _total(self.device)

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory of one branch."""
        return _total(self.host)

    def moved(
        self,
        config: SparsityConfig,
        layer: int,
        part: Part,
        action: Action,
    ) -> tuple[int, int]:
        """Return the bytes that a part reads from host memory in a step, and that it writes."""
        sizes = self.host.get((layer, part), {})
        read, written = (
            sum(size for kept, size in sizes.items() if kept in moved)
            for moved in read_and_written(config, part, action)
        )
        return read, written


def _total(home: Mapping[Any, Sizes]) -> int:
    return sum(sum(sizes.values()) for sizes in home.values())


def slot_sizes(host: Mapping[Any, Sizes]) -> dict[Part, dict[Kept, int]]:
    """Return the bytes of one slot of each part: those of its largest tensors."""
    slots: dict[Part, dict[Kept, int]] = {}
    for (*_, part), sizes in host.items():
        slot = slots.setdefault(part, {})
        for kept, size in sizes.items():
            slot[kept] = max(size, slot.get(kept, 0))
    return slots


def place(
    needs: Iterable[PartNeed],  # of one branch
    capacity: Capacity,  # for all branches
    *,
    branches: int = 1,  # that keep caches of their own and share the slots
    open_slots: Mapping[Part, Sizes] | None = None,  # that are there already
    prefer_host: bool = False,  # put everything on the host that fits there
) -> Placement:
    """Place as many layer parts as the capacities hold; the same for every branch."""
    ranked = sorted(
        needs,
        key=lambda need: (need.saved / max(need.nbytes, 1), need.layer, need.part),
        reverse=True,
    )
    homes = _Homes(capacity, branches, open_slots or {}, prefer_host)
    # Unmovable parts, placed first, can use up the room for slots. So movable parts first is tried
    # as well.
    movable_first = sorted(ranked, key=lambda need: not need.movable)
    kept = max(
        (homes.those_that_fit(order) for order in (ranked, movable_first)),
        key=lambda chosen: sum(need.saved for need in chosen),
    )
    return replace(
        homes.assign(kept) or Placement(),
        dense={
            need.key: NO_ROOM
            if need.movable or prefer_host or capacity.host <= 0
            else TOO_SLOW_TO_MOVE
            for need in ranked
            if need not in kept
        },
    )


@dataclass(frozen=True)
class _Homes:
    """The arguments of `place`, and the homes of some of the parts."""

    capacity: Capacity
    branches: int
    open_slots: Mapping[Part, Sizes]
    prefer_host: bool

    def those_that_fit(self, ranked: list[PartNeed]) -> list[PartNeed]:
        if self.assign(ranked) is not None:
            return ranked
        kept: list[PartNeed] = []
        for need in ranked:
            if self.assign([*kept, need]) is not None:
                kept.append(need)
        return kept

    def assign(self, needs: list[PartNeed]) -> Placement | None:
        """Return device or host for each of these parts; None where they do not fit."""
        sizes = {need.key: need.sizes for need in needs}
        if not self.prefer_host and self._left(sizes, {}) >= 0:
            return Placement(sizes)
        moves = {need.key for need in needs if need.movable or self.prefer_host}
        device = {key: sizes[key] for key in sizes if key not in moves}
        host = {key: sizes[key] for key in sizes if key in moves}
        for part in () if self.prefer_host else FIRST_ON_DEVICE:
            own = sorted(key for key in host if key[1] == part)
            for keys in (own, self._most(own, device, host)):
                on_device = device | {key: sizes[key] for key in keys}
                on_host = {key: sizes[key] for key in host if key not in on_device}
                if self._left(on_device, on_host) >= 0:
                    device = on_device
                    host = on_host
                    break
        fits = self._left(device, host) >= 0 and self.branches * _total(host) <= self.capacity.host
        return Placement(device, host) if fits else None

    def _left(self, device: Mapping[LayerPart, Sizes], host: Mapping[LayerPart, Sizes]) -> int:
        present = {(part,): sizes for part, sizes in self.open_slots.items()}
        new_slots = _total(slot_sizes({**present, **host})) - _total(present)
        return self.capacity.device - self.branches * _total(device) - SLOTS * new_slots

    def _most(
        self,
        keys: list[LayerPart],
        device: Mapping[LayerPart, Sizes],
        host: Mapping[LayerPart, Sizes],
    ) -> list[LayerPart]:
        """Return as many as fit, at even distances, so that loads find time between."""
        if not keys:
            return []
        largest = max(sum(host[key].values()) for key in keys)
        count = self._left(device, host) // (self.branches * max(1, largest))
        count = max(0, min(len(keys), count))
        return [keys[index * len(keys) // count] for index in range(count)]

"""The home of every layer's caches: the device, host memory, or nowhere.

A pure decision from byte counts and two capacities. The cache of a layer's part (attention or MLP)
lives in one place as a whole. Caches on the host pass through two slots per part on the device. A
part that fits nowhere is recomputed: it runs dense at every step. The parts that save most work per
byte are placed first, and of equal ones the later layers: the first attend most evenly, so their
columns hold the least softmax mass (benchmarks/results/captured_mass_h200.json).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from chipsparse.cache.kinds import read_kinds, written_kinds
from chipsparse.config import Part, SparsityConfig
from chipsparse.cost_model.run_times import SLOTS
from chipsparse.plan import Action

Sizes = Mapping[str, int]  # bytes by kind of tensor
LayerPart = tuple[int, Part]

# What moves both ways at a sparse step stays on the device first.
FIRST_ON_DEVICE: tuple[Part, ...] = ("mlp", "attention")


@dataclass(frozen=True)
class PartNeed:
    """The wish of one layer part.

    Attributes:
        layer: number of the transformer block.
        part: attention or feed-forward layer.
        sizes: bytes of each kind of tensor.
        saved: work that a sparse step of it saves, in any unit that all parts share.
        movable: True where it may live in host memory; False where moving it takes longer than it
            saves.
    """

    layer: int
    part: Part
    sizes: Sizes
    saved: float
    movable: bool = True

    @property
    def key(self) -> LayerPart:
        """The layer and part."""
        return self.layer, self.part

    @property
    def nbytes(self) -> int:
        """Bytes of all kinds."""
        return sum(self.sizes.values())


@dataclass(frozen=True)
class Placement:
    """The decision for one guidance branch.

    Attributes:
        device: bytes by kind of each (layer, part) that stays on the device.
        host: the same of those that live in host memory.
        recomputed: each (layer, part) that is kept nowhere and runs dense.
        immovable: those of them that had to stay on the device, since moving takes too long.
    """

    device: Mapping[LayerPart, Sizes] = field(default_factory=dict)
    host: Mapping[LayerPart, Sizes] = field(default_factory=dict)
    recomputed: frozenset[LayerPart] = frozenset()
    immovable: frozenset[LayerPart] = frozenset()

    @property
    def kept(self) -> Mapping[LayerPart, Sizes]:
        """Bytes by kind of each (layer, part) that is kept, wherever it lives."""
        return {**self.device, **self.host}

    @property
    def slots(self) -> dict[Part, dict[str, int]]:
        """Bytes by kind of one slot of each part that has caches on the host."""
        return slot_sizes(self.host)

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots together."""
        return SLOTS * sum(_total(kinds) for kinds in self.slots.values())

    @property
    def device_bytes(self) -> int:
        """Bytes on the device, slots not included."""
        return sum(map(_total, self.device.values()))

    @property
    def host_bytes(self) -> int:
        """Bytes on the host."""
        return sum(map(_total, self.host.values()))

    def why_recomputed(self, layer: int, part: Part) -> str:
        """Return why one of the `recomputed` is kept nowhere."""
        if (layer, part) in self.immovable:
            return (
                "its caches do not fit on the device, and to move them is estimated to take longer "
                "than to compute it"
            )
        return "its caches do not fit into the memory budgets"

    def moved(
        self, config: SparsityConfig, layer: int, part: Part, action: Action
    ) -> tuple[int, int]:
        """Return the bytes that a part reads from host memory in a step, and that it writes."""
        sizes = self.host.get((layer, part), {})
        read, written = (kinds(config, part, action) for kinds in (read_kinds, written_kinds))
        return (
            sum(size for kind, size in sizes.items() if kind in read),
            sum(size for kind, size in sizes.items() if kind in written),
        )


def _total(sizes: Sizes) -> int:
    return sum(sizes.values())


def slot_sizes(host: Mapping[Any, Sizes]) -> dict[Part, dict[str, int]]:
    """Return the bytes by kind of one slot of each part: those of its largest tensors.

    Args:
        host: bytes by kind; the last item of a key is the part.
    """
    slots: dict[Part, dict[str, int]] = {}
    for (*_, part), sizes in host.items():
        slot = slots.setdefault(part, {})
        for kind, size in sizes.items():
            slot[kind] = max(size, slot.get(kind, 0))
    return slots


def place(
    needs: Iterable[PartNeed],
    *,
    device_bytes: int,
    host_bytes: int,
    branches: int = 1,
    one_memory: bool = False,
    open_slots: Mapping[Part, Sizes] | None = None,
    prefer_host: bool = False,
) -> Placement:
    """Place as many layer parts as the capacities hold; the same for every branch.

    Args:
        needs: what the layers want to keep for one branch.
        device_bytes: free for caches and slots on the device.
        host_bytes: free for caches on the host; 0 where nothing may go there.
        branches: guidance branches that keep caches of their own and share the slots.
        one_memory: True where what goes to the host takes of ``device_bytes``, too.
        open_slots: bytes by kind of slots that are there already.
        prefer_host: put everything on the host that fits there.
    """
    ranked = sorted(needs, key=lambda need: (need.saved / max(need.nbytes, 1), need.layer))
    ranked.reverse()
    capacity = _Capacity(
        device_bytes, host_bytes, branches, one_memory, dict(open_slots or {}), prefer_host
    )
    # What must stay on the device may leave no slots for what could move: two orders are tried.
    movable_first = sorted(ranked, key=lambda need: not need.movable)
    kept = max(
        (_those_that_fit(capacity, order) for order in (ranked, movable_first)),
        key=lambda chosen: sum(need.saved for need in chosen),
    )
    left_out = [need for need in ranked if need not in kept]
    return replace(
        capacity.assign(kept) or Placement(),
        recomputed=frozenset(need.key for need in left_out),
        immovable=frozenset(
            need.key for need in left_out if host_bytes > 0 and not (need.movable or prefer_host)
        ),
    )


def _those_that_fit(capacity: _Capacity, ranked: list[PartNeed]) -> list[PartNeed]:
    """Return the parts that fit beside those before them."""
    if capacity.assign(ranked) is not None:
        return ranked
    kept: list[PartNeed] = []
    for need in ranked:
        if capacity.assign([*kept, need]) is not None:
            kept.append(need)
    return kept


@dataclass(frozen=True)
class _Capacity:
    device_bytes: int
    host_bytes: int
    branches: int
    one_memory: bool
    open_slots: Mapping[Part, Sizes]
    prefer_host: bool

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
                    device, host = on_device, on_host
                    break
        on_host_bytes = self.branches * sum(map(_total, host.values()))
        if self._left(device, host) < 0 or on_host_bytes > self.host_bytes:
            return None
        return Placement(device, host)

    def _left(self, device: Mapping[LayerPart, Sizes], host: Mapping[LayerPart, Sizes]) -> int:
        """Return the bytes that stay free on the device."""
        slots = 0
        for part, kinds in slot_sizes(host).items():
            present = self.open_slots.get(part, {})
            grown = {kind: max(size, present.get(kind, 0)) for kind, size in kinds.items()}
            slots += SLOTS * (_total({**present, **grown}) - _total(present))
        taken = sum(map(_total, device.values()))
        if self.one_memory:
            taken += sum(map(_total, host.values()))
        return self.device_bytes - self.branches * taken - slots

    def _most(
        self,
        keys: list[LayerPart],
        device: Mapping[LayerPart, Sizes],
        host: Mapping[LayerPart, Sizes],
    ) -> list[LayerPart]:
        """Return as many as fit, at even distances, so that loads find time between."""
        if not keys:
            return []
        largest = max(_total(host[key]) for key in keys)
        count = self._left(device, host) // (self.branches * max(1, largest))
        count = max(0, min(len(keys), count))
        return [keys[place * len(keys) // count] for place in range(count)]

"""Where the caches of every layer live: on the device, in host memory, or nowhere.

A pure decision from byte counts and two capacities. Tensors on the host pass through two slots per
kind on the device. A layer part (attention or feed-forward) that fits nowhere is recomputed: it
runs dense at every step. The parts that save most work per byte are placed first, and of equal ones
the later layers: the first attend most evenly, so their columns hold the least softmax mass
(benchmarks/results/captured_mass_h200.json).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from chipsparse.cache.kinds import KINDS, read_kinds, written_kinds
from chipsparse.config import Part, SparsityConfig
from chipsparse.cost_model.run_times import SLOTS
from chipsparse.plan import Action


@dataclass(frozen=True)
class PartNeed:
    """What one layer part wants to keep.

    Attributes:
        layer: number of the transformer block.
        part: attention or feed-forward layer.
        sizes: bytes of each kind of tensor.
        saved: work that a sparse step of it saves, in any unit that all parts share.
        movable: whether it may live in host memory; False where moving it takes longer than it
            saves.
    """

    layer: int
    part: Part
    sizes: Mapping[str, int]
    saved: float
    movable: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of all kinds."""
        return sum(self.sizes.values())

    def is_like(self, other: PartNeed) -> bool:
        """Whether the two differ in their layers alone."""
        return replace(other, layer=self.layer) == self


@dataclass(frozen=True)
class Placement:
    """The decision for one guidance branch.

    Attributes:
        device: bytes by (layer, kind) of what stays on the device.
        host: the same of what lives in host memory.
        recomputed: (layer, part) of what is kept nowhere and runs dense.
        immovable: those of them that had to stay on the device, since moving takes too long.
    """

    device: Mapping[tuple[int, str], int] = field(default_factory=dict)
    host: Mapping[tuple[int, str], int] = field(default_factory=dict)
    recomputed: frozenset[tuple[int, Part]] = frozenset()
    immovable: frozenset[tuple[int, Part]] = frozenset()

    @property
    def slots(self) -> dict[str, int]:
        """Bytes of one slot for each kind that has tensors on the host."""
        return slot_sizes(self.host)

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots together."""
        return SLOTS * sum(self.slots.values())

    @property
    def device_bytes(self) -> int:
        """Bytes on the device, slots not included."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Bytes on the host."""
        return sum(self.host.values())

    def why_recomputed(self, layer: int, part: Part) -> str:
        """Why one of the `recomputed` is kept nowhere."""
        if (layer, part) in self.immovable:
            return (
                "its caches do not fit on the device, and to move them is estimated to take longer "
                "than to compute it"
            )
        return "its caches do not fit into the memory budgets"

    def hosted(self, layer: int) -> list[str]:
        """Kinds of one layer that live in host memory."""
        return [kind for kind in KINDS if (layer, kind) in self.host]

    def moved(
        self, config: SparsityConfig, layer: int, part: Part, action: Action
    ) -> tuple[int, int]:
        """Bytes that a part of a layer brings from host memory in a step, and that it writes."""
        sizes = {kind: self.host[layer, kind] for kind in self.hosted(layer)}
        read, written = (kinds(config, part, action) for kinds in (read_kinds, written_kinds))
        return (
            sum(size for kind, size in sizes.items() if kind in read),
            sum(size for kind, size in sizes.items() if kind in written),
        )


def slot_sizes(host: Mapping[tuple[int, str], int]) -> dict[str, int]:
    """Bytes of one slot of each kind: those of its largest tensor."""
    sizes: dict[str, int] = {}
    for (_, kind), size in host.items():
        sizes[kind] = max(size, sizes.get(kind, 0))
    return sizes


def place(
    needs: Iterable[PartNeed],
    *,
    device_bytes: int,
    host_bytes: int,
    branches: int = 1,
    one_memory: bool = False,
    open_slots: Mapping[str, int] | None = None,
    prefer_host: bool = False,
) -> Placement:
    """Places as many layer parts as the capacities hold; the same for every branch.

    Args:
        needs: what the layers want to keep for one branch.
        device_bytes: free for caches and slots on the device.
        host_bytes: free for caches on the host; 0 where nothing may go there.
        branches: guidance branches that keep caches of their own and share the slots.
        one_memory: whether what goes to the host takes of ``device_bytes``, too.
        open_slots: bytes of slots that are there already.
        prefer_host: put everything on the host that fits there.
    """
    ranked = sorted(needs, key=lambda need: (need.saved / max(need.nbytes, 1), need.layer))
    ranked.reverse()
    room = _Room(
        device_bytes, host_bytes, branches, one_memory, dict(open_slots or {}), prefer_host
    )
    # What must stay on the device may leave no slots for what could move: two orders are tried.
    kept, left_out = max(
        (_choose(room, ranked), _choose(room, sorted(ranked, key=lambda need: not need.movable))),
        key=lambda choice: sum(need.saved for need in choice[0]),
    )
    return replace(
        room.assign(kept) or Placement(),
        recomputed=frozenset((need.layer, need.part) for need in left_out),
        immovable=frozenset(
            (need.layer, need.part)
            for need in left_out
            if host_bytes > 0 and not (need.movable or prefer_host)
        ),
    )


def _choose(room: _Room, ranked: list[PartNeed]) -> tuple[list[PartNeed], list[PartNeed]]:
    """Keeps parts in this order as long as they fit; returns them and the others."""
    kept: list[PartNeed] = []
    left_out: list[PartNeed] = []
    while ranked:
        count = _most_that_fit(room, kept, ranked)
        kept += ranked[:count]
        ranked = ranked[count:]
        if ranked:  # the next one does not fit, nor does one like it; smaller ones behind it may
            refused = ranked[0]
            left_out += [need for need in ranked if refused.is_like(need)]
            ranked = [need for need in ranked if not refused.is_like(need)]
    return kept, left_out


def _most_that_fit(room: _Room, kept: list[PartNeed], more: list[PartNeed]) -> int:
    """How many of these parts, from the first on, fit beside others; where some do, fewer do."""
    fits, fails = 0, len(more) + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if room.assign(kept + more[:middle]) is None:
            fails = middle
        else:
            fits = middle
    return fits


@dataclass(frozen=True)
class _Room:
    device_bytes: int
    host_bytes: int
    branches: int
    one_memory: bool
    open_slots: Mapping[str, int]
    prefer_host: bool

    def assign(self, needs: list[PartNeed]) -> Placement | None:
        """Device or host for every tensor of these parts; None where they do not fit."""
        by_kind: dict[str, dict[int, int]] = {kind: {} for kind in KINDS}
        device: dict[tuple[int, str], int] = {}
        for need in needs:
            for kind, size in need.sizes.items():
                if need.movable or self.prefer_host:
                    by_kind[kind][need.layer] = size
                else:
                    device[need.layer, kind] = size
        host = {(layer, kind): size for kind in KINDS for layer, size in by_kind[kind].items()}
        if not self.prefer_host and self._left(device | host, {}) >= 0:
            return Placement(device | host)
        # Kinds in the order of `KINDS`, each wholly where it fits, else as many layers as do.
        for kind, sizes in ({} if self.prefer_host else by_kind).items():
            for layers in (sorted(sizes), self._most(sizes, device, host)):
                moved = device | {(layer, kind): sizes[layer] for layer in layers}
                rest = {key: size for key, size in host.items() if key not in moved}
                if self._left(moved, rest) >= 0:
                    device, host = moved, rest
                    break
        if self._left(device, host) < 0 or self.branches * sum(host.values()) > self.host_bytes:
            return None
        return Placement(device, host)

    def _left(
        self, device: Mapping[tuple[int, str], int], host: Mapping[tuple[int, str], int]
    ) -> int:
        """Bytes that stay free on the device."""
        grown = (size - self.open_slots.get(kind, 0) for kind, size in slot_sizes(host).items())
        slots = SLOTS * sum(max(0, size) for size in grown)
        taken = sum(device.values()) + (sum(host.values()) if self.one_memory else 0)
        return self.device_bytes - self.branches * taken - slots

    def _most(
        self,
        sizes: Mapping[int, int],
        device: Mapping[tuple[int, str], int],
        host: Mapping[tuple[int, str], int],
    ) -> list[int]:
        """As many layers of a kind as fit, at even distances, so that loads find time between."""
        if not sizes:
            return []
        layers = sorted(sizes)
        room = self._left(device, host) // (self.branches * max(1, *sizes.values()))
        count = max(0, min(len(layers), room))
        return [layers[place * len(layers) // count] for place in range(count)]

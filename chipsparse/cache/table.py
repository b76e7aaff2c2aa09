"""The table of bytes that a memory plan keeps of each kind of tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from chipsparse.cache.kinds import KINDS
from chipsparse.cache.memory_plan import MemoryPlan
from chipsparse.cache.placement import SLOTS
from chipsparse.layout import ModelLayout


@dataclass(frozen=True)
class KindBytes:
    """The bytes of one kind of tensor, all layers and guidance branches together.

    Attributes:
        layer: bytes in one layer of each kind of layer.
        total: bytes of all that are kept.
        device: how many of them are on the device.
        host: how many of them are in host memory beside it.
        slots: bytes on the device that those in host memory pass through.
    """

    layer: Mapping[str, int]
    total: int
    device: int
    host: int
    slots: int


def bytes_by_kind(memory: MemoryPlan, layout: ModelLayout) -> dict[str, KindBytes]:
    """The table of a plan, without the kinds that it keeps nowhere."""
    placement, table = memory.placement, {}
    slots = {kind: size for sizes in placement.slots.values() for kind, size in sizes.items()}
    for kind in KINDS:
        on_device, on_host = (
            {layer: sizes[kind] for (layer, _), sizes in home.items() if kind in sizes}
            for home in (placement.device, placement.host)
        )
        sizes = on_device | on_host
        if sizes:
            table[kind] = KindBytes(
                layer={layout.kind(layer).name: sizes[layer] for layer in sorted(sizes)},
                total=memory.branches * sum(sizes.values()),
                device=memory.branches * sum(on_device.values()),
                host=memory.branches * sum(on_host.values()),
                slots=SLOTS * slots.get(kind, 0),
            )
    return table

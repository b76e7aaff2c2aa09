"""Parts of an explanation, which its tables and its JSON have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from chipsparse.cache.kinds import PARTS, ROUNDED, Part
from chipsparse.cli.explain.outlook import Outlook
from chipsparse.cli.planning.layer_budgets import LayerGroup, layer_groups
from chipsparse.cost_model.layer_times import PartSeconds
from chipsparse.kernels.checks import block_count


@dataclass(frozen=True)
class PartLayers:
    """A part of all layers of one kind.

    Attributes:
        sparse: how many run it sparse.
        dense: how many do not, by the reason.
        step: seconds of a sparse and of a dense step, of the layer that keeps most; None where
            they are not known, or the config has it dense.
    """

    sparse: int
    dense: Counter[str]
    step: PartSeconds | None


@dataclass(frozen=True)
class MLPLayers(PartLayers):
    """Their feed-forward layers.

    Attributes:
        token_blocks: of tokens that choose together.
        block_size: how many tokens each has.
        neurons: of a layer.
        neurons_kept: by the layer that keeps most; None where all are dense.
    """

    token_blocks: int
    block_size: int
    neurons: int
    neurons_kept: int | None


@dataclass(frozen=True)
class KindLayers:
    """The layers of one kind."""

    name: str
    layers: int
    attention: PartLayers
    mlp: MLPLayers
    keep: list[LayerGroup]


@dataclass(frozen=True)
class MemoryNeeds:
    """What a generation takes, in bytes.

    Attributes:
        weights: as far as they are known.
        working: of a transformer call, besides weights and caches.
        caches_wanted: all that the profile asks for.
        caches_on_device: what of them is kept there.
        caches_on_host: what of them is kept in host memory.
        slots: on the device, for what comes from the host.
        device: of weights, work, caches and slots; on a CPU, where all memory is one, of all.
        vram: budget of the device, if there is one.
        ram: budget of host memory, likewise.
        residuals: how those of attention are kept: ``full`` or ``fp8``.
        activations: how those of feed-forward layers are kept, likewise.
    """

    weights: int
    working: int
    caches_wanted: int
    caches_on_device: int
    caches_on_host: int
    slots: int
    device: int
    vram: int | None
    ram: int | None
    residuals: str
    activations: str


def kinds_of_layers(outlook: Outlook) -> list[KindLayers]:
    """The layers, by the model's name for them."""
    plan = outlook.planned.plan
    groups, rows = layer_groups(plan), plan.config.mlp.block_size
    whole = replace(plan.layout, share=None)  # of all processes together
    found, first = [], 0
    for kind in plan.layout.kinds:
        keep = [group for group in groups if group.kind == kind.name]
        numbers = range(first, first + kind.layers)
        attention, mlp = (_part(outlook, part, numbers) for part in PARTS)
        mlp = MLPLayers(
            **vars(mlp),
            token_blocks=block_count(whole.mlp_tokens(first), rows),
            block_size=rows,
            neurons=kind.intermediate_size,
            neurons_kept=most(group.neurons for group in keep),
        )
        found.append(KindLayers(kind.name, kind.layers, attention, mlp, keep))
        first += kind.layers
    return found


def _part(outlook: Outlook, part: Part, layers: range) -> PartLayers:
    reasons = outlook.dense[part]
    dense = Counter(reasons[layer] for layer in layers if layer in reasons)
    times = [outlook.times[layer, part] for layer in layers if (layer, part) in outlook.times]
    step = max(times, key=lambda time: time.sparse, default=None)
    return PartLayers(len(layers) - dense.total(), dense, step)


def most(counts: Iterable[int | None]) -> int | None:
    """The largest count; None where there is none."""
    return max((count for count in counts if count is not None), default=None)


def memory_needs(outlook: Outlook, *, weights: int, on_gpu: bool) -> MemoryNeeds:
    """Of a generation with weights of so many bytes."""
    memory, budgets = outlook.memory, outlook.planned.plan.config.memory
    on_host = 0 if on_gpu else memory.host_bytes
    return MemoryNeeds(
        weights=weights,
        working=outlook.working,
        caches_wanted=memory.wanted,
        caches_on_device=memory.branches * memory.placement.device_bytes,
        caches_on_host=memory.host_bytes,
        slots=memory.placement.slot_bytes,
        device=weights + outlook.working + memory.device_bytes + on_host,
        vram=budgets.vram,
        ram=budgets.ram,
        **{name: "fp8" if name in memory.in_fp8 else "full" for name in ROUNDED},
    )

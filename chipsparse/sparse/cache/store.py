"""The caches of one transformer: where they live, and which one a layer has while it computes.

What lives in host memory is brought to the device for the layer that borrows it, and kept again
when the layer is done; the layer sees no difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

import torch

from chipsparse.config import PARTS, Action, LayerPart, Part, SparsityConfig
from chipsparse.reasons.layers import dense_layers, in_branch
from chipsparse.reasons.memory import caches_in_fp8, host_memory_refused
from chipsparse.reasons.reason import Level
from chipsparse.report.generation import GenerationReport
from chipsparse.sparse.cache.memory_plan import (
    MemoryDemand,
    MemoryPlan,
    available,
    plan_memory,
    working_bytes,
)
from chipsparse.sparse.cache.offload import OffloadPool
from chipsparse.sparse.cache.placement import Capacity
from chipsparse.sparse.cache.tensors import (
    AttentionCache,
    Kept,
    LayerCache,
    MLPCache,
    PartCache,
    read_and_written,
    with_caches,
)
from chipsparse.sparse.plan import SparsityPlan


@dataclass(eq=False)
class _Branch:
    """A guidance branch: its caches, and where they live."""

    plan: SparsityPlan
    memory: MemoryPlan
    caches: dict[int, LayerCache] = field(default_factory=dict)
    finished: bool = False

    def device_bytes(self) -> int:
        return sum(cache.nbytes() for cache in self.caches.values())

    def reserved_bytes(self) -> int:
        """Bytes that it will take on the device, and has not taken yet."""
        if self.finished:
            return 0
        return max(0, self.memory.placement.device_bytes - self.device_bytes())


class CacheStore:
    """One `LayerCache` per layer and guidance branch, wherever its tensors live."""

    def __init__(
        self,
        config: SparsityConfig,
        pool: OffloadPool,  # for this store alone
        report: GenerationReport,
        # Makes the same of free bytes on the device and on the host on all processes.
        agree: Callable[[int, int, torch.device], tuple[int, int]],
    ) -> None:
        self._agree = agree
        # The tensors that a layer's part reads at each action.
        self.reads: dict[tuple[Part, Action], frozenset[Kept]] = {
            (part, action): read_and_written(config, part, action)[0]
            for part in PARTS
            for action in Action
        }
        self._pool = pool
        self._report = report
        self._branches: dict[str, _Branch] = {}
        # What was decided for each branch of the last generation: the same again where that is
        # possible, so that a second one gives the same bits, and the host memory that is there.
        self._last: dict[str, tuple[SparsityPlan, MemoryDemand, MemoryPlan]] = {}

    def reset(self) -> None:
        """Forget all branches; host memory is kept for another generation."""
        self._branches.clear()
        self._pool.reset()

    def __contains__(self, branch: str) -> bool:
        return branch in self._branches

    def admit(
        self,
        branch: str,
        plan: SparsityPlan,
        device: torch.device,
        demand: MemoryDemand,
    ) -> None:
        """Decide where the caches of a branch live, and allocate what is not on the device.

        Raises `BudgetError` where there is room for no cache of the first branch. Later ones, which
        nobody announced, run dense then.
        """
        first = next(iter(self._branches.values()), None)
        if first is None or first.plan != plan or len(self._branches) >= first.memory.branches:
            memory = self._plan(branch, plan, device, demand)
        else:
            memory = first.memory
        hosted = memory.placement.host
        try:
            self._pool.open({(branch, *key): sizes for key, sizes in hosted.items()}, device)
        except MemoryError as error:
            self._report.add(host_memory_refused(error))
            memory = self._plan(branch, plan, device, demand, host=False)
        self._branches[branch] = _Branch(plan, memory)
        if memory.in_fp8 and plan.config.memory.cache_precision == "auto":
            self._report.add(caches_in_fp8())
        is_alike = first is None or memory == first.memory
        dense = memory.placement.dense
        for reason in dense_layers("memory.dense", Level.FALLBACK, dense, plan.layout.layers):
            self._report.add(reason if is_alike else in_branch(reason, branch))

    def _plan(
        self,
        branch: str,
        plan: SparsityPlan,
        device: torch.device,
        demand: MemoryDemand,
        *,
        host: bool = True,
    ) -> MemoryPlan:
        first = next(iter(self._branches.values()), None)
        if first is not None:  # guidance takes a difference of branches: they are rounded alike
            plan = replace(plan, config=with_caches(plan.config, in_fp8=first.memory.in_fp8))
        captured = 0
        if device.type == "cuda" and demand.captures:
            captured = max(demand.branches, len(self._branches) + 1)
        working = working_bytes(
            plan,
            dtype=demand.dtype,
            captured=captured,
            fp8_mlps=demand.fp8_mlps.keys(),
        )

        def capacity_now(reserve: float | None = None) -> Capacity:
            own = available(
                plan.config.memory,
                device,
                working=working,
                pending=demand.pending_bytes,
                taken=demand.receive_bytes,
                reserved=sum(branch.reserved_bytes() for branch in self._branches.values()),
                held=sum(branch.device_bytes() for branch in self._branches.values()),
                memory=self._pool.host,
                reserve=reserve,
            )
            on_device, on_host = self._agree(own.device, own.host, device)
            return replace(own, device=on_device, host=on_host)

        last = self._last.get(branch)
        if host and last is not None and last[:2] == (plan, demand):
            memory = last[2]
            if memory.fits(capacity_now(reserve=0.0)):
                return memory
        capacity = capacity_now()
        memory = plan_memory(
            plan,
            capacity if host else replace(capacity, host=0),
            demand if first is None else replace(demand, branches=1),
            open_slots=self._pool.slots,
        )
        if first is None:
            memory.check()
            self._last.clear()
        self._last[branch] = plan, demand, memory
        return memory

    def drop(self, branch: str) -> None:
        """Forget what a branch recorded, wherever it lives; its host memory stays its own."""
        owner = self._branches[branch]
        owner.caches.clear()
        for key in owner.memory.placement.host:
            self._pool.forget((branch, *key))

    def finish(self, branch: str) -> None:
        """Forget the caches of a branch, and free host memory with those of the last one."""
        owner = self._branches[branch]
        owner.caches.clear()
        owner.finished = True
        for key in owner.memory.placement.host:
            self._pool.drop((branch, *key))
        if all(branch.finished for branch in self._branches.values()):
            self.reset()

    def all_on_device(self, branch: str) -> bool:
        """Return True where no cache of a branch lives in host memory."""
        return not self._branches[branch].memory.placement.host

    def dense(self, branch: str) -> Mapping[LayerPart, str]:
        """Return why each (layer, part) of a branch that has no caches runs dense."""
        return self._branches[branch].memory.placement.dense

    def __getitem__(self, key: tuple[str, int]) -> LayerCache:
        """Return the cache of a branch and layer, with what is on the device."""
        branch, layer = key
        owner = self._branches[branch]
        if layer not in owner.caches:
            owner.caches[layer] = LayerCache(in_fp8=owner.memory.in_fp8)
        return owner.caches[layer]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return ((name, layer) for name, branch in self._branches.items() for layer in branch.caches)

    def part(self, branch: str, layer: int, part: Part) -> PartCache:
        """Return the cache of a branch, layer and part, with what is on the device."""
        cache: PartCache = getattr(self[branch, layer], part)
        return cache

    def has(self, branch: str, layer: int, kept: Kept) -> bool:
        """Return True where a tensor was recorded, wherever it lives."""
        if getattr(getattr(self[branch, layer], kept.part), kept.field) is not None:
            return True
        return self._pool.has((branch, layer, kept.part), kept)

    def nbytes(self) -> int:
        """Bytes of all caches, on the device and on the host, without slots."""
        on_device = sum(branch.device_bytes() for branch in self._branches.values())
        return on_device + self._pool.stored_bytes

    def start(self, branch: str, action: Action) -> None:
        """Begin to fetch what the first layers of a call will read."""
        for part in PARTS:
            self._fetch_next(branch, -1, part, self.reads[part, action])

    @overload
    def acquire(
        self,
        branch: str,
        layer: int,
        part: Literal["attention"],
        read: frozenset[Kept],
        ahead: frozenset[Kept] | None = None,
    ) -> AbstractContextManager[AttentionCache]: ...

    @overload
    def acquire(
        self,
        branch: str,
        layer: int,
        part: Literal["mlp"],
        read: frozenset[Kept],
        ahead: frozenset[Kept] | None = None,
    ) -> AbstractContextManager[MLPCache]: ...

    @contextlib.contextmanager
    def acquire(
        self,
        branch: str,
        layer: int,
        part: Part,
        read: frozenset[Kept],
        ahead: frozenset[Kept] | None = None,
    ) -> Iterator[Any]:
        """Lend one layer's cache of a part, with the tensors that it reads, while it computes.

        What the layer sets there is kept. Begins to fetch the tensors ``ahead`` (None: the same) of
        the next layer. Raises `RuntimeError` where a tensor is larger than planned.
        """
        cache: PartCache = getattr(self[branch, layer], part)
        key = branch, layer, part
        if key not in self._pool:
            yield cache
            return
        loaded = self._pool.load(key, read) if read else {}
        cache.put(loaded)
        self._fetch_next(branch, layer, part, read if ahead is None else ahead)
        yield cache
        tensors = cache.recorded()
        cache.clear(tensors)
        self._pool.store(
            key,
            {
                kept: tensor
                for kept, tensor in tensors.items()
                if tensor is not loaded.get(kept) or kept.changes_in_place
            },
        )
        self._pool.release(key)

    def _fetch_next(self, branch: str, layer: int, part: Part, read: frozenset[Kept]) -> None:
        """Begin to fetch these tensors for the next layer whose cache of a part is on the host."""
        owner = self._branches.get(branch)
        if owner is not None and not owner.finished:
            hosted = owner.memory.placement.host
            later = [other for other, of in hosted if of == part and other > layer]
            if later:
                self._pool.prefetch((branch, min(later), part), read)

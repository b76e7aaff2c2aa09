"""The caches of one transformer: where they live, and which one a layer has while it computes.

What lives in host memory is brought to the device for the layer that borrows it, and kept again
when the layer is done; the layer sees no difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from chipsparse.config import PARTS, LayerPart, Part, SparsityConfig
from chipsparse.report.generation import GenerationReport
from chipsparse.report.nothing_sparse import dense_notes
from chipsparse.sparse.cache.memory_plan import (
    Capacity,
    MemoryDemand,
    MemoryPlan,
    available,
    plan_memory,
    working_bytes,
)
from chipsparse.sparse.cache.offload import OffloadPool
from chipsparse.sparse.cache.tensors import (
    KINDS,
    LayerCache,
    PartCache,
    read_and_written,
    with_caches,
)
from chipsparse.sparse.plan import Action, SparsityPlan

IN_FP8 = (
    "caches are in FP8, which takes half of the bytes: in full, some would go to host memory or "
    "layers run dense (memory.cache_precision: model has it so)"
)


@dataclass(eq=False)
class _Branch:
    """A guidance branch: its caches, and where they live."""

    plan: SparsityPlan
    memory: MemoryPlan
    caches: dict[int, LayerCache] = field(default_factory=dict)
    finished: bool = False

    def device_bytes(self) -> int:
        return sum(cache.nbytes() for cache in self.caches.values())

    def promised_bytes(self) -> int:
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
        self.reads = {  # the tensors that a layer's part reads at each action
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
            self._report.note(
                f"host memory for caches was refused ({error}): they stay on the device as far as "
                "they fit, and the other layers run dense",
            )
            memory = self._plan(branch, plan, device, demand, host=False)
        self._branches[branch] = _Branch(plan, memory)
        if memory.in_fp8 and plan.config.memory.cache_precision == "auto":
            self._report.note(IN_FP8)
        of_branch = "" if first is None or memory == first.memory else f"in branch {branch}, "
        for note in dense_notes(memory.placement.dense, plan.layout.layers):
            self._report.fall_back(of_branch + note)

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
                taken=demand.window_bytes,
                promised=sum(branch.promised_bytes() for branch in self._branches.values()),
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

    def stay_on_device(self, branch: str) -> bool:
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

    def has(self, branch: str, layer: int, kind: str) -> bool:
        """Return True where a tensor of this kind was recorded, wherever it lives."""
        part = KINDS[kind].part
        if getattr(getattr(self[branch, layer], part), kind) is not None:
            return True
        return self._pool.has((branch, layer, part), kind)

    def nbytes(self) -> int:
        """Bytes of all caches, on the device and on the host, without slots."""
        on_device = sum(branch.device_bytes() for branch in self._branches.values())
        return on_device + self._pool.stored_bytes

    def start(self, branch: str, action: Action) -> None:
        """Begin to fetch what the first layers of a call will read."""
        for part in PARTS:
            self._fetch_next(branch, -1, part, self.reads[part, action])

    @contextlib.contextmanager
    def acquire(
        self,
        branch: str,
        layer: int,
        part: Part,
        kinds: frozenset[str],
        ahead: frozenset[str] | None = None,
    ) -> Iterator[Any]:
        """Lend one layer's cache of a part, with the kinds that it reads, while it computes.

        What the layer sets there is kept. Begins to fetch the kinds ``ahead`` (None: the same) of
        the next layer. Raises `RuntimeError` where a tensor is larger than planned.
        """
        cache: PartCache = getattr(self[branch, layer], part)
        place = branch, layer, part
        if place not in self._pool:
            yield cache
            return
        loaded = self._pool.load(place, kinds) if kinds else {}
        vars(cache).update(loaded)
        self._fetch_next(branch, layer, part, kinds if ahead is None else ahead)
        yield cache
        tensors = cache.on_device()
        vars(cache).update(dict.fromkeys(tensors))
        self._pool.store(
            place,
            {
                kind: tensor
                for kind, tensor in tensors.items()
                if tensor is not loaded.get(kind) or KINDS[kind].rewritten
            },
        )
        self._pool.release(place)

    def _fetch_next(self, branch: str, layer: int, part: Part, kinds: frozenset[str]) -> None:
        """Begin to fetch these kinds for the next layer whose cache of a part is in host memory."""
        owner = self._branches.get(branch)
        if owner is not None and not owner.finished:
            hosted = owner.memory.placement.host
            later = [other for other, of in hosted if of == part and other > layer]
            if later:
                self._pool.prefetch((branch, min(later), part), kinds)

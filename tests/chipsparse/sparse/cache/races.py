"""Finds copies that could overtake a computation, on a CPU where nothing really runs beside it.

Three streams compute and copy; each has a vector clock. Every access to watched memory is checked
against earlier ones of other streams: where one of the two writes, an event must stand between.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import chain, product

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chipsparse.sparse.cache.copies import HostCopies
from chipsparse.sparse.cache.offload import OffloadPool

POISON = 0xFF  # NaN in every floating dtype


class PoisonedPool(OffloadPool):
    """Overwrites slots as soon as nothing needs them, so that a late use shows."""

    def release(self, key):
        slot = self._held_by(key)
        super().release(key)
        if slot is not None:
            self._copies.wait([slot.filled, slot.emptied])
            for memory in slot.memory.values():
                memory.fill_(POISON)
            slot.used = self._copies.mark()


@dataclass
class Access:
    stream: str
    time: int
    writes: bool
    what: str


class TracedCopies(HostCopies):
    """Copies at once, as on a CPU, but keeps the clocks of a GPU's streams.

    ``forget`` is a wait to leave out: ("to_device" | "to_host" | "wait", number of the mark).
    """

    def __init__(self, forget=None):
        self.forget = forget
        self.clocks = defaultdict(lambda: defaultdict(int))
        self.accesses = defaultdict(list)
        self.races = []
        self.copying = False

    def to_device(self, device, host, after):
        return self._copy("in", "to_device", device, host, after)

    def to_host(self, host, device, after):
        return self._copy("out", "to_host", host, device, after)

    def mark(self):
        return dict(self.clocks["compute"])

    def wait(self, marks):
        self._join("compute", "wait", marks)

    def synchronize(self):
        for stream in ("in", "out"):
            self._join("compute", "synchronize", [dict(self.clocks[stream])])

    def access(self, stream, tensor, writes, what):
        clock = self.clocks[stream]
        clock[stream] += 1
        for earlier in self.accesses[tensor.data_ptr()]:
            ordered = earlier.stream == stream or clock[earlier.stream] >= earlier.time
            if (writes or earlier.writes) and not ordered:
                self.races.append(f"{what} {'writes' if writes else 'reads'} against {earlier}")
        self.accesses[tensor.data_ptr()].append(Access(stream, clock[stream], writes, what))

    def _copy(self, stream, name, target, source, after):
        self._join(stream, name, after)
        self.access(stream, source, False, name)
        self.access(stream, target, True, name)
        self.copying = True
        target.copy_(source)
        self.copying = False
        return dict(self.clocks[stream])

    def _join(self, stream, name, marks):
        for number, mark in enumerate(marks):
            if mark is None or self.forget == (name, number):
                continue
            for other, time in mark.items():
                self.clocks[stream][other] = max(self.clocks[stream][other], time)


class WatchComputation(TorchDispatchMode):
    """Notes what the computation reads and writes of the slots of a pool with `TracedCopies`."""

    def __init__(self, pool):
        super().__init__()
        self.pool = pool

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        copies = self.pool._copies
        if isinstance(copies, TracedCopies) and not copies.copying and not is_view(function):
            slots = chain.from_iterable(self.pool._opened.slots.values())
            watched = [memory for slot in slots for memory in slot.memory.values()]
            named = {argument.name: argument for argument in function._schema.arguments}
            given = dict(zip(named, args, strict=False)) | kwargs
            for name, value in given.items():
                written = named[name].alias_info is not None and named[name].alias_info.is_write
                tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
                for tensor, memory in product(tensors, watched):
                    if 0 <= tensor.data_ptr() - memory.data_ptr() < memory.numel():
                        copies.access("compute", memory, written, str(function))
        return function(*args, **kwargs)


def is_view(function) -> bool:
    schema = function._schema
    return not schema.is_mutable and any(each.alias_info is not None for each in schema.returns)

"""The caches of one transformer: lent to a layer for the time it computes.

What lives on the device is simply there. What lives in host memory is brought to the device for the
layer that borrows it, and kept again when the layer is done; the layer sees no difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from chipsparse.cache import LayerCache
from chipsparse.cache_kinds import KINDS, Part
from chipsparse.offload import OffloadPool
from chipsparse.placement import Placement


class CacheStore:
    """One `LayerCache` per layer and guidance branch, wherever its tensors live.

    Args:
        pool: holds what lives in host memory; used by nobody else.
        notify: told in one sentence of what is elsewhere than planned.
    """

    def __init__(self, pool: OffloadPool, notify: Callable[[str], None]) -> None:
        self._pool = pool
        self._notify = notify
        self._caches: dict[tuple[str, int], LayerCache] = {}
        # Layers in host memory, for each branch and kind in order: what to fetch next.
        self._hosted: dict[tuple[str, str], list[int]] = {}

    def open(self, branch: str, placement: Placement, device: torch.device) -> None:
        """Makes room for a branch; raises ``MemoryError`` where the host has none."""
        self._pool.open(
            {(branch, layer, kind): size for (layer, kind), size in placement.host.items()}, device
        )
        for kind in KINDS:
            layers = sorted(layer for layer, name in placement.host if name == kind)
            self._hosted[branch, kind] = layers

    def reset(self) -> None:
        """Forgets everything and frees the device's memory."""
        self._caches.clear()
        self._hosted.clear()
        self._pool.reset()

    def __getitem__(self, key: tuple[str, int]) -> LayerCache:
        """The cache of a branch and layer, with what lives on the device."""
        return self._caches.setdefault(key, LayerCache())

    def __len__(self) -> int:
        return len(self._caches)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self._caches)

    def values(self) -> Iterable[LayerCache]:
        """All caches, with what lives on the device."""
        return self._caches.values()

    def has(self, branch: str, layer: int, kind: str) -> bool:
        """Whether a tensor of this kind was recorded, wherever it lives."""
        part = getattr(self[branch, layer], KINDS[kind].part)
        return getattr(part, kind) is not None or self._pool.has((branch, layer, kind))

    def nbytes(self) -> int:
        """Bytes of all caches, on the device and on the host, without slots."""
        return sum(cache.nbytes() for cache in self._caches.values()) + self._pool.stored_bytes

    def start(self, branch: str, kinds: frozenset[str]) -> None:
        """Begins to fetch what the first layers of a call will read."""
        for kind in kinds:
            for layer in self._hosted.get((branch, kind), [])[:1]:
                self._pool.prefetch((branch, layer, kind))

    @contextlib.contextmanager
    def lend(self, branch: str, layer: int, part: Part, kinds: frozenset[str]) -> Iterator[Any]:
        """One layer's cache of a part, with the kinds that it reads, for the time it computes.

        Args:
            branch: guidance branch.
            layer: number of the block.
            part: which cache of the layer.
            kinds: what the layer reads; of the others nothing need be brought to the device.

        Yields:
            The `AttentionCache` or `MLPCache`. What the layer sets there is kept.
        """
        cache = getattr(self[branch, layer], part)
        hosted = [
            name
            for name, kind in KINDS.items()
            if kind.part == part and (branch, layer, name) in self._pool
        ]
        loaded = {
            name: self._pool.load((branch, layer, name))
            for name in hosted
            if name in kinds and self._pool.has((branch, layer, name))
        }
        for name, tensor in loaded.items():
            setattr(cache, name, tensor)
        for name in kinds:
            self._fetch_next(branch, layer, name)
        yield cache
        for name in hosted:
            self._keep((branch, layer, name), cache, loaded.get(name))

    def _fetch_next(self, branch: str, layer: int, kind: str) -> None:
        for later in self._hosted.get((branch, kind), []):
            if later > layer:
                self._pool.prefetch((branch, later, kind))
                return

    def _keep(self, key: tuple[str, int, str], cache: Any, loaded: torch.Tensor | None) -> None:
        """Writes back what a layer made or changed, and takes it off its cache."""
        branch, layer, name = key
        tensor = getattr(cache, name)
        if tensor is not None and (tensor is not loaded or KINDS[name].rewritten):
            if not self._pool.takes(key, tensor):
                self._notify(
                    f"{name} of layer {layer} is larger than planned ({list(tensor.shape)} in "
                    f"{tensor.dtype}) and stays on the device"
                )
                self._pool.release(key)
                self._pool.drop(key)
                self._hosted[branch, name].remove(layer)
                return
            self._pool.store(key, tensor)
        setattr(cache, name, None)
        self._pool.release(key)

"""A layer's tensor that lives in host memory, and is on the device for the time it is used."""

from __future__ import annotations

import torch

from chipsparse.cache.offload import Key, OffloadPool
from chipsparse.cache.tensors import CachedTensor


class HostedTensor(CachedTensor):
    """Stands between a layer and the pool.

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

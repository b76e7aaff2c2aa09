"""The tensors that one layer keeps between steps, for one guidance branch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import ClassVar, overload

import torch

from chipsparse.common.device_number import DeviceNumber
from chipsparse.config import Part, SparsityConfig

# A layer's lists of columns are kept between steps where they take no more. To make them costs a
# large layer nothing beside its attention; a small one waits for the host to launch it.
LISTS_BYTES = 4 << 20
# The most bytes of column sums that a refresh holds at a time: it goes over as many heads at once
# as fit, one at least.
COLUMN_SUMS_BYTES = 2 << 30
# A list whose length is not read back has a multiple of this many entries: rows stay aligned.
CAPACITY_MULTIPLE = 16


class CachedTensor:
    """A tensor that a layer keeps between steps: the one owner, who knows whether it is there.

    This one stays on the device. See `HostedTensor` for one in host memory.
    """

    _tensor: torch.Tensor | None = None

    @property
    def is_set(self) -> bool:
        """Whether the layer has recorded it, wherever it lives."""
        return self._tensor is not None

    def get(self) -> torch.Tensor | None:
        """What of it is on the device now."""
        return self._tensor

    def set(self, tensor: torch.Tensor) -> None:
        """Keeps another one in its place."""
        self._tensor = tensor


class CacheField:
    """A field of a cache whose value is a `CachedTensor`'s.

    Args:
        wanted: whether a config needs it.
        rewritten: whether a sparse step changes the tensor in place, so that it moves both ways.

    Attributes:
        name: its own.
        part: of the layer, whose cache has it.
    """

    name: str
    part: Part

    def __init__(
        self, *, wanted: Callable[[SparsityConfig], bool] = lambda _: True, rewritten: bool = False
    ) -> None:
        self.wanted = wanted
        self.rewritten = rewritten

    def __set_name__(self, owner: type[TensorCache], name: str) -> None:
        self.name, self.part = name, owner.part

    @overload
    def __get__(self, cache: None, owner: type) -> CacheField: ...

    @overload
    def __get__(self, cache: TensorCache, owner: type) -> torch.Tensor | None: ...

    def __get__(self, cache: TensorCache | None, owner: type) -> CacheField | torch.Tensor | None:
        return self if cache is None else cache.tensors[self.name].get()

    def __set__(self, cache: TensorCache, tensor: torch.Tensor) -> None:
        cache.tensors[self.name].set(tensor)


class TensorCache:
    """What a part of a layer keeps.

    Attributes:
        part: of the layer.
        kept: the fields that hold tensors, by name.
        tensors: the same tensors' owners.
    """

    part: ClassVar[Part]
    kept: ClassVar[dict[str, CacheField]]

    def __init_subclass__(cls) -> None:
        cls.kept = {name: each for name, each in vars(cls).items() if isinstance(each, CacheField)}

    def __init__(self) -> None:
        self.tensors = {name: CachedTensor() for name in self.kept}

    def __copy__(self) -> TensorCache:
        """One with the same tensors, in which others can be set."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other.tensors = {name: copy.copy(owner) for name, owner in self.tensors.items()}
        return other

    def on_device(self) -> Iterator[torch.Tensor]:
        """All tensors that are on the device now."""
        for owner in self.tensors.values():
            tensor = owner.get()
            if tensor is not None:
                yield tensor


def merges(config: SparsityConfig) -> bool:
    """Whether a config has the delta rule that weighs kept and dropped columns by their mass."""
    return config.attention.delta_rule == "merge"


def in_fp8(config: SparsityConfig) -> bool:
    """Whether a config keeps residuals and activations in FP8."""
    return config.memory.cache_precision == "fp8"


class AttentionCache(TensorCache):
    """What self-attention remembers of its last dense and refresh steps.

    Args:
        residual_in_fp8: whether a refresh rounds the residual to e4m3.

    Attributes:
        lse: log-sum-exp of the last dense or refresh step, float32 ``[B, H, N]``.
        columns: packed bits of the kept columns, uint8 ``[B, H, G, ceil(N / 8)]``.
        capacity: entries of the lists of kept columns, known to the host since the refresh so that
            no sparse step need wait for it; None before the columns are chosen.
        longest: the most columns that any query block keeps, where the capacity was not read from
            the columns themselves, so that lists may have been cut off there; None once it is known
            that none was.
        kept_fraction: mean share of the columns that is kept, as a number or 0-d tensor.
        residual: (merge, difference) what is added to the kept columns, ``[B, H, N, D]``.
        residual_scale: (e4m3) by which its rows are multiplied, float32 ``[B, H, N]``.
        lists: the kept columns as lists, with their lengths (see `packed_to_indices`), where they
            are small; else they are made of ``columns`` at every step. Memory for them is reserved
            with the working memory, wherever the cache lives.
        lse_dense: (merge) log-sum-exp of the refresh, float32 ``[B, H, N]``.
        kept_mass: (merge) softmax mass of the kept columns at the refresh, float32 ``[B, H, N]``.
    """

    part = "attention"

    lse = CacheField()
    lse_dense = CacheField(wanted=merges)
    kept_mass = CacheField(wanted=merges)
    columns = CacheField()
    residual = CacheField()
    residual_scale = CacheField(wanted=in_fp8)

    def __init__(self, *, residual_in_fp8: bool = False) -> None:
        super().__init__()
        self.residual_in_fp8 = residual_in_fp8
        self.capacity: int | None = None
        self.longest: DeviceNumber | None = None
        self.kept_fraction: torch.Tensor | float = 0.0
        self.lists: tuple[torch.Tensor, torch.Tensor] | None = None

    def on_device(self) -> Iterator[torch.Tensor]:
        """All tensors that are on the device now, but for the lists, which are working memory."""
        yield from super().on_device()
        if isinstance(self.kept_fraction, torch.Tensor):
            yield self.kept_fraction

    def lists_were_cut(self) -> bool:
        """Whether the last refresh kept more columns than it made room for.

        Waits for that number where the host does not know it yet.
        """
        if self.longest is None:
            return False
        assert self.capacity is not None
        if float(self.longest) >= self.capacity:
            return True
        self.longest = None
        return False


class MLPCache(TensorCache):
    """What a feed-forward layer remembers.

    Args:
        activation_in_fp8: whether a dense step rounds the activations to e4m3.

    Attributes:
        activation: neurons after the activation function, ``[B, N, F]``.
        token_scale: (e4m3) by which those of a token are multiplied, float32 ``[B, N, 1]``.
        output: the layer's output, ``[B, N, C]``.
        mean: mean pre-activation of every token block when its neuron was last computed,
            float32 ``[B, G, F]``.
    """

    part = "mlp"

    mean = CacheField(rewritten=True)
    output = CacheField(rewritten=True)
    activation = CacheField(rewritten=True)
    token_scale = CacheField(wanted=in_fp8)

    def __init__(self, *, activation_in_fp8: bool = False) -> None:
        super().__init__()
        self.activation_in_fp8 = activation_in_fp8


class LayerCache:
    """The caches of one transformer block and guidance branch."""

    def __init__(self, *, in_fp8: bool = False) -> None:
        self.attention = AttentionCache(residual_in_fp8=in_fp8)
        self.mlp = MLPCache(activation_in_fp8=in_fp8)

    def nbytes(self) -> int:
        """Bytes of all tensors on the device, each storage counted once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for part in (self.attention, self.mlp)
            for tensor in part.on_device()
        }
        return sum(storages.values())

"""The tensors that one layer keeps between steps, for one guidance branch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

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


@dataclass(frozen=True)
class Kept:
    """The declaration of a tensor that a layer keeps between steps.

    Attributes:
        name: the field of the cache that holds it.
        part: the part of the layer whose cache it is.
        wanted: returns True for a config that needs it.
        rewritten: True where a sparse step changes the tensor in place, so that it moves both ways.
    """

    name: str
    part: Part
    wanted: Callable[[SparsityConfig], bool]
    rewritten: bool


def kept(
    *, wanted: Callable[[SparsityConfig], bool] = lambda _: True, rewritten: bool = False
) -> Any:
    """Declare a dataclass field for a tensor that a layer keeps; see `Kept`."""
    return field(default=None, metadata={"wanted": wanted, "rewritten": rewritten})


class PartCache:
    """Base of the caches of one part of a layer: dataclasses whose `kept` fields hold tensors.

    A kept field is None where nothing was recorded, and while its tensor is in host memory.
    """

    part: ClassVar[Part]

    @classmethod
    def declared(cls) -> dict[str, Kept]:
        """Return the declarations of the kept tensors by name."""
        return {
            item.name: Kept(item.name, cls.part, **item.metadata)
            for item in fields(cls)  # type: ignore[arg-type]
            if item.metadata
        }

    def on_device(self) -> dict[str, torch.Tensor]:
        """Return the kept tensors that are on the device now, by name."""
        tensors = ((name, getattr(self, name)) for name in self.declared())
        return {name: tensor for name, tensor in tensors if tensor is not None}


def merges(config: SparsityConfig) -> bool:
    """Return True where the delta rule is the one that weighs kept and dropped columns by mass."""
    return config.attention.delta_rule == "merge"


def in_fp8(config: SparsityConfig) -> bool:
    """Return True where a config keeps residuals and activations in FP8."""
    return config.memory.cache_precision == "fp8"


@dataclass(eq=False)
class AttentionCache(PartCache):
    """The memory of self-attention between dense, refresh and sparse steps.

    Attributes:
        residual_in_fp8: True where a refresh rounds the residual to e4m3.
        lse: log-sum-exp of the last dense or refresh step, float32 ``[B, H, N]``.
        lse_dense: (merge) log-sum-exp of the refresh, float32 ``[B, H, N]``.
        kept_mass: (merge) softmax mass of the kept columns at the refresh, float32 ``[B, H, N]``.
        columns: packed bits of the kept columns, uint8 ``[B, H, G, ceil(N / 8)]``.
        residual: (merge, difference) what is added to the kept columns, ``[B, H, N, D]``.
        residual_scale: (e4m3) by which its rows are multiplied, float32 ``[B, H, N]``.
        lists: the kept columns as lists, with their lengths (see `packed_to_indices`), where they
            are small; else they are made of ``columns`` at every step. They are part of the working
            memory, wherever the cache lives.
        capacity: entries of the lists of kept columns, known to the host since the refresh so that
            no sparse step need wait for it; None before the columns are chosen.
        longest: the most columns that any query block keeps, where the capacity was not read from
            the columns themselves, so that lists may have been cut off there; None once it is known
            that none was.
        kept_fraction: mean share of the columns that is kept, as a number or 0-d tensor.
    """

    part = "attention"

    residual_in_fp8: bool = False
    lse: torch.Tensor | None = kept()
    lse_dense: torch.Tensor | None = kept(wanted=merges)
    kept_mass: torch.Tensor | None = kept(wanted=merges)
    columns: torch.Tensor | None = kept()
    residual: torch.Tensor | None = kept()
    residual_scale: torch.Tensor | None = kept(wanted=in_fp8)
    lists: tuple[torch.Tensor, torch.Tensor] | None = None
    capacity: int | None = None
    longest: DeviceNumber | None = None
    kept_fraction: torch.Tensor | float = 0.0

    def lists_were_cut(self) -> bool:
        """Return True where the last refresh kept more columns than it made room for.

        The host waits for that number where the host does not know it yet.
        """
        if self.longest is None:
            return False
        assert self.capacity is not None
        if float(self.longest) >= self.capacity:
            return True
        self.longest = None
        return False


@dataclass(eq=False)
class MLPCache(PartCache):
    """The memory of a feed-forward layer between steps.

    Attributes:
        activation_in_fp8: True where a dense step rounds the activations to e4m3.
        mean: mean pre-activation of every token block when its neuron was last computed,
            float32 ``[B, G, F]``.
        output: the layer's output, ``[B, N, C]``.
        activation: neurons after the activation function, ``[B, N, F]``.
        token_scale: (e4m3) by which those of a token are multiplied, float32 ``[B, N, 1]``.
    """

    part = "mlp"

    activation_in_fp8: bool = False
    mean: torch.Tensor | None = kept(rewritten=True)
    output: torch.Tensor | None = kept(rewritten=True)
    activation: torch.Tensor | None = kept(rewritten=True)
    token_scale: torch.Tensor | None = kept(wanted=in_fp8)


class LayerCache:
    """The caches of one transformer block and guidance branch."""

    def __init__(self, *, in_fp8: bool = False) -> None:
        self.attention = AttentionCache(residual_in_fp8=in_fp8)
        self.mlp = MLPCache(activation_in_fp8=in_fp8)

    def nbytes(self) -> int:
        """Return the bytes of all tensors on the device, each storage counted once.

        The lists of columns do not count.
        """
        tensors = [*self.attention.on_device().values(), *self.mlp.on_device().values()]
        if isinstance(self.attention.kept_fraction, torch.Tensor):
            tensors.append(self.attention.kept_fraction)
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

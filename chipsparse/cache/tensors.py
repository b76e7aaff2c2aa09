"""The tensors that one layer keeps between steps, for one guidance branch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch

from chipsparse.common.device_number import DeviceNumber


@dataclass
class AttentionCache:
    """What self-attention remembers of its last dense and refresh steps.

    Attributes:
        lse: softmax constants of the last dense or refresh step, float32 ``[B, H, N]``.
        columns: packed bits of the kept columns, uint8 ``[B, H, G, ceil(N / 8)]``.
        capacity: entries of the lists of kept columns, known to the host since the refresh so that
            no sparse step need wait for it; None before the columns are chosen.
        longest: the most columns that any query group keeps, where the capacity was not read from
            the columns themselves, so that lists may have been cut off there; None once it is known
            that none was.
        kept_fraction: mean share of the columns that is kept, as a number or 0-d tensor.
        residual: what the delta rule adds to the kept columns, ``[B, H, N, D]``.
        lists: the kept columns as lists, with their lengths (see `packed_to_indices`), where they
            are small; else they are made of ``columns`` at every step. Memory for them is reserved
            with the working memory, wherever the cache lives.
        lse_dense: (merge) softmax constants of the refresh, float32 ``[B, H, N]``.
        kept_mass: (merge) softmax mass of the kept columns at the refresh, float32 ``[B, H, N]``.
        drift: what the last refresh found missing in the output that a sparse step would have
            given in its place, ``[B, H, N, D]``; None before the second refresh.
        refreshed_at: step of the last refresh, where a drift is recorded.
        interval: steps from the refresh before it to the last one, over which the drift arose.
    """

    lse: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    capacity: int | None = None
    longest: DeviceNumber | None = None
    kept_fraction: torch.Tensor | float = 0.0
    lists: tuple[torch.Tensor, torch.Tensor] | None = None
    residual: torch.Tensor | None = None
    lse_dense: torch.Tensor | None = None
    kept_mass: torch.Tensor | None = None
    drift: torch.Tensor | None = None
    refreshed_at: int | None = None
    interval: int = 1

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


@dataclass
class MLPCache:
    """What a feed-forward layer remembers.

    Attributes:
        activation: neurons after the activation function, ``[B, N, F]``.
        output: the layer's output, ``[B, N, C]``.
        mean: mean pre-activation of every token group when its neuron was last computed,
            float32 ``[B, G, F]``.
    """

    activation: torch.Tensor | None = None
    output: torch.Tensor | None = None
    mean: torch.Tensor | None = None


@dataclass
class LayerCache:
    """The caches of one transformer block and guidance branch."""

    attention: AttentionCache = field(default_factory=AttentionCache)
    mlp: MLPCache = field(default_factory=MLPCache)

    def nbytes(self) -> int:
        """Bytes of all tensors, each storage counted once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for part in (self.attention, self.mlp)
            for tensor in (getattr(part, item.name) for item in dataclasses.fields(part))
            if isinstance(tensor, torch.Tensor)
        }
        return sum(storages.values())

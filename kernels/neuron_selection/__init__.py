"""The neurons of each token block whose mean pre-activation changed most."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from chipsparse.kernels.calls import FirstLayerCall
from chipsparse.kernels.checks import block_count, check_shape
from chipsparse.kernels.dispatch import Operation, triton_or_reference
from chipsparse.kernels.triton_support import mlp_unsupported_reason

# One program has all scores of a block in its registers.
MOST_NEURONS = 1 << 16


@dataclass(slots=True, eq=False)
class NeuronSelection(FirstLayerCall[torch.Tensor]):
    """Chooses the neurons to recompute, by how far the block's mean pre-activation has moved.

    The score of a neuron is ``|m' - m|``: m' is its mean pre-activation over the block now, m the
    one when it was last computed (Chipmunk's sparse MLP delta). Of a gated MLP, m is the product
    that `mean_preactivations` says. ``mean_cache`` is MUTATED: m' is written for the chosen
    neurons, and all other entries stay bit for bit.

    Args (and those of `FirstLayerCall`):
        mean_cache: m, ``[B, G, F]`` float32 (or float64), first from `mean_preactivations`.
        keep_count: K, neurons per block; more than F means F. Equal scores go to the lower neuron,
            NaN is the highest score.
        activation: not used without a gate.

    Returns:
        int32 ``[B, G, K]``, ascending.
    """

    mean_cache: torch.Tensor
    _: KW_ONLY
    keep_count: int

    def check(self) -> None:
        """Raises ``ValueError`` where shapes, dtypes, the count or the activation do not fit."""
        means = self.mean_cache
        _check_layer(self)
        if self.keep_count < 0:
            raise ValueError(f"keep_count must not be negative, got {self.keep_count}")
        if means.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"mean_cache must be float32 or float64, got {means.dtype}")
        batch, rows, _ = self.hidden.shape
        blocks = block_count(rows, self.block_size)
        check_shape("mean_cache", means, (batch, blocks, self.weight.shape[0]))


@dataclass(slots=True, eq=False)
class MeanPreactivations(FirstLayerCall[torch.Tensor]):
    """The mean pre-activation of every neuron over each token block, as a dense step records it.

    The layer is linear, so this is the layer on the mean token of the block. With a gate it is
    ``activation(mean_gate) * mean_up``: the activation of the mean token, which stands for the mean
    activation. Without a gate no activation is needed.

    Returns:
        ``[B, G, F]`` float32 (float64 for float64 inputs). The last bits are those of
        `neuron_selection` with the same backend.
    """

    def check(self) -> None:
        """Raises ``ValueError`` where shapes, dtypes or the activation do not fit."""
        _check_layer(self)


def _check_layer(call: FirstLayerCall[Any]) -> None:
    call.check_first_layer(activated=call.gate_weight is not None)
    if call.hidden.shape[1] == 0:
        raise ValueError(f"hidden must be [B, N, C], got {list(call.hidden.shape)}")


def _not_for_triton(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    gate_weight: torch.Tensor | None,
    mean_cache: torch.Tensor | None = None,
) -> str | None:
    if weight.shape[0] > MOST_NEURONS:
        return f"needs at most {MOST_NEURONS} neurons, got {weight.shape[0]}"
    if mean_cache is not None and mean_cache.dtype != torch.float32:
        return f"needs a mean_cache of torch.float32, got {mean_cache.dtype}"
    return None


neuron_selection = Operation(
    "neuron_selection",
    NeuronSelection,
    lambda call: (call.hidden, call.weight, call.gate_weight, call.mean_cache),
    *triton_or_reference(__name__, "neuron_selection", mlp_unsupported_reason, _not_for_triton),
)
mean_preactivations = Operation(
    "mean_preactivations",
    MeanPreactivations,
    lambda call: (call.hidden, call.weight, call.gate_weight),
    *triton_or_reference(__name__, "mean_preactivations", mlp_unsupported_reason, _not_for_triton),
)

"""A feed-forward layer at one step: what each action computes and records.

The weights are passed in at every call and never kept, so adapters, offloading and quantization
stay in charge of them. Source of the method: Chipmunk's sparse MLP delta, as for attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from chipsparse.cache import MLPCache
from chipsparse.config import MLPConfig
from chipsparse.kernels import neuron_selection as neuron_selection_op
from chipsparse.kernels import sparse_mlp_down as sparse_mlp_down_op
from chipsparse.kernels import sparse_mlp_up as sparse_mlp_up_op
from chipsparse.kernels.dispatch import Choice
from chipsparse.kernels.neuron_selection import mean_preactivations, neuron_selection
from chipsparse.kernels.sparse_mlp_down import sparse_mlp_down
from chipsparse.kernels.sparse_mlp_up import sparse_mlp_up
from chipsparse.kernels.sparse_mlp_up.reference import activate

Activation = Literal["gelu-tanh", "gelu", "silu"]


@dataclass(frozen=True)
class MLPWeights:
    """The live weights of a two-layer MLP: ``activation(x @ up.T + up_bias) @ down.T + down_bias``.

    Shapes: up ``[F, C]``, up_bias ``[F]``, down ``[C, F]``, down_bias ``[C]``.
    """

    up: torch.Tensor
    up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    activation: Activation


def backend_choices(
    hidden: torch.Tensor, weights: MLPWeights, backend: str | None
) -> dict[str, Choice]:
    """The backend that each operation on these tensors runs on, and why not on others."""
    return {
        "neuron_selection": neuron_selection_op.select(hidden, weights.up, force=backend),
        "sparse_mlp_up": sparse_mlp_up_op.select(hidden, weights.up, force=backend),
        "sparse_mlp_down": sparse_mlp_down_op.select(hidden, weights.down, force=backend),
    }


def dense_step(
    cache: MLPCache | None, hidden: torch.Tensor, weights: MLPWeights, *, config: MLPConfig
) -> torch.Tensor:
    """The whole layer for hidden ``[B, N, C]``; records activations, output and group means."""
    activation = activate(F.linear(hidden, weights.up, weights.up_bias), weights.activation)
    output = F.linear(activation, weights.down, weights.down_bias)
    if cache is not None:
        cache.mean = mean_preactivations(
            hidden, weights.up, weights.up_bias, group_rows=config.group_rows
        )
        cache.activation, cache.output = activation, output.clone()
        cache.neurons, cache.age = None, 0
    return output


def sparse_step(
    cache: MLPCache,
    hidden: torch.Tensor,
    weights: MLPWeights,
    *,
    config: MLPConfig,
    keep_count: int,
    backend: str | None,
) -> torch.Tensor:
    """Recomputes the neurons that changed most and adds their change to the cached output."""
    assert cache.activation is not None
    assert cache.output is not None
    assert cache.mean is not None
    if cache.neurons is None or cache.age >= config.reselect_every:
        cache.neurons, cache.age = None, 0
        cache.neurons = neuron_selection(
            hidden,
            weights.up,
            weights.up_bias,
            cache.mean,
            keep_count=keep_count,
            group_rows=config.group_rows,
            backend=backend,
        )
    cache.age += 1
    delta = sparse_mlp_up(
        hidden,
        weights.up,
        weights.up_bias,
        cache.neurons,
        cache.activation,
        activation=weights.activation,
        group_rows=config.group_rows,
        backend=backend,
    )
    sparse_mlp_down(
        delta,
        weights.down,
        cache.neurons,
        cache.output,
        group_rows=config.group_rows,
        backend=backend,
    )
    return cache.output.clone()

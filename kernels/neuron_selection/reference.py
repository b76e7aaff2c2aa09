"""Definition of `neuron_selection`: block means, a small matrix product, an exact top-k."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from chipsparse.kernels.checks import compute_dtype
from chipsparse.kernels.neuron_selection import MeanPreactivations, NeuronSelection
from chipsparse.kernels.sparse_mlp_up.reference import activate


def neuron_selection(call: NeuronSelection) -> torch.Tensor:
    """Run a checked `NeuronSelection`."""
    mean_cache = call.mean_cache
    means = mean_preactivations(call).to(mean_cache.dtype)
    scores = (means - mean_cache).abs_()
    # A stable sort puts NaN first and, among equal scores, the lower neuron.
    order = scores.argsort(dim=-1, descending=True, stable=True)
    neurons = order[..., : min(call.keep_count, call.weight.shape[0])].sort(dim=-1).values
    mean_cache.scatter_(-1, neurons, means.gather(-1, neurons))
    return neurons.int()


def mean_preactivations(call: MeanPreactivations | NeuronSelection) -> torch.Tensor:
    """Run a checked `MeanPreactivations`."""
    means = block_means(call.hidden, block_size=call.block_size)
    up = _linear(means, call.weight, call.bias)
    if call.gate_weight is None:
        return up
    return activate(_linear(means, call.gate_weight, call.gate_bias), call.activation) * up


def _linear(means: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    dtype = means.dtype
    return F.linear(means, weight.to(dtype), None if bias is None else bias.to(dtype))


def block_means(hidden: torch.Tensor, *, block_size: int) -> torch.Tensor:
    """Means of hidden ``[B, N, C]`` over blocks of rows, the last of which may be ragged.

    Returns ``[B, G, C]`` float32 (float64 for float64 inputs).
    """
    dtype = compute_dtype(hidden)
    full = hidden.shape[1] // block_size * block_size
    means = hidden[:, :full].unflatten(1, (-1, block_size)).mean(2, dtype=dtype)
    if full == hidden.shape[1]:
        return means
    return torch.cat([means, hidden[:, full:].mean(1, keepdim=True, dtype=dtype)], dim=1)

"""Definition of `neuron_selection`: group means, a small matrix product, an exact top-k."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from chipsparse.kernels.checks import compute_dtype
from chipsparse.kernels.sparse_mlp_up.reference import activate


def neuron_selection(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean_cache: torch.Tensor,
    *,
    keep_count: int,
    gate_weight: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
    activation: str | None,
    group_rows: int,
) -> torch.Tensor:
    """See the public function of the same name; all arguments are checked."""
    means = mean_preactivations(
        hidden,
        weight,
        bias,
        gate_weight=gate_weight,
        gate_bias=gate_bias,
        activation=activation,
        group_rows=group_rows,
    ).to(mean_cache.dtype)
    scores = (means - mean_cache).abs_()
    # A stable sort puts NaN first and, among equal scores, the lower neuron.
    order = scores.argsort(dim=-1, descending=True, stable=True)
    neurons = order[..., : min(keep_count, weight.shape[0])].sort(dim=-1).values
    mean_cache.scatter_(-1, neurons, means.gather(-1, neurons))
    return neurons.int()


def mean_preactivations(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gate_weight: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
    activation: str | None,
    group_rows: int,
) -> torch.Tensor:
    """See `chipsparse.kernels.neuron_selection.mean_preactivations`."""
    means = group_means(hidden, group_rows=group_rows)
    up = _linear(means, weight, bias)
    if gate_weight is None:
        return up
    assert activation is not None
    return activate(_linear(means, gate_weight, gate_bias), activation) * up


def _linear(means: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    dtype = means.dtype
    return F.linear(means, weight.to(dtype), None if bias is None else bias.to(dtype))


def group_means(hidden: torch.Tensor, *, group_rows: int) -> torch.Tensor:
    """See `chipsparse.kernels.neuron_selection.group_means`."""
    dtype = compute_dtype(hidden)
    full = hidden.shape[1] // group_rows * group_rows
    means = hidden[:, :full].unflatten(1, (-1, group_rows)).mean(2, dtype=dtype)
    if full == hidden.shape[1]:
        return means
    return torch.cat([means, hidden[:, full:].mean(1, keepdim=True, dtype=dtype)], dim=1)

"""The first linear layer of an MLP on the chosen neurons only, as a change against a cache."""

from __future__ import annotations

from typing import Literal

import torch

from chipsparse.kernels.checks import (
    check_dtype,
    check_floating,
    check_group_rows,
    check_shape,
    group_count,
)
from chipsparse.kernels.dispatch import Backend, Choice, choose, runs_anywhere
from chipsparse.kernels.sparse_mlp_up import reference

BACKENDS = (Backend("reference", reference.sparse_mlp_up, runs_anywhere),)


def select(hidden: torch.Tensor, weight: torch.Tensor, *, force: str | None = None) -> Choice:
    """The backend that `sparse_mlp_up` would use for these tensors."""
    return choose("sparse_mlp_up", BACKENDS, hidden, weight, force=force)


def sparse_mlp_up(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    neuron_indices: torch.Tensor,
    activation_cache: torch.Tensor,
    *,
    counts: torch.Tensor | None = None,
    activation: Literal["gelu-tanh", "gelu", "silu"],
    group_rows: int = 128,
    backend: str | None = None,
) -> torch.Tensor:
    """Computes ``activation(hidden @ weight[S].T + bias[S])`` and returns its change.

    S is the neuron list of the token group (Chipmunk's sparse MLP delta). ``activation_cache`` is
    MUTATED: the entries of the listed neurons are overwritten with the new activations, after the
    old ones were read; all others stay bit for bit. The change is the one between the stored
    values, so rounding does not add up over the steps.

    Args:
        hidden: ``[B, N, C]`` fp16, bf16, fp32 or fp64.
        weight: ``[F, C]``, dtype of hidden; read in place and never kept.
        bias: ``[F]`` or None.
        neuron_indices: int32 ``[B, G, K]``, below F; a list must not repeat a neuron. Entries past
            a group's count must be valid neurons too (0 will do); they are ignored.
        activation_cache: ``[B, N, F]`` floating point, last written activations.
        counts: int32 ``[B, G]``, how many entries of each list count; None for all.
        activation: activation function, as diffusers names it.
        group_rows: token rows per group; the last of the G = ceil(N / group_rows) may be ragged.
        backend: forces one (``reference``); None takes the first that can run.

    Returns:
        New minus old activation of the listed neurons, ``[B, N, K]`` in hidden's dtype; 0 past the
        count.

    Raises:
        ValueError: shapes or dtypes do not fit, the activation is unknown, or the forced backend
            cannot run.
    """
    op = "sparse_mlp_up"
    check_floating(op, hidden=hidden, activation_cache=activation_cache)
    check_group_rows(op, group_rows)
    if hidden.dim() != 3:
        raise ValueError(f"{op}: hidden must be [B, N, C], got {list(hidden.shape)}")
    batch, rows, channels = hidden.shape
    check_shape(op, "weight", weight, (*weight.shape[:1], channels))
    check_dtype(op, "weight", weight, hidden.dtype)
    neurons = weight.shape[0]
    if bias is not None:
        check_shape(op, "bias", bias, (neurons,))
    groups = group_count(rows, group_rows)
    check_dtype(op, "neuron_indices", neuron_indices, torch.int32)
    capacity = neuron_indices.shape[-1:]
    check_shape(op, "neuron_indices", neuron_indices, (batch, groups, *capacity))
    check_shape(op, "activation_cache", activation_cache, (batch, rows, neurons))
    if counts is not None:
        check_dtype(op, "counts", counts, torch.int32)
        check_shape(op, "counts", counts, (batch, groups))
    if activation not in ("gelu-tanh", "gelu", "silu"):
        raise ValueError(f"{op}: activation must be gelu-tanh, gelu or silu, got {activation!r}")
    return select(hidden, weight, force=backend).backend.launch(
        hidden,
        weight,
        bias,
        neuron_indices,
        activation_cache,
        counts=counts,
        activation=activation,
        group_rows=group_rows,
    )

"""The neurons of each token group whose mean pre-activation changed most."""

from __future__ import annotations

from typing import Literal

import torch

from chipsparse.kernels import ops
from chipsparse.kernels.checks import (
    check_activation,
    check_first_layer,
    check_floating,
    check_group_rows,
    check_shape,
    group_count,
)
from chipsparse.kernels.dispatch import Backend, Choice, choose, imported, runs_anywhere
from chipsparse.kernels.neuron_selection import reference
from chipsparse.kernels.triton_support import why_not_mlp, why_not_unasked

# One program has all scores of a group in its registers.
MOST_NEURONS = 1 << 16


def why_not_selection(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    mean_cache: torch.Tensor | None = None,
    gate_weight: torch.Tensor | None = None,
    group_rows: int = 128,
) -> str | None:
    """Why the Triton kernels cannot run on these tensors, or None."""
    del group_rows  # any
    if (reason := why_not_mlp(hidden, weight, gate_weight)) is not None:
        return reason
    if weight.shape[0] > MOST_NEURONS:
        return f"needs at most {MOST_NEURONS} neurons, got {weight.shape[0]}"
    if mean_cache is not None and mean_cache.dtype != torch.float32:
        return f"needs a mean_cache of torch.float32, got {mean_cache.dtype}"
    return None


def _triton(function: str) -> Backend:
    launch = imported("chipsparse.kernels.neuron_selection.triton_kernel", function)
    return Backend("triton", launch, why_not_selection, why_not_unasked)


BACKENDS = (
    _triton("neuron_selection"),
    Backend("reference", reference.neuron_selection, runs_anywhere),
)
MEAN_BACKENDS = (
    _triton("mean_preactivations"),
    Backend("reference", reference.mean_preactivations, runs_anywhere),
)


def select(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    mean_cache: torch.Tensor | None = None,
    *,
    gate_weight: torch.Tensor | None = None,
    group_rows: int = 128,
    force: str | None = None,
) -> Choice:
    """The backend that `neuron_selection` would use for these tensors.

    Without a ``mean_cache``: for one that `mean_preactivations` makes.
    """
    return choose(
        "neuron_selection",
        BACKENDS,
        hidden,
        weight,
        mean_cache,
        gate_weight,
        group_rows,
        force=force,
    )


def neuron_selection(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean_cache: torch.Tensor,
    *,
    keep_count: int,
    gate_weight: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    activation: Literal["gelu-tanh", "gelu", "silu"] | None = None,
    group_rows: int = 128,
    backend: str | Choice | None = None,
) -> torch.Tensor:
    """Chooses the neurons to recompute, by how far the group's mean pre-activation has moved.

    The score of a neuron is ``|m' - m|``: m' is its mean pre-activation over the group now, m the
    one when it was last computed (Chipmunk's sparse MLP delta). Of a gated MLP, m is the product
    that `mean_preactivations` says. ``mean_cache`` is MUTATED: m' is written for the chosen
    neurons, and all other entries stay bit for bit.

    Args:
        hidden: ``[B, N, C]`` fp16, bf16, fp32 or fp64.
        weight: ``[F, C]`` of the first layer, dtype of hidden; read in place and never kept.
        bias: ``[F]`` or None.
        mean_cache: m, ``[B, G, F]`` float32 (or float64), first from `mean_preactivations`.
        keep_count: K, neurons per group; more than F means F. Equal scores go to the lower neuron,
            NaN is the highest score.
        gate_weight: ``[F, C]``, dtype of hidden, or None for an MLP without a gate.
        gate_bias: ``[F]`` or None.
        activation: activation function of the gate; not used without one.
        group_rows: token rows per group; the last of the G = ceil(N / group_rows) may be ragged.
        backend: forces one (``triton``, ``reference``); None takes the first that can run.
            A `Choice` of `select` for such tensors runs unchecked.

    Returns:
        int32 ``[B, G, K]``, ascending.

    Raises:
        ValueError: shapes or dtypes do not fit, ``keep_count`` is negative, a gate has no
            activation, or the forced backend cannot run.
    """
    if isinstance(backend, Choice):
        choice = backend
    elif torch.compiler.is_dynamo_compiling():
        return ops.neuron_selection(
            hidden,
            weight,
            bias,
            mean_cache,
            keep_count,
            gate_weight,
            gate_bias,
            activation,
            group_rows,
            backend,
        )
    else:
        op = "neuron_selection"
        _check(op, hidden, weight, bias, gate_weight, gate_bias, activation, group_rows)
        if keep_count < 0:
            raise ValueError(f"{op}: keep_count must not be negative, got {keep_count}")
        if mean_cache.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{op}: mean_cache must be float32 or float64, got {mean_cache.dtype}")
        groups = group_count(hidden.shape[1], group_rows)
        check_shape(op, "mean_cache", mean_cache, (hidden.shape[0], groups, weight.shape[0]))
        choice = select(
            hidden,
            weight,
            mean_cache,
            gate_weight=gate_weight,
            group_rows=group_rows,
            force=backend,
        )
    return choice.backend.launch(
        hidden,
        weight,
        bias,
        mean_cache,
        keep_count=keep_count,
        gate_weight=gate_weight,
        gate_bias=gate_bias,
        activation=activation,
        group_rows=group_rows,
    )


def group_means(hidden: torch.Tensor, *, group_rows: int = 128) -> torch.Tensor:
    """Means over groups of consecutive token rows.

    Args:
        hidden: ``[B, N, C]`` floating point.
        group_rows: token rows per group; the last may be ragged.

    Returns:
        ``[B, G, C]`` float32 (float64 for float64 inputs).

    Raises:
        ValueError: hidden is not ``[B, N, C]`` floating point.
    """
    check_floating("group_means", hidden=hidden)
    check_group_rows("group_means", group_rows)
    if hidden.dim() != 3 or hidden.shape[1] == 0:
        raise ValueError(f"group_means: hidden must be [B, N, C], got {list(hidden.shape)}")
    return reference.group_means(hidden, group_rows=group_rows)


def mean_preactivations(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gate_weight: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    activation: Literal["gelu-tanh", "gelu", "silu"] | None = None,
    group_rows: int = 128,
    backend: str | None = None,
) -> torch.Tensor:
    """The mean pre-activation of every neuron over each token group, as a dense step records it.

    The layer is linear, so this is the layer on the mean token of the group. With a gate it is
    ``activation(mean_gate) * mean_up``: the activation of the mean token, which stands for the mean
    activation.

    Args:
        hidden: ``[B, N, C]`` floating point.
        weight: ``[F, C]``, dtype of hidden.
        bias: ``[F]`` or None.
        gate_weight: ``[F, C]``, dtype of hidden, or None for an MLP without a gate.
        gate_bias: ``[F]`` or None.
        activation: activation function of the gate; not used without one.
        group_rows: token rows per group; the last may be ragged.
        backend: forces one (``triton``, ``reference``); None takes the first that can run. The
            last bits are those of `neuron_selection` with the same backend.

    Returns:
        ``[B, G, F]`` float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes or dtypes do not fit, a gate has no activation, or the forced backend
            cannot run.
    """
    if torch.compiler.is_dynamo_compiling():
        return ops.mean_preactivations(
            hidden, weight, bias, gate_weight, gate_bias, activation, group_rows, backend
        )
    op = "mean_preactivations"
    _check(op, hidden, weight, bias, gate_weight, gate_bias, activation, group_rows)
    choice = choose(op, MEAN_BACKENDS, hidden, weight, None, gate_weight, group_rows, force=backend)
    return choice.backend.launch(
        hidden,
        weight,
        bias,
        gate_weight=gate_weight,
        gate_bias=gate_bias,
        activation=activation,
        group_rows=group_rows,
    )


def _check(
    op: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gate_weight: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
    activation: str | None,
    group_rows: int,
) -> None:
    check_group_rows(op, group_rows)
    check_first_layer(op, hidden, weight, bias, gate_weight, gate_bias)
    if hidden.shape[1] == 0:
        raise ValueError(f"{op}: hidden must be [B, N, C], got {list(hidden.shape)}")
    if gate_weight is not None:
        check_activation(op, activation)

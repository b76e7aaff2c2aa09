"""The first linear layer of an MLP on the chosen neurons only, as a change against a cache."""

from __future__ import annotations

from typing import Literal

import torch

from chipsparse.kernels import ops
from chipsparse.kernels.checks import (
    check_activation,
    check_dtype,
    check_first_layer,
    check_floating,
    check_group_rows,
    check_shape,
    group_count,
)
from chipsparse.kernels.dispatch import Backend, Choice, choose, imported, runs_anywhere
from chipsparse.kernels.sparse_mlp_up import library, reference
from chipsparse.kernels.token_layout import is_token_contiguous, rows_are_evenly_spaced
from chipsparse.kernels.triton_support import (
    NOT_ON_CPU,
    why_not_hopper,
    why_not_mlp,
    why_not_unasked,
)

TRITON_KERNEL = "chipsparse.kernels.sparse_mlp_up.triton_kernel"


def why_not_up(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    activation_cache: torch.Tensor | None = None,
    gate_weight: torch.Tensor | None = None,
    group_rows: int = 128,
) -> str | None:
    """Why the Triton kernel cannot run on these tensors, or None."""
    del group_rows  # any
    if (reason := why_not_mlp(hidden, weight, gate_weight)) is not None:
        return reason
    if activation_cache is None:
        return None
    if activation_cache.dtype == torch.float64:
        return "needs an activation_cache of fp16, bf16 or fp32, got torch.float64"
    if not is_token_contiguous(activation_cache):
        return (
            "needs an activation_cache whose tokens are contiguous, at a multiple of 8 for each "
            f"neuron, got strides {activation_cache.stride()} for [B, N, F]"
        )
    return None


def why_not_up_gluon(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    activation_cache: torch.Tensor | None = None,
    gate_weight: torch.Tensor | None = None,
    group_rows: int = 128,
) -> str | None:
    """Why the Gluon kernel cannot run on these tensors, or None."""
    if hidden.device.type == "cpu":
        return NOT_ON_CPU
    if (reason := why_not_up(hidden, weight, activation_cache, gate_weight)) is not None:
        return reason
    if gate_weight is not None:
        return "written for MLPs without a gate"
    if group_rows != 128:
        return f"needs groups of 128 rows, got {group_rows}"
    if hidden.data_ptr() % 16 or (hidden.shape[0] > 1 and not rows_are_evenly_spaced(hidden)):
        return "needs hidden at a multiple of 16 bytes and its rows at one distance over the batch"
    return why_not_hopper(hidden)


BACKENDS = (
    Backend(
        "gluon",
        imported("chipsparse.kernels.sparse_mlp_up.gluon_sm90", "sparse_mlp_up"),
        why_not_up_gluon,
    ),
    Backend("triton", imported(TRITON_KERNEL, "sparse_mlp_up"), why_not_up, why_not_unasked),
    Backend("reference", reference.sparse_mlp_up, runs_anywhere),
)


def select(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    activation_cache: torch.Tensor | None = None,
    *,
    gate_weight: torch.Tensor | None = None,
    group_rows: int = 128,
    force: str | None = None,
) -> Choice:
    """The backend that `sparse_mlp_up` would use for these tensors.

    Without an ``activation_cache``: for one as `dense_activation` makes it.
    """
    return choose(
        "sparse_mlp_up",
        BACKENDS,
        hidden,
        weight,
        activation_cache,
        gate_weight,
        group_rows,
        force=force,
    )


def sparse_mlp_up(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    neuron_indices: torch.Tensor,
    activation_cache: torch.Tensor,
    *,
    counts: torch.Tensor | None = None,
    activation: Literal["gelu-tanh", "gelu", "silu"],
    gate_weight: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    group_rows: int = 128,
    backend: str | Choice | None = None,
) -> torch.Tensor:
    """Computes the activations of the listed neurons and returns their change.

    With S the neuron list of a token group (Chipmunk's sparse MLP delta), the activation is
    ``activation(hidden @ weight[S].T + bias[S])``. In a gated MLP (SwiGLU and the like, with
    ``gate_weight``) it is ``activation(hidden @ gate_weight[S].T + gate_bias[S])`` times
    ``hidden @ weight[S].T + bias[S]``, and this product is what the cache holds.

    ``activation_cache`` is MUTATED: the entries of the listed neurons are overwritten with the new
    activations, after the old ones were read; all others stay bit for bit. The change is the one
    between the stored values, so rounding does not add up over the steps.

    Args:
        hidden: ``[B, N, C]`` fp16, bf16, fp32 or fp64.
        weight: ``[F, C]``, dtype of hidden; read in place and never kept.
        bias: ``[F]`` or None.
        neuron_indices: int32 ``[B, G, K]``, below F; a list must not repeat a neuron. Entries past
            a group's count must be valid neurons too (0 will do); they are ignored.
        activation_cache: ``[B, N, F]`` floating point, last written activations, of any strides.
            The kernels want the tokens of a neuron contiguous, as `dense_activation` makes it.
        counts: int32 ``[B, G]``, how many entries of each list count; None for all.
        activation: activation function, as diffusers names it.
        gate_weight: ``[F, C]``, dtype of hidden, or None for an MLP without a gate.
        gate_bias: ``[F]`` or None.
        group_rows: token rows per group; the last of the G = ceil(N / group_rows) may be ragged.
        backend: forces one (``gluon``, ``triton``, ``reference``); None takes the first that runs.
            A `Choice` of `select` for such tensors runs unchecked.

    Returns:
        New minus old activation of the listed neurons, ``[B, N, K]`` in hidden's dtype; 0 past the
        count. Its tokens are contiguous where those of the cache are, as `token_layout` says.

    Raises:
        ValueError: shapes or dtypes do not fit, the activation is unknown, or the forced backend
            cannot run.
    """
    if isinstance(backend, Choice):
        choice = backend
    elif torch.compiler.is_dynamo_compiling():
        return ops.sparse_mlp_up(
            hidden,
            weight,
            bias,
            neuron_indices,
            activation_cache,
            counts,
            activation,
            gate_weight,
            gate_bias,
            group_rows,
            backend,
        )
    else:
        op = "sparse_mlp_up"
        _check(op, hidden, weight, bias, activation, gate_weight, gate_bias, group_rows)
        _check_lists(op, hidden, weight, neuron_indices, activation_cache, counts, group_rows)
        choice = select(
            hidden,
            weight,
            activation_cache,
            gate_weight=gate_weight,
            group_rows=group_rows,
            force=backend,
        )
    return choice.backend.launch(
        hidden,
        weight,
        bias,
        neuron_indices,
        activation_cache,
        counts=counts,
        activation=activation,
        gate_weight=gate_weight,
        gate_bias=gate_bias,
        group_rows=group_rows,
    )


def dense_activation(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: Literal["gelu-tanh", "gelu", "silu"],
    gate_weight: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    group_rows: int = 128,
    backend: str | None = None,
) -> torch.Tensor:
    """The activations of all neurons, as a dense step computes and caches them.

    Args:
        hidden: ``[B, N, C]`` fp16, bf16, fp32 or fp64.
        weight: ``[F, C]``, dtype of hidden.
        bias: ``[F]`` or None.
        activation: activation function, as diffusers names it.
        gate_weight: ``[F, C]``, dtype of hidden, or None for an MLP without a gate.
        gate_bias: ``[F]`` or None.
        group_rows: token rows per group of the sparse steps that follow.
        backend: the backend of those steps (``gluon``, ``triton``, ``reference``); None for the one
            that `sparse_mlp_up` would take; ``library`` where none follow, for what PyTorch does
            fastest.

    Returns:
        ``[B, N, F]`` in hidden's dtype, in the strides which that backend wants: contiguous for the
        reference and the library, else with contiguous tokens, as `token_layout` says.

    Raises:
        ValueError: shapes or dtypes do not fit, the activation is unknown, or the forced backend
            cannot run.
    """
    if torch.compiler.is_dynamo_compiling():
        return ops.dense_activation(
            hidden, weight, bias, activation, gate_weight, gate_bias, group_rows, backend
        )
    _check("dense_activation", hidden, weight, bias, activation, gate_weight, gate_bias, group_rows)
    if backend == "library":
        if library.can_fuse(hidden, bias, activation, gate_weight):
            return library.dense_activation(hidden, weight, bias)
        backend = "reference"
    choice = select(hidden, weight, gate_weight=gate_weight, group_rows=group_rows, force=backend)
    launch = reference.dense_activation
    if choice.backend.name != "reference":
        launch = imported(TRITON_KERNEL, "dense_activation")
    return launch(
        hidden,
        weight,
        bias,
        activation=activation,
        gate_weight=gate_weight,
        gate_bias=gate_bias,
    )


def _check(
    op: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    gate_weight: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
    group_rows: int,
) -> None:
    """What both functions ask of hidden, the weights, and the activation."""
    check_group_rows(op, group_rows)
    check_first_layer(op, hidden, weight, bias, gate_weight, gate_bias)
    check_activation(op, activation)


def _check_lists(
    op: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    neuron_indices: torch.Tensor,
    activation_cache: torch.Tensor,
    counts: torch.Tensor | None,
    group_rows: int,
) -> None:
    """What `sparse_mlp_up` asks of its lists and its cache."""
    check_floating(op, activation_cache=activation_cache)
    batch, rows, _ = hidden.shape
    groups = group_count(rows, group_rows)
    check_dtype(op, "neuron_indices", neuron_indices, torch.int32)
    capacity = neuron_indices.shape[-1:]
    check_shape(op, "neuron_indices", neuron_indices, (batch, groups, *capacity))
    check_shape(op, "activation_cache", activation_cache, (batch, rows, weight.shape[0]))
    if counts is not None:
        check_dtype(op, "counts", counts, torch.int32)
        check_shape(op, "counts", counts, (batch, groups))

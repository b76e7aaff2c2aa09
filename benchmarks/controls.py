"""Controls of what sparse steps choose and keep: as much of it as usual, but the wrong things.

Each is a context in which the operations of sparse layers run differently, on every backend.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from chipsparse.kernels.column_selection import ColumnSelection, column_selection
from chipsparse.kernels.column_sparse_attention import (
    ColumnSparseAttention,
    column_sparse_attention,
)
from chipsparse.kernels.dispatch import Backend, Operation
from chipsparse.kernels.neuron_selection import (
    NeuronSelection,
    mean_preactivations,
    neuron_selection,
)

Control = AbstractContextManager[Any]


def _run_as(operation: Operation[..., Any], around: Callable[[Backend, Any], Any]) -> Control:
    """Lets an operation compute what ``around`` makes of each backend and call."""

    def wrapped(backend: Backend) -> Backend:
        return replace(backend, load=lambda: partial(around, backend))

    return mock.patch.object(operation, "backends", tuple(map(wrapped, operation.backends)))


# Columns of attention, and what is kept of the others.


def random_columns() -> Control:
    """As many columns as are usually kept, static ones among them, but the others at random."""

    def select(backend: Backend, call: ColumnSelection) -> Any:
        static = 0 if call.static_columns is None else int(call.static_columns.sum(-1).max())
        drawn = max(0, call.keep_count - static) + call.random_count
        return backend.launch(replace(call, keep_count=0, random_count=drawn))

    return _run_as(column_selection, select)


def kept_columns_only() -> Control:
    """Sparse steps attend to the kept columns, and nothing is added for the others."""

    def attend(backend: Backend, call: ColumnSparseAttention) -> Any:
        return backend.launch(
            replace(call, delta_rule=None, residual=None, lse_dense=None, kept_mass=None)
        )

    return _run_as(column_sparse_attention, attend)


def cached_output_only() -> Control:
    """Sparse steps give the output of the last refresh again.

    At a refresh the kept columns weigh nothing, so that all of the output is what is cached.
    """

    def attend(_: Backend, call: ColumnSparseAttention) -> tuple[torch.Tensor, torch.Tensor]:
        nothing = call.query.new_full(call.query.shape[:3], -torch.inf, dtype=torch.float32)
        if call.delta_rule is None:
            return torch.zeros_like(call.query), nothing
        assert call.residual is not None
        return call.residual.clone(), nothing

    return _run_as(column_sparse_attention, attend)


# Neurons of MLPs.


def of_another_block(neurons: torch.Tensor, width: int) -> torch.Tensor:
    """Lists ``[B, G, K]`` passed on to a block half the sequence away."""
    del width
    return neurons.roll(neurons.shape[1] // 2, dims=1)


def in_permuted_order(neurons: torch.Tensor, width: int) -> torch.Tensor:
    """Lists ``[B, G, K]`` under one random order of all neurons: any neurons, ascending."""
    order = torch.randperm(width, generator=torch.Generator().manual_seed(0)).to(neurons)
    return order[neurons.long()].sort(-1).values


def neurons_chosen_by(control: Callable[[torch.Tensor, int], torch.Tensor]) -> Control:
    """Lets sparse MLPs recompute what the control makes of each list."""

    def select(backend: Backend, call: NeuronSelection) -> torch.Tensor:
        # The real selection would mark its own choice as recomputed.
        chosen = backend.launch(replace(call, mean_cache=call.mean_cache.clone()))
        neurons = control(chosen, call.weight.shape[0])
        now = mean_preactivations(
            call.hidden,
            call.weight,
            call.bias,
            gate_weight=call.gate_weight,
            gate_bias=call.gate_bias,
            activation=call.activation,
            block_size=call.block_size,
            backend=backend.name,
        )
        places = neurons.long()
        call.mean_cache.scatter_(-1, places, now.gather(-1, places).to(call.mean_cache.dtype))
        return neurons

    return _run_as(neuron_selection, select)

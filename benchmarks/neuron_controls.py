"""Controls of neuron selection: as many neurons as the real one chooses, but the wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch

from chipsparse.kernels.dispatch import Backend
from chipsparse.kernels.neuron_selection import (
    NeuronSelection,
    mean_preactivations,
    neuron_selection,
)

Control = Callable[[torch.Tensor, int], torch.Tensor]


def of_another_group(neurons: torch.Tensor, width: int) -> torch.Tensor:
    """Lists ``[B, G, K]`` passed on to a group half the sequence away."""
    del width
    return neurons.roll(neurons.shape[1] // 2, dims=1)


def in_permuted_order(neurons: torch.Tensor, width: int) -> torch.Tensor:
    """Lists ``[B, G, K]`` under one random order of all neurons: any neurons, ascending."""
    order = torch.randperm(width, generator=torch.Generator().manual_seed(0)).to(neurons)
    return order[neurons.long()].sort(-1).values


@contextmanager
def neurons_chosen_by(control: Control | None) -> Iterator[None]:
    """Lets sparse MLPs recompute what the control makes of each list; None changes nothing."""
    if control is None:
        yield
        return

    def controlled(backend: Backend) -> Backend:
        def select(call: NeuronSelection) -> torch.Tensor:
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
                group_rows=call.group_rows,
                backend=backend.name,
            )
            places = neurons.long()
            call.mean_cache.scatter_(-1, places, now.gather(-1, places).to(call.mean_cache.dtype))
            return neurons

        return replace(backend, load=lambda: select)

    backends = tuple(map(controlled, neuron_selection.backends))
    with mock.patch.object(neuron_selection, "backends", backends):
        yield

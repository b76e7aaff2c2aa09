"""Controls of neuron selection: as many neurons as the real one chooses, but the wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from chipsparse.kernels.dispatch import Choice
from chipsparse.kernels.neuron_selection import mean_preactivations, neuron_selection
from chipsparse.layers import mlp

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

    def choose(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        mean_cache: torch.Tensor,
        *,
        keep_count: int,
        backend: str | Choice | None = None,
        **options: Any,
    ) -> torch.Tensor:
        # The real selection would mark its own choice as recomputed.
        chosen = neuron_selection(
            hidden,
            weight,
            bias,
            mean_cache.clone(),
            keep_count=keep_count,
            backend=backend,
            **options,
        )
        neurons = control(chosen, weight.shape[0])
        name = backend.backend.name if isinstance(backend, Choice) else backend
        now = mean_preactivations(hidden, weight, bias, backend=name, **options)
        places = neurons.long()
        mean_cache.scatter_(-1, places, now.gather(-1, places).to(mean_cache.dtype))
        return neurons

    with mock.patch.object(mlp, "neuron_selection", choose):
        yield

"""The second linear layer of an MLP on the changes of the chosen neurons only."""

from __future__ import annotations

import torch

from chipsparse.kernels.checks import (
    check_dtype,
    check_floating,
    check_group_rows,
    check_shape,
    group_count,
)
from chipsparse.kernels.dispatch import Backend, Choice, choose, runs_anywhere
from chipsparse.kernels.sparse_mlp_down import reference

BACKENDS = (Backend("reference", reference.sparse_mlp_down, runs_anywhere),)


def select(delta: torch.Tensor, weight: torch.Tensor, *, force: str | None = None) -> Choice:
    """The backend that `sparse_mlp_down` would use for these tensors."""
    return choose("sparse_mlp_down", BACKENDS, delta, weight, force=force)


def sparse_mlp_down(
    delta: torch.Tensor,
    weight: torch.Tensor,
    neuron_indices: torch.Tensor,
    output_cache: torch.Tensor,
    *,
    counts: torch.Tensor | None = None,
    group_rows: int = 128,
    backend: str | None = None,
) -> torch.Tensor:
    """Adds ``delta @ weight[:, S].T`` to the cached output, where S is the group's neuron list.

    The bias of the layer is in the cached output already (Chipmunk's sparse MLP delta).
    ``output_cache`` is MUTATED. Sums are fp32 and rounded once, to the cache's dtype.

    Args:
        delta: ``[B, N, K]`` fp16, bf16, fp32 or fp64, from `sparse_mlp_up`.
        weight: ``[C, F]``, dtype of delta; read in place and never kept.
        neuron_indices: int32 ``[B, G, K]``, below F, as given to `sparse_mlp_up`.
        output_cache: ``[B, N, C]`` floating point.
        counts: int32 ``[B, G]``, how many entries of each list count; None for all. Entries of
            delta past the count are ignored.
        group_rows: token rows per group; the last of the G = ceil(N / group_rows) may be ragged.
        backend: forces one (``reference``); None takes the first that can run.

    Returns:
        ``output_cache``.

    Raises:
        ValueError: shapes or dtypes do not fit, or the forced backend cannot run.
    """
    op = "sparse_mlp_down"
    check_floating(op, delta=delta, output_cache=output_cache)
    check_group_rows(op, group_rows)
    if delta.dim() != 3:
        raise ValueError(f"{op}: delta must be [B, N, K], got {list(delta.shape)}")
    batch, rows, capacity = delta.shape
    groups = group_count(rows, group_rows)
    if weight.dim() != 2:
        raise ValueError(f"{op}: weight must be [C, F], got {list(weight.shape)}")
    check_dtype(op, "weight", weight, delta.dtype)
    check_dtype(op, "neuron_indices", neuron_indices, torch.int32)
    check_shape(op, "neuron_indices", neuron_indices, (batch, groups, capacity))
    check_shape(op, "output_cache", output_cache, (batch, rows, weight.shape[0]))
    if counts is not None:
        check_dtype(op, "counts", counts, torch.int32)
        check_shape(op, "counts", counts, (batch, groups))
    return select(delta, weight, force=backend).backend.launch(
        delta, weight, neuron_indices, output_cache, counts=counts, group_rows=group_rows
    )

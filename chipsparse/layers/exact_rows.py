"""Rows of a sequence that are computed in full at every step, before those that run sparse."""

from __future__ import annotations

import torch

from chipsparse.layout import ModelLayout


def apart(
    tensor: torch.Tensor, layout: ModelLayout, dim: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows that may run sparse and the others, as views; None where there are no others.

    Args:
        tensor: has the rows of the sequence along ``dim``; of those that never run sparse, the ones
            farthest from the others may be missing.
        layout: of the call.
        dim: not negative.
    """
    if not layout.exact_rows:
        return tensor, None
    rows = len(layout.query_rows)
    exact = tensor.shape[dim] - rows
    if exact == 0:
        return tensor, None
    return tensor.narrow(dim, exact, rows), tensor.narrow(dim, 0, exact)


def joined(sparse: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """A new tensor ``[B, N, ...]`` of both, in the order of the sequence."""
    return torch.cat([exact, sparse], dim=1)

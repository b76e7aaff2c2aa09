"""Rows of a sequence that are computed in full at every step, apart from those that run sparse."""

from __future__ import annotations

import torch

from chipsparse.layout import ModelLayout


def apart(
    tensor: torch.Tensor, layout: ModelLayout, dim: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows that may run sparse and the others, as views; None where there are no others.

    Args:
        tensor: has all rows of the sequence along ``dim``.
        layout: of the call.
        dim: not negative.
    """
    if not layout.exact_rows:
        return tensor, None
    rows = layout.query_rows
    first, last = (0, rows.start) if layout.text_first else (rows.stop, layout.tokens)
    return tensor.narrow(dim, rows.start, len(rows)), tensor.narrow(dim, first, last - first)


def joined(sparse: torch.Tensor, exact: torch.Tensor, layout: ModelLayout) -> torch.Tensor:
    """A new tensor ``[B, N, ...]`` of both, in the order of the sequence."""
    return torch.cat([exact, sparse] if layout.text_first else [sparse, exact], dim=1)

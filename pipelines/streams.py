"""Outputs of models that return several tensors, as the one that skipped calls are made from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def flattened(streams: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors ``[B, ...]`` side by side: ``[B, all numbers of a sample]``."""
    return torch.cat([stream.flatten(1) for stream in streams], dim=1)


def unflattened(output: torch.Tensor, shapes: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
    """The tensors that `flattened` put side by side.

    Args:
        output: ``[B, all numbers of a sample]``.
        shapes: of a sample in each tensor.
    """
    parts = output.split([math.prod(shape) for shape in shapes], dim=1)
    return tuple(part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True))

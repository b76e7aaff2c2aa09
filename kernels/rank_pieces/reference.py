"""Definition of the pieces that processes exchange."""

from __future__ import annotations

import math

import torch

from chipsparse.kernels.rank_pieces import PackPieces, UnpackPieces


def pack_pieces(call: PackPieces) -> torch.Tensor:
    """See `PackPieces`; the call is checked."""
    stacked = torch.stack(call.tensors)  # [K, B, N, H, D]
    return torch.cat([piece.flatten() for piece in stacked.split(list(call.counts), 1 + call.dim)])


def unpack_pieces(call: UnpackPieces) -> tuple[torch.Tensor, ...]:
    """See `UnpackPieces`; the call is checked."""
    pieces = call.buffer.split([math.prod(call.shape) * count for count in call.counts])
    shapes = (_with(call.shape, call.dim, count) for count in call.counts)
    whole = torch.cat(
        [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)], dim=1 + call.dim
    )
    return whole.unbind(0)


def _with(shape: tuple[int, ...], dim: int, count: int) -> list[int]:
    """``[K, B, N, H, D]`` with so many along a dimension of the last four."""
    return [*shape[: 1 + dim], count, *shape[1 + dim :]]

"""Definition of the pieces that processes exchange."""

from __future__ import annotations

import torch

from chipsparse.kernels.rank_pieces import PackPieces, UnpackPieces


def pack_pieces(call: PackPieces) -> torch.Tensor:
    """Run a checked `PackPieces`."""
    stacked = torch.stack(call.tensors)  # [K, B, N, H, D]
    cut = [stacked.narrow(1 + call.dim, piece.start, len(piece)) for piece in call.pieces]
    return torch.cat([tensor.flatten() for tensor in cut])


def unpack_pieces(call: UnpackPieces) -> None:
    """Run a checked `UnpackPieces`."""
    parts = call.buffer.split([size * call.unit() for size in call.capacities()])
    for piece, part in zip(call.pieces, parts, strict=True):
        places = [tensor.narrow(call.dim, piece.start, len(piece)) for tensor in call.tensors]
        sent = part[: len(piece) * call.unit()].view(len(places), *places[0].shape)
        for place, values in zip(places, sent, strict=True):
            place.copy_(values)

"""Definition of the pieces that processes exchange."""

from __future__ import annotations

import torch

from chipsparse.kernels.rank_pieces import PackPieces, UnpackPieces


def pack_pieces(call: PackPieces) -> torch.Tensor:
    """Run a checked `PackPieces`."""
    stacked = torch.stack(call.tensors)  # [K, B, N, H, D]
    cut = [stacked.narrow(1 + call.dim, piece.start, len(piece)) for piece in call.pieces]
    return torch.cat([each.flatten() for each in cut])


def unpack_pieces(call: UnpackPieces) -> None:
    """Run a checked `UnpackPieces`."""
    rooms = call.buffer.split([room * call.unit() for room in call.rooms()])
    for piece, room in zip(call.pieces, rooms, strict=True):
        places = [each.narrow(call.dim, piece.start, len(piece)) for each in call.tensors]
        sent = room[: len(piece) * call.unit()].view(len(places), *places[0].shape)
        for place, values in zip(places, sent, strict=True):
            place.copy_(values)

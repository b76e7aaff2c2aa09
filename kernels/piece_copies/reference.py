"""The definition of `copy_pieces`."""

from __future__ import annotations

from chipsparse.kernels.piece_copies import CopyPieces


def copy_pieces(call: CopyPieces) -> None:
    """Run a checked `CopyPieces`."""
    for piece, places in zip(call.pieces, call.places, strict=True):
        for tensor, place in zip(call.tensors, places, strict=False):
            place.copy_(tensor.narrow(call.dim, piece.start, len(piece)))

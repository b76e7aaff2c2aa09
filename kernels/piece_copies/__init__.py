"""Pieces of tensors, each copied to a place of its own, which may be in another GPU's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from chipsparse.kernels.checks import check_floating, check_shape
from chipsparse.kernels.dispatch import Call, Operation, triton_or_reference

NAME = "copy_pieces"
DIMS = (1, 2)  # tokens and heads of ``[B, N, H, D]``
MOST_TENSORS = 3


@dataclass(slots=True, eq=False)
class CopyPieces(Call[None]):
    """Cuts pieces out of tensors along a dimension and copies each to places of its own.

    Args:
        tensors: one to three of one shape ``[B, N, H, D]`` and dtype, of any strides.
        pieces: the beginning and end of each.
        places: by piece, a tensor ``[B, N, H, D]`` for each of the tensors, cut; of one stride.
            Changed in place. They may be peers' memory. An empty piece has none.
        dim: 1 to cut tokens, 2 to cut heads.
    """

    tensors: Sequence[torch.Tensor]
    pieces: Sequence[range]
    places: Sequence[Sequence[torch.Tensor]]
    _: KW_ONLY
    dim: int

    def check(self) -> None:
        """Raises ``ValueError`` where shapes, dtypes, pieces or places do not fit."""
        dim = self.dim
        if dim not in DIMS:
            raise ValueError(f"dim must be 1 (tokens) or 2 (heads), got {dim}")
        if not 1 <= len(self.tensors) <= MOST_TENSORS:
            raise ValueError(f"takes one to three tensors, got {len(self.tensors)}")
        first = self.tensors[0]
        check_floating(tensors=first)
        if first.dim() != 4:
            raise ValueError(f"tensors must be [B, N, H, D], got {list(first.shape)}")
        for tensor in self.tensors[1:]:
            check_shape("tensors", tensor, tuple(first.shape), first.dtype)
        for piece, places in zip(self.pieces, self.places, strict=True):
            if not 0 <= piece.start <= piece.stop <= first.shape[dim] or piece.step != 1:
                raise ValueError(f"{piece} is not within dimension {dim} of {list(first.shape)}")
            if piece and len(places) != len(self.tensors):
                raise ValueError(f"places must be {len(self.tensors)} of a piece: {len(places)}")
            shape = [*first.shape]
            shape[dim] = len(piece)
            for place in places:
                check_shape("places", place, tuple(shape), first.dtype)
                if place.stride() != places[0].stride():
                    raise ValueError("the places of a piece must have the same strides")


def _not_for_triton(*tensors: torch.Tensor) -> str | None:
    if any(tensor.dim() == 4 and tensor.stride(-1) != 1 for tensor in tensors):
        return "the head dimension is not contiguous"
    return None


copy_pieces = Operation(
    NAME,
    CopyPieces,
    lambda call: (*call.tensors, *(place for places in call.places for place in places)),
    *triton_or_reference(__name__, NAME, _not_for_triton),
)

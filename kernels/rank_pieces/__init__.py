"""Tensors as processes exchange them: cut along a dimension, a contiguous piece for each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from chipsparse.kernels.checks import check_dtype, check_floating, check_shape
from chipsparse.kernels.dispatch import Call, Operation, triton_or_reference

PACK, UNPACK = "pack_pieces", "unpack_pieces"
DIMS = (1, 2)  # tokens and heads of ``[B, N, H, D]``
MOST_TENSORS = 3


def _check_pieces(tensors: tuple[torch.Tensor, ...], pieces: Sequence[range], dim: int) -> None:
    if dim not in DIMS:
        raise ValueError(f"dim must be 1 (tokens) or 2 (heads), got {dim}")
    if not 1 <= len(tensors) <= MOST_TENSORS:
        raise ValueError(f"takes one to three tensors, got {len(tensors)}")
    first = tensors[0]
    check_floating(tensors=first)
    if first.dim() != 4:
        raise ValueError(f"tensors must be [B, N, H, D], got {list(first.shape)}")
    for tensor in tensors[1:]:
        check_shape("tensors", tensor, tuple(first.shape), first.dtype)
    for piece in pieces:
        if not 0 <= piece.start <= piece.stop <= first.shape[dim] or piece.step != 1:
            raise ValueError(f"{piece} is not within dimension {dim} of {list(first.shape)}")


@dataclass(slots=True, eq=False)
class PackPieces(Call[torch.Tensor]):
    """Cuts pieces out of tensors along a dimension and lays them one behind the other.

    Args:
        tensors: one to three of one shape ``[B, N, H, D]`` and dtype, of any strides.
        pieces: the beginning and end of each.
        dim: 1 to cut tokens, 2 to cut heads.

    Returns:
        ``[n]`` with the elements of all tensors: of each piece ``[K, B, N, H, D]`` for K tensors,
        cut, in order.
    """

    tensors: tuple[torch.Tensor, ...]
    pieces: Sequence[range]
    _: KW_ONLY
    dim: int

    def check(self) -> None:
        """Raises ``ValueError`` where shapes, dtypes or pieces do not fit."""
        _check_pieces(self.tensors, self.pieces, self.dim)


@dataclass(slots=True, eq=False)
class UnpackPieces(Call[None]):
    """Writes what `PackPieces` cut out to tensors; their other elements stay.

    Args:
        buffer: contiguous ``[n]``; a piece behind the other.
        tensors: one to three of one shape ``[B, N, H, D]`` and the buffer's dtype, of any strides.
            Changed in place.
        pieces: the place of each in the tensors.
        dim: 1 for tokens, 2 for heads.
        capacity: tokens or heads that the buffer holds for each piece; None for its own.
    """

    buffer: torch.Tensor
    tensors: tuple[torch.Tensor, ...]
    pieces: Sequence[range]
    _: KW_ONLY
    dim: int
    capacity: int | None = None

    def check(self) -> None:
        """Raises ``ValueError`` where shapes, dtypes or pieces do not fit."""
        _check_pieces(self.tensors, self.pieces, self.dim)
        check_dtype("buffer", self.buffer, self.tensors[0].dtype)
        longest = max(map(len, self.pieces), default=0)
        if self.capacity is not None and self.capacity < longest:
            raise ValueError(f"capacity must be at least {longest}, got {self.capacity}")
        wanted = sum(self.capacities()) * self.unit()
        if self.buffer.dim() != 1 or self.buffer.numel() != wanted:
            raise ValueError(
                f"buffer must have {wanted} elements for {list(self.pieces)}, got "
                f"{list(self.buffer.shape)}"
            )
        if not self.buffer.is_contiguous():
            raise ValueError("buffer must be contiguous")

    def capacities(self) -> list[int]:
        """The number of tokens or heads that the buffer holds for each piece."""
        return [len(piece) if self.capacity is None else self.capacity for piece in self.pieces]

    def unit(self) -> int:
        """Elements of all tensors that belong to one token or head."""
        first = self.tensors[0]
        sizes = [size for place, size in enumerate(first.shape) if place != self.dim]
        return len(self.tensors) * math.prod(sizes)


def _not_for_triton(*tensors: torch.Tensor) -> str | None:
    if any(tensor.dim() == 4 and tensor.stride(-1) != 1 for tensor in tensors):
        return "the head dimension is not contiguous"
    return None


pack_pieces = Operation(
    PACK,
    PackPieces,
    lambda call: call.tensors,
    *triton_or_reference(__name__, PACK, _not_for_triton),
)
unpack_pieces = Operation(
    UNPACK,
    UnpackPieces,
    lambda call: call.tensors,
    *triton_or_reference(__name__, UNPACK, _not_for_triton),
)

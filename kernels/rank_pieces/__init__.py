"""Tensors as processes exchange them: cut along a dimension, one contiguous piece for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from chipsparse.kernels.checks import check_dtype, check_floating, check_shape
from chipsparse.kernels.dispatch import Backend, Call, Operation, imported
from chipsparse.kernels.triton_support import not_auto_reason, triton_unsupported_reason

PACK, UNPACK = "pack_pieces", "unpack_pieces"
DIMS = (1, 2)  # tokens and heads of ``[B, N, H, D]``


def _check_cut(op: str, counts: Sequence[int], dim: int) -> None:
    if dim not in DIMS:
        raise ValueError(f"{op}: dim must be 1 (tokens) or 2 (heads), got {dim}")
    if not counts or min(counts) < 0:
        raise ValueError(f"{op}: counts must be one from 0 on for each rank, got {list(counts)}")


@dataclass(slots=True, eq=False)
class PackPieces(Call[torch.Tensor]):
    """Cuts tensors along a dimension and lays the pieces one behind the other.

    Args:
        tensors: one to three of one shape ``[B, N, H, D]`` and dtype, of any strides.
        counts: length of each piece; together that of the dimension.
        dim: 1 to cut tokens, 2 to cut heads.
        backend: forces one (``triton``, ``reference``); None takes the first that can run.

    Returns:
        ``[n]`` with the elements of all tensors: of each piece ``[K, B, N, H, D]`` for K tensors,
        cut, in order.

    Raises:
        ValueError: shapes, dtypes or counts do not fit, or the forced backend cannot run.
    """

    tensors: tuple[torch.Tensor, ...]
    counts: Sequence[int]
    _: KW_ONLY
    dim: int

    def facts(self) -> tuple[torch.Tensor, ...]:
        """The tensors."""
        return self.tensors

    def check(self) -> None:
        """Raises ``ValueError`` where shapes, dtypes or counts do not fit."""
        _check_cut(PACK, self.counts, self.dim)
        if not 1 <= len(self.tensors) <= 3:
            raise ValueError(f"{PACK}: takes one to three tensors, got {len(self.tensors)}")
        first = self.tensors[0]
        check_floating(PACK, tensors=first)
        if first.dim() != 4:
            raise ValueError(f"{PACK}: tensors must be [B, N, H, D], got {list(first.shape)}")
        for each in self.tensors[1:]:
            check_shape(PACK, "tensors", each, tuple(first.shape))
            check_dtype(PACK, "tensors", each, first.dtype)
        if sum(self.counts) != first.shape[self.dim]:
            raise ValueError(
                f"{PACK}: counts {list(self.counts)} do not add up to dimension {self.dim} of "
                f"{list(first.shape)}"
            )


@dataclass(slots=True, eq=False)
class UnpackPieces(Call[tuple[torch.Tensor, ...]]):
    """Joins what `PackPieces` cut.

    Args:
        buffer: contiguous ``[n]``.
        counts: length of each piece.
        dim: along which the pieces follow each other, 1 for tokens and 2 for heads.
        shape: number of tensors, and the sizes of ``[B, N, H, D]`` without that dimension.
        backend: forces one (``triton``, ``reference``); None takes the first that can run.

    Returns:
        The tensors, each contiguous ``[B, N, H, D]``.

    Raises:
        ValueError: sizes do not fit, or the forced backend cannot run.
    """

    buffer: torch.Tensor
    counts: Sequence[int]
    _: KW_ONLY
    dim: int
    shape: tuple[int, int, int, int]

    def facts(self) -> tuple[torch.Tensor]:
        """The buffer."""
        return (self.buffer,)

    def check(self) -> None:
        """Raises ``ValueError`` where sizes do not fit."""
        _check_cut(UNPACK, self.counts, self.dim)
        check_floating(UNPACK, buffer=self.buffer)
        wanted = torch.Size(self.whole_shape()).numel()
        if self.buffer.dim() != 1 or self.buffer.numel() != wanted:
            raise ValueError(
                f"{UNPACK}: buffer must have {wanted} elements for {list(self.whole_shape())}, got "
                f"{list(self.buffer.shape)}"
            )
        if not self.buffer.is_contiguous():
            raise ValueError(f"{UNPACK}: buffer must be contiguous")

    def whole_shape(self) -> tuple[int, ...]:
        """``[K, B, N, H, D]``."""
        sizes = list(self.shape)
        sizes.insert(1 + self.dim, sum(self.counts))
        return tuple(sizes)


def _triton_unsupported_reason(*tensors: torch.Tensor) -> str | None:
    if any(each.dim() == 4 and each.stride(-1) != 1 for each in tensors):
        return "the head dimension is not contiguous"
    return triton_unsupported_reason(tensors[0])


pack_pieces = Operation(
    PACK,
    PackPieces,
    Backend(
        "triton",
        imported(f"{__name__}.triton_kernel", PACK),
        _triton_unsupported_reason,
        not_auto_reason,
    ),
    Backend("reference", imported(f"{__name__}.reference", PACK)),
)

unpack_pieces = Operation(
    UNPACK,
    UnpackPieces,
    Backend(
        "triton",
        imported(f"{__name__}.triton_kernel", UNPACK),
        _triton_unsupported_reason,
        not_auto_reason,
    ),
    Backend("reference", imported(f"{__name__}.reference", UNPACK)),
)

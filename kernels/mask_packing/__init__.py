"""Column masks as bits, eight columns a byte, and as ascending index lists."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from chipsparse.kernels.checks import check_dtype
from chipsparse.kernels.dispatch import Call, Operation, triton_or_reference


@dataclass(slots=True, eq=False)
class PackMask(Call[torch.Tensor]):
    """Packs bools into bits: bit j of byte i is column 8 i + j, and padding bits are zero.

    That is the bit order of ``bitarray(endian="little")``.

    Args:
        mask: bool ``[..., M]``.

    Returns:
        uint8 ``[..., ceil(M / 8)]``.
    """

    mask: torch.Tensor

    def check(self) -> None:
        """Raises ``ValueError`` where the mask is not bool or has no dimension."""
        check_dtype("mask", self.mask, torch.bool)
        _check_dimensions("mask", self.mask)


@dataclass(slots=True, eq=False)
class UnpackMask(Call[torch.Tensor]):
    """The inverse of `pack_mask`.

    Args:
        packed: uint8 ``[..., ceil(columns / 8)]``.
        columns: M; bits past it are ignored.

    Returns:
        bool ``[..., columns]``.
    """

    packed: torch.Tensor
    columns: int

    def check(self) -> None:
        """Raises ``ValueError`` where the tensor is not packed bits of that many columns."""
        _check_packed(self.packed, self.columns)


@dataclass(slots=True, eq=False)
class PackedToIndices(Call[tuple[torch.Tensor, torch.Tensor]]):
    """Lists the set columns of each row in ascending order.

    The result is the same on every run. Without a capacity the largest count is read back, so the
    host waits for the device; with one, a GPU is never waited for.

    Args:
        packed: uint8 ``[..., ceil(columns / 8)]``.
        columns: M; bits past it are ignored.
        capacity: K, length of the lists; None for the largest count. Where a row keeps more, the
            reference on a CPU raises ``ValueError``; on a GPU further columns are cut off, and the
            counts with them.

    Returns:
        indices, int32 ``[..., K]``, and counts, int32 ``[...]``. Entries past a row's count are 0,
        a valid address.
    """

    packed: torch.Tensor
    columns: int
    _: KW_ONLY
    capacity: int | None = None

    def check(self) -> None:
        """Raises ``ValueError`` where the bits are of other columns or the capacity is negative."""
        _check_packed(self.packed, self.columns)
        if self.capacity is not None and self.capacity < 0:
            raise ValueError(f"capacity must not be negative, got {self.capacity}")


pack_mask = Operation(
    "pack_mask",
    PackMask,
    lambda call: (call.mask,),
    *triton_or_reference(__name__, "pack_mask"),
)
unpack_mask = Operation(
    "unpack_mask",
    UnpackMask,
    lambda call: (call.packed,),
    *triton_or_reference(__name__, "unpack_mask"),
)
packed_to_indices = Operation(
    "packed_to_indices",
    PackedToIndices,
    lambda call: (call.packed,),
    *triton_or_reference(__name__, "packed_to_indices"),
)


def _check_packed(packed: torch.Tensor, columns: int) -> None:
    check_dtype("packed", packed, torch.uint8)
    _check_dimensions("packed", packed)
    if columns < 0 or packed.shape[-1] != -(-columns // 8):
        raise ValueError(
            f"{columns} columns take {-(-columns // 8)} bytes a row, "
            f"packed is {list(packed.shape)}",
        )


def _check_dimensions(name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() == 0:
        raise ValueError(f"{name} must have at least one dimension")

"""Column masks as bits, eight columns a byte, and as ascending index lists."""

from __future__ import annotations

import torch

from chipsparse.kernels import ops
from chipsparse.kernels.checks import check_dtype
from chipsparse.kernels.dispatch import Backend, Choice, choose, imported, runs_anywhere
from chipsparse.kernels.mask_packing import reference
from chipsparse.kernels.triton_support import why_not_triton, why_not_unasked


def _triton(function: str) -> Backend:
    launch = imported("chipsparse.kernels.mask_packing.triton_kernel", function)
    return Backend("triton", launch, why_not_triton, why_not_unasked)


PACK_BACKENDS = (
    _triton("pack_mask"),
    Backend("reference", reference.pack_mask, runs_anywhere),
)
UNPACK_BACKENDS = (
    _triton("unpack_mask"),
    Backend("reference", reference.unpack_mask, runs_anywhere),
)
INDEX_BACKENDS = (
    _triton("packed_to_indices"),
    Backend("reference", reference.packed_to_indices, runs_anywhere),
)


def select(packed: torch.Tensor, *, force: str | None = None) -> Choice:
    """The backend that `packed_to_indices` would use for this tensor."""
    return choose("packed_to_indices", INDEX_BACKENDS, packed, force=force)


def pack_mask(mask: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """Packs bools into bits: bit j of byte i is column 8 i + j, and padding bits are zero.

    That is the bit order of ``bitarray(endian="little")``.

    Args:
        mask: bool ``[..., M]``.
        backend: forces one (``triton``, ``reference``); None takes the first that can run.

    Returns:
        uint8 ``[..., ceil(M / 8)]``.

    Raises:
        ValueError: the mask is not bool or has no dimension, or the forced backend cannot run.
    """
    if torch.compiler.is_dynamo_compiling():
        return ops.pack_mask(mask, backend)
    check_dtype("pack_mask", "mask", mask, torch.bool)
    _check_dimensions("pack_mask", "mask", mask)
    return choose("pack_mask", PACK_BACKENDS, mask, force=backend).backend.launch(mask)


def unpack_mask(packed: torch.Tensor, columns: int, *, backend: str | None = None) -> torch.Tensor:
    """The inverse of `pack_mask`.

    Args:
        packed: uint8 ``[..., ceil(columns / 8)]``.
        columns: M; bits past it are ignored.
        backend: forces one (``triton``, ``reference``); None takes the first that can run.

    Returns:
        bool ``[..., columns]``.

    Raises:
        ValueError: the tensor is not packed bits of that many columns, or the forced backend
            cannot run.
    """
    if torch.compiler.is_dynamo_compiling():
        return ops.unpack_mask(packed, columns, backend)
    _check_packed("unpack_mask", packed, columns)
    choice = choose("unpack_mask", UNPACK_BACKENDS, packed, force=backend)
    return choice.backend.launch(packed, columns)


def packed_to_indices(
    packed: torch.Tensor,
    columns: int,
    *,
    capacity: int | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists the set columns of each row in ascending order.

    The result is the same on every run. Without a capacity the largest count is read back, so the
    host waits for the device; with one, a GPU is never waited for.

    Args:
        packed: uint8 ``[..., ceil(columns / 8)]``.
        columns: M; bits past it are ignored.
        capacity: K, length of the lists; None for the largest count, but not in compiled code. On
            a GPU the caller guarantees that no row keeps more: further columns are cut off, and the
            counts with them.
        backend: forces one (``triton``, ``reference``); None takes the first that can run.

    Returns:
        indices, int32 ``[..., K]``, and counts, int32 ``[...]``. Entries past a row's count are 0,
        a valid address.

    Raises:
        ValueError: the tensor is not packed bits of that many columns, the capacity is negative
            (or None in compiled code), the reference on a CPU finds more columns than ``capacity``,
            or the forced backend cannot run.
    """
    if torch.compiler.is_dynamo_compiling():
        if capacity is None:
            raise ValueError("packed_to_indices: compiled code must give a capacity, got None")
        return ops.packed_to_indices(packed, columns, capacity, backend)
    _check_packed("packed_to_indices", packed, columns)
    if capacity is not None and capacity < 0:
        raise ValueError(f"packed_to_indices: capacity must not be negative, got {capacity}")
    choice = select(packed, force=backend)
    return choice.backend.launch(packed, columns, capacity=capacity)


def _check_packed(op: str, packed: torch.Tensor, columns: int) -> None:
    check_dtype(op, "packed", packed, torch.uint8)
    _check_dimensions(op, "packed", packed)
    if columns < 0 or packed.shape[-1] != -(-columns // 8):
        raise ValueError(
            f"{op}: {columns} columns take {-(-columns // 8)} bytes a row, "
            f"packed is {list(packed.shape)}"
        )


def _check_dimensions(op: str, name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() == 0:
        raise ValueError(f"{op}: {name} must have at least one dimension")

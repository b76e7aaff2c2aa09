"""Definition of bit packing and of the compaction from bits to index lists."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from chipsparse.kernels.checks import TRANSIENT_BYTES, ranges
from chipsparse.kernels.mask_packing import PackedToIndices, PackMask, UnpackMask

# What the compaction holds per column of a row: the bit and its inverse, places and entries.
TRANSIENT_BYTES_PER_COLUMN = 2 + 16 + 4


def pack_mask(call: PackMask) -> torch.Tensor:
    """Run a checked `PackMask`."""
    return packed_bits(call.mask)


def packed_bits(mask: torch.Tensor) -> torch.Tensor:
    """Bools ``[..., M]`` as uint8 ``[..., ceil(M / 8)]``."""
    bits = F.pad(mask.to(torch.uint8), (0, -mask.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (bits * _bit_values(mask.device)).sum(-1, dtype=torch.uint8)


def unpack_mask(call: UnpackMask) -> torch.Tensor:
    """Run a checked `UnpackMask`."""
    return unpacked_bits(call.packed, call.columns)


def unpacked_bits(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """The inverse of `packed_bits`."""
    bits = packed.unsqueeze(-1).bitwise_and(_bit_values(packed.device)).ne(0)
    return bits.flatten(-2)[..., :columns]


def packed_to_indices(call: PackedToIndices) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a checked `PackedToIndices`."""
    packed = call.packed
    columns = call.columns
    capacity = call.capacity
    shape = packed.shape[:-1]
    device = packed.device
    packed = packed.reshape(shape.numel(), packed.shape[-1])
    rows = packed.shape[0]
    chunks = list(ranges(rows, columns * TRANSIENT_BYTES_PER_COLUMN, TRANSIENT_BYTES))
    counts = torch.zeros(rows, dtype=torch.int32, device=device)
    for first, last in chunks:
        counts[first:last] = unpacked_bits(packed[first:last], columns).sum(-1)
    if capacity is None or device.type == "cpu":
        largest = int(counts.max()) if rows else 0
        if capacity is None:
            capacity = largest
        elif largest > capacity:
            raise ValueError(
                f"packed_to_indices: a row keeps {largest} columns, the capacity is {capacity}",
            )
    indices = torch.zeros(rows, capacity, dtype=torch.int32, device=device)
    for first, last in chunks:
        mask = unpacked_bits(packed[first:last], columns)
        if device.type == "cpu":
            # A prefix sum over the bits of a row gives every kept column its place in the list.
            places = mask.cumsum(-1, dtype=torch.int32)
            row, column = mask.nonzero(as_tuple=True)
            indices[first:last][row, places[row, column] - 1] = column.int()
        else:
            indices[first:last] = _lists_without_waiting(mask, capacity)
    return indices.view(*shape, capacity), counts.clamp_(max=capacity).view(shape)


def _lists_without_waiting(mask: torch.Tensor, capacity: int) -> torch.Tensor:
    """int32 ``[rows, capacity]``, cut off there; ``nonzero`` would wait for the device."""
    rows, columns = mask.shape
    # What has no place in the list goes to one place more, which is dropped.
    places = (mask.cumsum(-1) - 1).masked_fill_(~mask, capacity).clamp_(max=capacity)
    column = torch.arange(columns, dtype=torch.int32, device=mask.device)
    lists = torch.zeros(rows, capacity + 1, dtype=torch.int32, device=mask.device)
    return lists.scatter_(-1, places, column.expand_as(mask))[:, :capacity]


def _bit_values(device: torch.device) -> torch.Tensor:
    """uint8 ``[8]``: 1, 2, 4, ... 128."""
    return 2 ** torch.arange(8, dtype=torch.uint8, device=device)

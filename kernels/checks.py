"""Checks and small facts about shapes and dtypes that several operations share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Tiles within the last-level cache make the references fastest on a CPU; on a GPU larger tiles keep
# the number of launches down.
CPU_TILE_BYTES = 8 << 20
TRANSIENT_BYTES = 256 << 20


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype a reference computes in: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def block_count(rows: int, block_size: int) -> int:
    """Number of blocks of ``block_size`` consecutive rows, the last of which may be ragged."""
    return -(-rows // block_size)


def tile_bytes(device: torch.device) -> int:
    """Bytes that one tile of a reference may take on this device."""
    return CPU_TILE_BYTES if device.type == "cpu" else TRANSIENT_BYTES


def ranges(count: int, bytes_each: int, limit_bytes: int) -> Iterator[tuple[int, int]]:
    """Cuts ``range(count)`` into about equal ``(first, last)``, within the limit if possible."""
    fitting = max(1, limit_bytes // max(1, bytes_each))
    chunks = -(-count // fitting)
    for chunk in range(chunks):
        yield count * chunk // chunks, count * (chunk + 1) // chunks


@dataclass(frozen=True)
class BlockChunk:
    """Consecutive blocks of equally many rows."""

    blocks: slice  # the numbers of the blocks
    rows: slice
    shape: tuple[int, int]  # number of blocks, and rows of each: to unflatten a row dimension


def block_chunks(
    rows: int,
    block_size: int,
    bytes_per_block: int,
    limit_bytes: int,
) -> Iterator[BlockChunk]:
    """Cuts rows into chunks of whole blocks within the limit; a ragged last block stands alone."""
    full = rows // block_size
    for first, last in ranges(full, bytes_per_block, limit_bytes):
        chunk_rows = slice(first * block_size, last * block_size)
        yield BlockChunk(slice(first, last), chunk_rows, (last - first, block_size))
    if rows % block_size:
        ragged = slice(full * block_size, rows)
        yield BlockChunk(slice(full, full + 1), ragged, (1, rows % block_size))


def check_block_size(**sizes: int) -> None:
    """Raises ``ValueError`` where a block has no row."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def check_floating(**tensors: torch.Tensor) -> None:
    """Raises ``ValueError`` where a tensor is not fp16, bf16, fp32 or fp64."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATING:
            raise ValueError(f"{name} must be a floating point tensor, got {tensor.dtype}")


def check_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises ``ValueError`` where a tensor is not of this dtype."""
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")


def check_shape(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
) -> None:
    """Raises ``ValueError`` where a tensor is not of this shape, and of this dtype if given."""
    if dtype is not None:
        check_dtype(name, tensor, dtype)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")

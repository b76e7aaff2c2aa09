"""Thread blocks and work items, shared by the Gluon kernels of the sparse MLP."""

# Gluon reads the annotations of a kernel in its own way.
# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Half of a Hopper GPU's second-level cache: what the running lists read again and again.
SHARED_BYTES = 30 << 20
MOST_LISTS = 32


@dataclass(frozen=True)
class Config:
    """The build of a thread block. The layouts are written for tiles of 256.

    Attributes:
        tile: neurons (up) or output channels (down) per work item.
        depth: channels (up) or neurons (down) per stage.
        stages: in flight, each of 128 tokens and a tile of weight rows.
        producer_warps: warps that gather; with more than 4, m64n256 products do not compile.
        consumer_registers: per thread.
        producer_registers: per thread.
    """

    tile: int = 256
    depth: int = 64
    stages: int = 4
    producer_warps: int = 4
    consumer_registers: int = 216
    producer_registers: int = 80


CONFIG = Config()


def lists_at_once(list_bytes: int) -> int:
    """Return the number of lists that run all their tiles before the next lists do.

    Args:
        list_bytes: what one list's tokens or changes take; every tile reads them.
    """
    lists = MOST_LISTS
    while lists > 1 and lists * list_bytes > SHARED_BYTES:
        lists //= 2
    return lists


@gluon.jit
def locate(item, tiles, sizes, counts_ptr, HAS_COUNTS: gl.constexpr):
    """Batch, block and tile of a work item, and the length of its list."""
    list_count, at_once, blocks, capacity = sizes
    # All tiles of a few lists before the next lists. Of those, one tile over all lists before the
    # next tile: neighbouring blocks list much the same neurons, and share their weight rows.
    chunk = item // (at_once * tiles)
    in_chunk = gl.minimum(list_count - chunk * at_once, at_once)
    item -= chunk * at_once * tiles
    number = chunk * at_once + item % in_chunk
    count = capacity
    if HAS_COUNTS:
        count = gl.load(counts_ptr + number)
    return number // blocks, number % blocks, item // in_chunk, count


@gluon.jit
def halves(x):
    """The left and the right half of the columns."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    return x.reshape([rows, 2, columns // 2]).permute([0, 2, 1]).split()

"""Thread blocks, work items and stages, shared by the Gluon kernels of the sparse MLP."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from chipsparse.kernels.gluon_compat import partition_barrier

# Half of a Hopper GPU's second-level cache: what the running lists read again and again.
SHARED_BYTES = 30 << 20
MOST_LISTS = 32


# Neurons (up) or output channels (down) of a work item. The layouts are written for tiles of 256.
TILE = 256
# Channels (up) or neurons (down) of a stage, which also holds 128 tokens and a tile of weight rows.
DEPTH = 64
# The constants of both kernels: with more than 4 producer warps, which gather, m64n256 products do
# not compile; registers are those of a thread.
CONSTANTS = {
    "TILE": TILE,
    "DEPTH": DEPTH,
    "STAGES": 4,
    "PRODUCER_WARPS": 4,
    "CONSUMER_REGISTERS": 216,
    "PRODUCER_REGISTERS": 80,
    "num_warps": 4,
}


def lists_at_once(list_bytes: int) -> int:
    """Return the number of lists that run all their tiles before the next lists do.

    Every tile reads the tokens or changes of its list, which take so many bytes.
    """
    lists = MOST_LISTS
    while lists > 1 and lists * list_bytes > SHARED_BYTES:
        lists //= 2
    return lists


@gluon.jit
def locate(item, tiles, sizes):
    """Batch, block and tile of a work item."""
    list_count, at_once, blocks, _ = sizes
    # All tiles of a few lists before the next lists. Of those, one tile over all lists before the
    # next tile: neighbouring blocks list much the same neurons, and share their weight rows.
    chunk = item // (at_once * tiles)
    in_chunk = gl.minimum(list_count - chunk * at_once, at_once)
    item -= chunk * at_once * tiles
    number = chunk * at_once + item % in_chunk
    return number // blocks, number % blocks, item // in_chunk


@gluon.jit
def stages(
    rows_desc, ROWS: gl.constexpr, W_SHAPE: gl.constexpr, DTYPE: gl.constexpr, STAGES: gl.constexpr,
    SWIZZLE: gl.constexpr, PRODUCER_WARPS: gl.constexpr,
):  # fmt: skip
    """Shared memory of the stages: tokens or changes, weight rows, and barriers full and empty."""
    w_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=SWIZZLE,
        element_bitwidth=16,
        rank=2,
    )
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    rows_smem = gl.allocate_shared_memory(DTYPE, ROWS, rows_desc.layout)
    w_smem = gl.allocate_shared_memory(DTYPE, W_SHAPE, w_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    for i in gl.static_range(STAGES):
        # The copies of all producer threads, and the one that asks for the tokens or changes.
        mbarrier.init(full.index(i), count=32 * PRODUCER_WARPS + 1)
        mbarrier.init(empty.index(i), count=2)
    partition_barrier()
    return rows_smem, w_smem, full, empty


@gluon.jit
def row_offsets(neurons, stride8, WIDE_ROWS: gl.constexpr):
    """Offsets of weight rows ``[n, 1]``, whose distance is a multiple of 8."""
    if WIDE_ROWS:
        neurons = neurons.to(gl.int64)
    return (neurons * (stride8 * 8))[:, None]


@gluon.jit
def halves(x):
    """The left and the right half of the columns."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    return x.reshape([rows, 2, columns // 2]).permute([0, 2, 1]).split()

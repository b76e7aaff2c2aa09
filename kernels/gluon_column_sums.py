"""Work items and column sums, shared by the Gluon kernels of dense attention.

A weight for the sums is p · exp2(m - lse_previous), with the p that is there for the output and the
row maximum m that it was taken under: one packed multiply per pair of scores, no second
exponential. Within a warp the rows are summed by turning lanes into registers once (four wide
stores and loads that need no barrier), across the eight warps by the warp that writes the result.
Every sum has a fixed order, so results repeat bit for bit.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from chipsparse.kernels.dense_attention_column_sums.reference import LARGEST_EXPONENT

LOG2_E = gl.constexpr(1.4426950408889634)
LARGEST_EXPONENT_LOG2 = gl.constexpr(LARGEST_EXPONENT * LOG2_E.value)


@gluon.jit
def locate_rows(item, row_tiles, H):
    """Batch, head and row tile of a work item."""
    bh = item // row_tiles
    return bh // H, bh % H, item % row_tiles


@gluon.jit
def first_column(t, tiles, TILE: gl.constexpr):
    """First key of the t-th tile that is computed: the last tile, then the others in order."""
    return gl.where(t == 0, tiles - 1, t - 1) * TILE


@gluon.jit
def sum_factor(m, previous):
    """Return the factor from weights under the running maximum to weights under the previous LSE.

    The limit keeps the sums finite; NaN stays NaN.
    """
    shift = m - previous
    return gl.exp2(gl.where(shift > LARGEST_EXPONENT_LOG2, LARGEST_EXPONENT_LOG2, shift))


@gluon.jit
def sum_rows(p, factor, sums_smem, TILE: gl.constexpr, WG: gl.constexpr):
    """Sums the weighted rows of each warp and leaves one row of sums per warp in shared memory."""
    # Row 16 w + 8 r + l of a warpgroup lies in warp w, register r and lane group l.
    weights = (p.to(gl.bfloat16) * factor.to(gl.bfloat16)[:, None]).reshape([4, 2, 8, TILE])
    weights = gl.sum(weights, 1)
    turned: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 0, 64]],
        lane_bases=[[0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 0, 32]],
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, 8, TILE],
    )
    sums = gl.sum(gl.convert_layout(weights, turned).to(gl.float32), 1)
    sums_smem.slice(WG * 4, 4, dim=0).store(sums)


@gluon.jit
def write_sums(sums_ptr, smem, sizes, parts, stride_g, TILE: gl.constexpr, PART_ROWS: gl.constexpr):
    """Adds the sums of the warps of a part and writes one row per part and tile."""
    sums_smem, full_s, empty_s = smem
    items, row_tiles, H, _, M = sizes
    layout: gl.constexpr = gl.BlockedLayout([8, TILE // 32], [1, 32], [1, 1], [1, 0])
    in_tile = gl.arange(0, TILE, gl.SliceLayout(0, layout))
    tiles = (M + TILE - 1) // TILE
    taken = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, h, row_tile = locate_rows(item, row_tiles, H)
        first_part = row_tile * (128 // PART_ROWS)
        head = sums_ptr + (b * H + h).to(gl.int64) * parts * stride_g
        for t in range(tiles):
            mbarrier.wait(full_s.index(taken % 2), (taken // 2) & 1)
            sums = sums_smem.index(taken % 2).load(layout)
            mbarrier.arrive(empty_s.index(taken % 2), count=1)
            taken += 1
            column = first_column(t, tiles, TILE) + in_tile
            if PART_ROWS == 64:
                halves = sums.reshape([2, 4, TILE])
                halves = gl.sum(halves, 1)
                part = first_part + gl.arange(0, 2, gl.SliceLayout(1, halves.type.layout))
                column = first_column(t, tiles, TILE) + gl.arange(
                    0,
                    TILE,
                    gl.SliceLayout(0, halves.type.layout),
                )
                rows = part.to(gl.int64) * stride_g
                mask = (part < parts)[:, None] & (column < M)[None, :]
                gl.store(head + rows[:, None] + column[None, :], halves.to(gl.bfloat16), mask=mask)
            else:
                total = gl.sum(sums, 0)
                row = first_part.to(gl.int64) * stride_g
                gl.store(head + row + column, total.to(gl.bfloat16), mask=column < M)

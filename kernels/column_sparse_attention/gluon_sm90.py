"""`column_sparse_attention` for Hopper: gathered tiles, warp-specialized, persistent.

One thread block per multiprocessor walks over work items: 64, 128 or 192 query rows of a block. A
producer warpgroup gathers the kept key and value rows with 16-byte `cp.async` into swizzled tiles
in shared memory and runs ahead into the next item; each consumer warpgroup owns 64 query rows and
computes the softmax of one tile under the value product of the tile before. That split, explicit
stages and the overlap between items are what it adds to `triton_kernel.py`; the same tests hold
both to the reference.

The entries of an item are the means, if any, and behind them the kept columns. The tile that their
number leaves partly filled comes first: it is the only one that needs a mask. Tiles that hold means
have a loop of their own, before that of all others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from chipsparse.kernels import triton_support
from chipsparse.kernels.column_sparse_attention import ColumnSparseAttention
from chipsparse.kernels.gluon_compat import async_load, mbarrier_arrive_on_copies, partition_barrier
from chipsparse.kernels.gluon_rows import from_rows, row_places, to_rows
from chipsparse.kernels.launch import Launch

LOG2_E = gl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Config:
    """The build of a thread block; registers are those of a thread."""

    consumers: int  # warpgroups of 64 query rows
    tile: int  # kept columns per tile
    stages: int  # tiles of keys, and of values, in flight
    consumer_registers: int
    producer_registers: int
    producer_warps: int  # warps that gather
    blocks_per_sm: int  # resident thread blocks that shared memory and registers allow


# By head size and query rows per item; benchmarks/notes/column_sparse_attention.md has the log.
CONFIGS = {
    (128, 64): Config(1, 64, 2, 168, 80, 4, 2),
    (128, 128): Config(2, 128, 2, 208, 88, 4, 1),
    (128, 192): Config(3, 64, 3, 152, 56, 4, 1),
    (64, 64): Config(1, 128, 3, 168, 80, 4, 2),
    (64, 128): Config(2, 128, 4, 208, 88, 4, 1),
    (64, 192): Config(3, 64, 8, 152, 56, 4, 1),
}


@gluon.jit
def _locate(
    item,
    row_tiles,
    H,
    TILES_PER_BLOCK: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_SIZE_Q: gl.constexpr,
):
    """Batch, head and first query row of a work item."""
    bh = item // row_tiles
    row_tile = item % row_tiles
    block = row_tile // TILES_PER_BLOCK
    row0 = block * BLOCK_SIZE_Q + (row_tile % TILES_PER_BLOCK) * ROWS
    return bh // H, bh % H, row0


@gluon.jit
def _offset(b, h, stride_b, stride_h):
    """Return the first element of a head, which may pass 32 bits."""
    return b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h


@gluon.jit
def _list(item, items, row_tiles, counts_ptr, means, TILES_PER_BLOCK: gl.constexpr):
    """Number of an item's list, asked for before it is needed, and of its entries.

    These are the means and the columns of the list. Past the last item there are none.
    """
    block = (item % row_tiles) // TILES_PER_BLOCK
    number = (item // row_tiles) * (row_tiles // TILES_PER_BLOCK) + block
    return number, gl.load(counts_ptr + number, mask=item < items, other=-means) + means


@gluon.jit
def _tiles(entries, TILE: gl.constexpr):
    """Number of tiles, at least one, and how many entries the first of them holds."""
    tiles = gl.maximum((entries + TILE - 1) // TILE, 1)
    return tiles, entries - (tiles - 1) * TILE


@gluon.jit
def _tiles_with_means(tiles, first, means, TILE: gl.constexpr):
    """Number of tiles that hold means."""
    return gl.minimum((gl.maximum(means - first, 0) + TILE - 1) // TILE + 1, tiles)


@gluon.jit
def _columns(list_ptr, rows, means, wanted, MEANS: gl.constexpr):
    """The columns of a tile that begins with so many means and whose first rows are ``wanted``.

    Means are -1. So are the other rows, which repeat a mean; without means they repeat the first
    column. So no row is ever read that the list does not name; for an empty list row 0, unused.
    """
    if MEANS:
        return gl.load(list_ptr + rows, mask=(rows >= means) & (rows < wanted), other=-1)
    return gl.load(
        list_ptr + gl.where(rows < wanted, rows, 0),
        mask=(rows >= 0) & (wanted > 0),
        other=0,
    )


@gluon.jit
def _rows(head, stride, mean_head, mixed):
    """Addresses of the rows of a tile that holds means: those where the column is -1."""
    columns, mean_rows, channels = mixed
    D: gl.constexpr = channels.shape[0]
    of_columns = head + ((columns * stride)[:, None] + channels[None, :])
    of_means = mean_head + ((mean_rows * D)[:, None] + channels[None, :])
    return gl.where((columns < 0)[:, None], of_means, of_columns)


@gluon.jit
def _produce(
    pointers, smem, strides, sizes, capacity, means,
    CONSUMERS: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
    TILES_PER_BLOCK: gl.constexpr, BLOCK_SIZE_Q: gl.constexpr, MEANS: gl.constexpr,
    WIDE_ROWS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Gathers the query rows, then the key and value tiles of every item."""
    q_ptr, k_ptr, v_ptr, indices_ptr, counts_ptr, mean_k_ptr, mean_v_ptr = pointers
    q_smem, k_smem, v_smem, full_q, empty_q, full_k, empty_k, full_v, empty_v = smem
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn = strides[:6]
    stride_vb, stride_vh, stride_vn = strides[6:]
    items, row_tiles, H, N = sizes
    # A row is read by D / 8 neighbouring threads, 16 bytes each.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    rows = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    q_rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    channels = gl.arange(0, D, gl.SliceLayout(0, layout))
    if not MEANS:
        means = 0
    filled = 0
    turn = 0
    pid = gl.program_id(0)
    step = gl.num_programs(0)
    number, entries = _list(pid, items, row_tiles, counts_ptr, means, TILES_PER_BLOCK)
    next_number, next_entries = _list(
        pid + step,
        items,
        row_tiles,
        counts_ptr,
        means,
        TILES_PER_BLOCK,
    )
    _, first = _tiles(entries, TILE)
    # Where in all lists the first entry would be: so many places before the first column.
    start = number.to(gl.int64) * capacity - means
    columns = _columns(indices_ptr + start, rows, means, first, MEANS)
    # One item past the last, without entries: what the consumers multiply ahead of need.
    for item in range(pid, items + step, step):
        b, h, row0 = _locate(
            gl.minimum(item, items - 1),
            row_tiles,
            H,
            TILES_PER_BLOCK,
            64 * CONSUMERS,
            BLOCK_SIZE_Q,
        )
        tiles, first = _tiles(entries, TILE)
        _, next_first = _tiles(next_entries, TILE)
        after_number, after_entries = _list(
            item + 2 * step,
            items,
            row_tiles,
            counts_ptr,
            means,
            TILES_PER_BLOCK,
        )

        mbarrier.wait(empty_q.index(turn & 1), ((turn >> 1) & 1) ^ 1)
        q_head = q_ptr + _offset(b, h, stride_qb, stride_qh)
        for w in gl.static_range(CONSUMERS):
            # Rows past the end read the last row; their results are not stored.
            row = gl.minimum(row0 + w * 64 + q_rows, N - 1).to(gl.int64)
            async_load(
                q_smem.index((turn & 1) * CONSUMERS + w),
                q_head + (row * stride_qn)[:, None] + channels[None, :],
            )
        mbarrier_arrive_on_copies(full_q.index(turn & 1), increment_count=False)
        turn += 1

        k_head = k_ptr + _offset(b, h, stride_kb, stride_kh)
        v_head = v_ptr + _offset(b, h, stride_vb, stride_vh)
        mean_head = (b * H + h).to(gl.int64) * means * D
        mean_k_head = mean_k_ptr + mean_head
        mean_v_head = mean_v_ptr + mean_head
        next_start = next_number.to(gl.int64) * capacity - means
        position = number.to(gl.int64) * capacity - means + first
        # First the tiles that hold means, then the others.
        begin = 0
        end = 0
        if MEANS:
            end = _tiles_with_means(tiles, first, means, TILE)
        for plain in gl.static_range(2):
            for t in range(begin, end):
                stage = filled % STAGES
                free = ((filled // STAGES) & 1) ^ 1
                here = columns.to(gl.int64) if WIDE_ROWS else columns
                if plain:
                    k_offsets = (here * stride_kn)[:, None] + channels[None, :]
                    v_offsets = (here * stride_vn)[:, None] + channels[None, :]
                    means_ahead = 0
                else:  # addresses take many registers, so these are made late
                    entry = gl.where(t == 0, 0, first - TILE + t * TILE) + rows
                    mixed = here, gl.minimum(entry, means - 1), channels
                    means_ahead = means - first - t * TILE
                # The next tile's columns, or the next item's, arrive while this one waits for room.
                last = t == tiles - 1
                columns = _columns(
                    indices_ptr + gl.where(last, next_start, position),
                    rows,
                    gl.where(last, means, means_ahead),
                    gl.where(last, next_first, TILE),
                    MEANS,
                )
                position += TILE
                mbarrier.wait(empty_k.index(stage), free)
                k_rows = (
                    k_head + k_offsets if plain else _rows(k_head, stride_kn, mean_k_head, mixed)
                )
                async_load(k_smem.index(stage), k_rows)
                mbarrier_arrive_on_copies(full_k.index(stage), increment_count=False)
                mbarrier.wait(empty_v.index(stage), free)
                v_rows = (
                    v_head + v_offsets if plain else _rows(v_head, stride_vn, mean_v_head, mixed)
                )
                async_load(v_smem.index(stage), v_rows)
                mbarrier_arrive_on_copies(full_v.index(stage), increment_count=False)
                filled += 1
            begin = end
            end = tiles
        number = next_number
        entries = next_entries
        next_number = after_number
        next_entries = after_entries


@gluon.jit
def _consume_tile(
    q, s, p_half, o, m, total, used, smem, scale_log2, means, mean_bias, in_tile,
    STAGES: gl.constexpr, MEANS: gl.constexpr,
):  # fmt: skip
    """The value product of a tile, and meanwhile scores and weights of the next one.

    That one begins with so many means.
    """
    _, k_smem, v_smem, _, _, full_k, empty_k, full_v, empty_v = smem
    stage = used % STAGES
    phase = (used // STAGES) & 1
    used += 1
    next_stage = used % STAGES
    mbarrier.wait(full_k.index(next_stage), (used // STAGES) & 1)
    k_tile = k_smem.index(next_stage).permute((1, 0))
    s_token = warpgroup_mma(q, k_tile, s, use_acc=False, is_async=True)
    mbarrier.wait(full_v.index(stage), phase)
    o_token = warpgroup_mma(p_half, v_smem.index(stage), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s_token])
    mbarrier.arrive(empty_k.index(next_stage), count=1)
    if MEANS:
        s = gl.where((in_tile < means)[None, :], s + mean_bias, s)
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    p = gl.exp2(s * scale_log2 - m_new[:, None])
    shrink = gl.exp2(m - m_new)
    total = total * shrink + gl.sum(p, 1)
    o = warpgroup_mma_wait(0, deps=[o_token])
    mbarrier.arrive(empty_v.index(stage), count=1)
    p_half = gl.convert_layout(p.to(q.dtype), p_half.type.layout)
    o = o * gl.convert_layout(shrink, gl.SliceLayout(1, o.type.layout))[:, None]
    return s, p_half, o, m_new, total, used


@gluon.jit
def _consume(
    pointers, smem, strides, sizes, scale_log2, means, mean_bias,
    CONSUMERS: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
    TILES_PER_BLOCK: gl.constexpr, BLOCK_SIZE_Q: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    IN_FP8: gl.constexpr, MEANS: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    """Attention of 64 query rows over the tiles, and their residual added."""
    o_ptr, residual_ptr, scale_ptr, counts_ptr = pointers
    q_smem, k_smem, v_smem, full_q, empty_q, full_k, empty_k, full_v, empty_v = smem
    items, row_tiles, H, N = sizes
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    in_tile = gl.arange(0, TILE, gl.SliceLayout(0, s_layout))
    if not MEANS:
        means = 0
    used = 0
    turn = 0
    _, next_entries = _list(gl.program_id(0), items, row_tiles, counts_ptr, means, TILES_PER_BLOCK)
    s = gl.full([64, TILE], 0.0, gl.float32, s_layout)
    mbarrier.wait(full_q.index(0), 0)
    mbarrier.wait(full_k.index(0), 0)
    k_tile = k_smem.index(0).permute((1, 0))
    s_token = warpgroup_mma(q_smem.index(WG), k_tile, s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s_token])
    mbarrier.arrive(empty_k.index(0), count=1)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, h, row0 = _locate(item, row_tiles, H, TILES_PER_BLOCK, 64 * CONSUMERS, BLOCK_SIZE_Q)
        tiles, first = _tiles(next_entries, TILE)
        empty = next_entries == 0
        _, next_entries = _list(
            item + gl.num_programs(0),
            items,
            row_tiles,
            counts_ptr,
            means,
            TILES_PER_BLOCK,
        )
        q = q_smem.index((turn & 1) * CONSUMERS + WG)

        o = gl.full([64, D], 0.0, gl.float32, o_layout)
        if MEANS:
            s = gl.where((in_tile < gl.minimum(means, first))[None, :], s + mean_bias, s)
        s = gl.where((in_tile < first)[None, :], s, float("-inf"))
        m = gl.max(s, 1) * scale_log2
        # Without an entry the maximum is -inf, and -inf - -inf would be NaN.
        p = gl.exp2(s * scale_log2 - gl.where(m == float("-inf"), 0.0, m)[:, None])
        total = gl.sum(p, 1)
        p_half = gl.convert_layout(p.to(dtype), p_layout)
        begin = 1
        end = 1
        if MEANS:
            end = _tiles_with_means(tiles, first, means, TILE)
        for plain in gl.static_range(2):
            for t in range(begin, end):
                s, p_half, o, m, total, used = _consume_tile(
                    q, s, p_half, o, m, total, used, smem, scale_log2,
                    means - first - (t - 1) * TILE, mean_bias, in_tile, STAGES, not plain,
                )  # fmt: skip
            begin = end
            end = tiles
        mbarrier.arrive(empty_q.index(turn & 1), count=1)
        stage = used % STAGES
        mbarrier.wait(full_v.index(stage), (used // STAGES) & 1)
        o_token = warpgroup_mma(p_half, v_smem.index(stage), o, is_async=True)
        # The first scores of the next item are computed under this one's epilogue.
        used += 1
        turn += 1
        next_stage = used % STAGES
        mbarrier.wait(full_q.index(turn & 1), (turn >> 1) & 1)
        mbarrier.wait(full_k.index(next_stage), (used // STAGES) & 1)
        q = q_smem.index((turn & 1) * CONSUMERS + WG)
        k_tile = k_smem.index(next_stage).permute((1, 0))
        s_token = warpgroup_mma(q, k_tile, s, use_acc=False, is_async=True)
        row0 += WG * 64
        if IN_FP8:
            row = row0 + gl.arange(0, 64, o_rows)
            per_row = (b * H + h).to(gl.int64) * N + row
            residual_scale = gl.load(scale_ptr + per_row, mask=row < N, other=0.0)
        share = 1.0 / gl.convert_layout(total, o_rows)
        o = warpgroup_mma_wait(1, deps=[o_token])
        mbarrier.arrive(empty_v.index(stage), count=1)
        o = o * share[:, None]
        if not MEANS:
            # An empty list multiplied one row of garbage by zero, and NaN survives that. The count
            # says so, not the total: that of others may be NaN, and so must their result be.
            o = gl.where(empty, 0.0, o)
        if HAS_RESIDUAL:
            places, inside = row_places(residual_ptr, strides[3:], b, h, row0, N, D)
            cached = gl.load(places, mask=inside, other=0.0)
            residual = from_rows(cached, o_layout).to(gl.float32)
            if IN_FP8:
                residual *= residual_scale[:, None]
            o += residual
        places, inside = row_places(o_ptr, strides[:3], b, h, row0, N, D)
        gl.store(places, to_rows(o.to(dtype)), mask=inside)
        s = warpgroup_mma_wait(0, deps=[s_token])
        mbarrier.arrive(empty_k.index(next_stage), count=1)


@gluon.jit
def _column_sparse_attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, indices_ptr, counts_ptr,
    residual_ptr, scale_ptr, mean_k_ptr, mean_v_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_on,
    stride_rb, stride_rh, stride_rn,
    items, row_tiles, H, N, capacity, scale_log2, means, mean_bias,
    CONSUMERS: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    PRODUCER_WARPS: gl.constexpr, D: gl.constexpr,
    TILES_PER_BLOCK: gl.constexpr, BLOCK_SIZE_Q: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    IN_FP8: gl.constexpr, MEANS: gl.constexpr, WIDE_ROWS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128,
        element_bitwidth=16,
        rank=2,
    )
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [2 * CONSUMERS, 64, D], tile_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, D], tile_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, D], tile_layout)
    full_q = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    empty_q = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    empty_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    # A tile is full once the copies of all producer threads have landed.
    for i in gl.static_range(2):
        mbarrier.init(full_q.index(i), count=32 * PRODUCER_WARPS)
        mbarrier.init(empty_q.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(full_k.index(i), count=32 * PRODUCER_WARPS)
        mbarrier.init(full_v.index(i), count=32 * PRODUCER_WARPS)
        mbarrier.init(empty_k.index(i), count=CONSUMERS)
        mbarrier.init(empty_v.index(i), count=CONSUMERS)
    partition_barrier()
    smem = (q_smem, k_smem, v_smem, full_q, empty_q, full_k, empty_k, full_v, empty_v)
    results = (o_ptr, residual_ptr, scale_ptr, counts_ptr)
    result_strides = (stride_ob, stride_oh, stride_on, stride_rb, stride_rh, stride_rn)
    inputs = (q_ptr, k_ptr, v_ptr, indices_ptr, counts_ptr, mean_k_ptr, mean_v_ptr)
    input_strides = (
        stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
        stride_vb, stride_vh, stride_vn,
    )  # fmt: skip
    sizes = (items, row_tiles, H, N)
    # Constants survive only inside these literals, so each partition spells them out. The slices
    # leave out consumers that are not there.
    # fmt: off
    gl.warp_specialize(
        [
            (_consume, (results, smem, result_strides, sizes, scale_log2, means, mean_bias,
                        CONSUMERS, TILE, STAGES, D, TILES_PER_BLOCK, BLOCK_SIZE_Q,
                        HAS_RESIDUAL, IN_FP8, MEANS, 2)),
            (_consume, (results, smem, result_strides, sizes, scale_log2, means, mean_bias,
                        CONSUMERS, TILE, STAGES, D, TILES_PER_BLOCK, BLOCK_SIZE_Q,
                        HAS_RESIDUAL, IN_FP8, MEANS, 1)),
            (_consume, (results, smem, result_strides, sizes, scale_log2, means, mean_bias,
                        CONSUMERS, TILE, STAGES, D, TILES_PER_BLOCK, BLOCK_SIZE_Q,
                        HAS_RESIDUAL, IN_FP8, MEANS, 0)),
            (_produce, (inputs, smem, input_strides, sizes, capacity, means,
                        CONSUMERS, TILE, STAGES, D, TILES_PER_BLOCK, BLOCK_SIZE_Q, MEANS,
                        WIDE_ROWS, PRODUCER_WARPS)),
        ][3 - CONSUMERS :],
        [4, 4, PRODUCER_WARPS][3 - CONSUMERS :],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS][3 - CONSUMERS :],
    )
    # fmt: on


def column_sparse_attention(call: ColumnSparseAttention) -> torch.Tensor:
    """Run a checked `ColumnSparseAttention`."""
    query, scale = triton_support.with_positive_scale(call.query, call.softmax_scale)
    key = call.key
    value = call.value
    indices = call.indices
    residual = call.residual
    batch, heads, rows, head_dim = query.shape
    output = torch.empty_like(query)
    # The kernel reads rows of the residual as they lie.
    if residual is None:
        residual = output
    elif residual.stride(-1) != 1:
        residual = residual.contiguous()

    launch = call.known().get("gluon")
    if launch is None:
        tile_rows = next(r for r in (192, 128, 64) if call.block_size_q % r == 0)
        config = CONFIGS[head_dim, tile_rows]
        tiles_per_block = call.block_size_q // tile_rows
        row_tiles = call.counts.shape[2] * tiles_per_block
        items = batch * heads * row_tiles
        furthest_row = (key.shape[2] - 1) * max(key.stride(2), value.stride(2)) + head_dim
        # One program per place on the GPU goes from tile to tile; where some places are taken for a
        # while, one program per tile, so that those go to whichever is free.
        places = triton_support.multiprocessors(query.device) * config.blocks_per_sm
        strided = (query, key, value, output, residual)
        sizes = (items, row_tiles, heads, rows, indices.shape[3])
        launch = call.known()["gluon"] = Launch(
            _column_sparse_attention_kernel,
            (items if call.shares_device else min(items, places),),
            *(stride for tensor in strided for stride in tensor.stride()[:3]),
            *sizes,
            scale * LOG2_E.value,
            0 if call.mean_key is None else call.mean_key.shape[2],
            math.log(call.mean_weight) / scale,  # added to scores that are not scaled yet
            CONSUMERS=config.consumers,
            TILE=config.tile,
            STAGES=config.stages,
            CONSUMER_REGISTERS=config.consumer_registers,
            PRODUCER_REGISTERS=config.producer_registers,
            PRODUCER_WARPS=config.producer_warps,
            D=head_dim,
            TILES_PER_BLOCK=tiles_per_block,
            BLOCK_SIZE_Q=call.block_size_q,
            HAS_RESIDUAL=call.residual is not None,
            IN_FP8=call.residual_scale is not None,
            MEANS=call.mean_key is not None,
            WIDE_ROWS=furthest_row >= 2**31,
            num_warps=4,
            maxnreg=128 if config.blocks_per_sm == 2 else None,
        )
    launch(
        query,
        key,
        value,
        output,
        indices.contiguous(),
        call.counts.contiguous(),
        residual,
        query if call.residual_scale is None else call.residual_scale.contiguous(),
        key if call.mean_key is None else _packed(call.mean_key),
        value if call.mean_value is None else _packed(call.mean_value),
    )
    return output


def _packed(means: torch.Tensor) -> torch.Tensor:
    """Means as the kernel reads them: contiguous, from a multiple of 16 bytes on."""
    if means.data_ptr() % 16 == 0:
        return means.contiguous()
    return means.clone(memory_format=torch.contiguous_format)


def compile_one(device: torch.device) -> None:
    """Launches the kernel in one of its forms, for `gluon_compat.not_compiled_reason`."""
    heads = torch.empty(1, 2, 128, 128, dtype=torch.bfloat16, device=device)
    indices = torch.empty(1, 2, 1, 64, dtype=torch.int32, device=device)
    column_sparse_attention(ColumnSparseAttention(heads, heads, heads, indices, indices[..., 0]))

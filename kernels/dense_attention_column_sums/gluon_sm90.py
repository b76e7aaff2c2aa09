"""Full attention for Hopper, in 16 and 8 bits, with column sums or without them.

One warp-specialized, persistent kernel computes `dense_attention_column_sums`, `dense_attention`
and `fp8_dense_attention`.

In a thread block, two consumer warpgroups own 64 query rows each and compute the softmax of one
tile under the value product of the tile before; one warp loads the tiles and one finishes the
column sums (``kernels/gluon_column_sums.py``). Nothing of these feeds back into the output, so
attention without them is the same bit for bit. ``fp8_dense_attention/gluon_sm90.py`` has the warps
that load and attend in 8 bits.

The last tile of keys, which may be ragged, comes first: it is the only one that needs a mask.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from chipsparse.kernels import triton_support
from chipsparse.kernels.checks import block_count
from chipsparse.kernels.dense_attention.call import DenseAttention
from chipsparse.kernels.dense_attention_column_sums import DenseAttentionColumnSums
from chipsparse.kernels.dispatch import Call
from chipsparse.kernels.fp8_dense_attention import Fp8DenseAttention
from chipsparse.kernels.fp8_dense_attention.gluon_sm90 import attend_8_bits, load_8_bits
from chipsparse.kernels.gluon_column_sums import (
    first_column,
    locate_rows,
    sum_factor,
    sum_rows,
    write_sums,
)
from chipsparse.kernels.gluon_compat import descriptor, partition_barrier, tma_load
from chipsparse.kernels.gluon_rows import row_places, to_rows
from chipsparse.kernels.launch import Launch

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
BLOCK_ROWS = 128
TILE = 128
# Tiles of keys, and of values, in flight, by head size; of half as many bytes in 8 bits.
STAGES = {128: 2, 64: 4}
CONSUMER_REGISTERS = 224
CONSUMER_REGISTERS_8_BITS = 240
HELPER_REGISTERS = 24

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@gluon.jit
def _load(descriptors, smem, sizes, TILE: gl.constexpr, STAGES: gl.constexpr):
    """Loads the query rows, then every tile of keys and values."""
    q_desc, k_desc, v_desc = descriptors
    q_smem, k_smem, v_smem, _, full_q, empty_q, full_k, empty_k, full_v, empty_v, _, _ = smem
    items, row_tiles, H, _, M = sizes
    tiles = (M + TILE - 1) // TILE
    filled = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, h, row_tile = locate_rows(item, row_tiles, H)
        side = turn & 1
        mbarrier.wait(empty_q.index(side), ((turn >> 1) & 1) ^ 1)
        mbarrier.expect(full_q.index(side), 2 * q_desc.block_type.nbytes)
        for w in gl.static_range(2):
            tma_load(
                q_desc,
                [b, h, row_tile * 128 + w * 64, 0],
                full_q.index(side),
                q_smem.index(2 * side + w),
            )
        turn += 1
        for t in range(tiles):
            stage = filled % STAGES
            free = ((filled // STAGES) & 1) ^ 1
            column = first_column(t, tiles, TILE)
            mbarrier.wait(empty_k.index(stage), free)
            mbarrier.expect(full_k.index(stage), k_desc.block_type.nbytes)
            tma_load(k_desc, [b, h, column, 0], full_k.index(stage), k_smem.index(stage))
            mbarrier.wait(empty_v.index(stage), free)
            mbarrier.expect(full_v.index(stage), v_desc.block_type.nbytes)
            tma_load(v_desc, [b, h, column, 0], full_v.index(stage), v_smem.index(stage))
            filled += 1


@gluon.jit
def _attend(
    pointers, smem, strides, sizes, scale_log2,
    TILE: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, SUMS: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    """Attention of 64 query rows over all tiles, and their part of the column sums."""
    o_ptr, lse_ptr, previous_ptr = pointers[:3]
    q_smem, k_smem, v_smem, sums_smem = smem[:4]
    full_q, empty_q, full_k, empty_k, full_v, empty_v, full_s, empty_s = smem[4:]
    items, row_tiles, H, N, M = sizes
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    in_tile = gl.arange(0, TILE, gl.SliceLayout(0, s_layout))
    tiles = (M + TILE - 1) // TILE
    used = 0
    summed = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, h, row_tile = locate_rows(item, row_tiles, H)
        row0 = row_tile * 128 + WG * 64
        per_row = (b * H + h).to(gl.int64) * N + row0
        s_row = row0 + gl.arange(0, 64, s_rows)
        # Rows past the end get factors of exp2(-inf) = 0.
        previous = gl.load(
            previous_ptr + per_row + gl.arange(0, 64, s_rows),
            mask=s_row < N,
            other=float("inf"),
        )
        previous = previous * LOG2_E
        s = gl.full([64, TILE], 0.0, gl.float32, s_layout)
        o = gl.full([64, D], 0.0, gl.float32, o_layout)
        q = q_smem.index(2 * (turn & 1) + WG).reshape([64, D])
        mbarrier.wait(full_q.index(turn & 1), (turn >> 1) & 1)
        stage = used % STAGES
        mbarrier.wait(full_k.index(stage), (used // STAGES) & 1)
        k_tile = k_smem.index(stage).reshape([TILE, D]).permute((1, 0))
        s_token = warpgroup_mma(q, k_tile, s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s_token])
        mbarrier.arrive(empty_k.index(stage), count=1)
        s = gl.where((in_tile < M - (tiles - 1) * TILE)[None, :], s, float("-inf"))
        m = gl.max(s, 1) * scale_log2
        p = gl.exp2(s * scale_log2 - m[:, None])
        total = gl.sum(p, 1)
        p_half = gl.convert_layout(p.to(dtype), p_layout)
        if SUMS:
            mbarrier.wait(empty_s.index(summed % 2), ((summed // 2) & 1) ^ 1)
            factor = sum_factor(m, previous)
            sum_rows(p, factor, sums_smem.index(summed % 2), TILE, WG)
            mbarrier.arrive(full_s.index(summed % 2), count=1)
            summed += 1
        for _ in range(tiles - 1):
            stage = used % STAGES
            phase = (used // STAGES) & 1
            used += 1
            next_stage = used % STAGES
            mbarrier.wait(full_k.index(next_stage), (used // STAGES) & 1)
            k_tile = k_smem.index(next_stage).reshape([TILE, D]).permute((1, 0))
            s_token = warpgroup_mma(q, k_tile, s, use_acc=False, is_async=True)
            mbarrier.wait(full_v.index(stage), phase)
            v_tile = v_smem.index(stage).reshape([TILE, D])
            o_token = warpgroup_mma(p_half, v_tile, o, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_token])
            mbarrier.arrive(empty_k.index(next_stage), count=1)
            m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
            shrink = gl.exp2(m - m_new)
            p = gl.exp2(s * scale_log2 - m_new[:, None])
            total = total * shrink + gl.sum(p, 1)
            m = m_new
            if SUMS:
                mbarrier.wait(empty_s.index(summed % 2), ((summed // 2) & 1) ^ 1)
                factor = sum_factor(m, previous)
                sum_rows(p, factor, sums_smem.index(summed % 2), TILE, WG)
                mbarrier.arrive(full_s.index(summed % 2), count=1)
                summed += 1
            o = warpgroup_mma_wait(0, deps=[o_token])
            mbarrier.arrive(empty_v.index(stage), count=1)
            p_half = gl.convert_layout(p.to(dtype), p_layout)
            o = o * gl.convert_layout(shrink, o_rows)[:, None]
        mbarrier.arrive(empty_q.index(turn & 1), count=1)
        stage = used % STAGES
        mbarrier.wait(full_v.index(stage), (used // STAGES) & 1)
        o_token = warpgroup_mma(p_half, v_smem.index(stage).reshape([TILE, D]), o, is_async=True)
        used += 1
        turn += 1
        gl.store(
            lse_ptr + per_row + gl.arange(0, 64, s_rows),
            (m + gl.log2(total)) * LN_2,
            mask=s_row < N,
        )
        total = gl.convert_layout(total, o_rows)
        places, inside = row_places(o_ptr, strides, b, h, row0, N, D)
        o = warpgroup_mma_wait(0, deps=[o_token])
        mbarrier.arrive(empty_v.index(stage), count=1)
        gl.store(places, to_rows((o / total[:, None]).to(dtype)), mask=inside)


@gluon.jit
def _attention_kernel(
    q_desc, k_desc, v_desc, o_ptr, lse_ptr, previous_ptr, sums_ptr,
    factor_ptr, shift_ptr, v_scale_ptr, v_mean_ptr,
    stride_ob, stride_oh, stride_on, items, row_tiles, H, N, M, parts, stride_g, scale_log2,
    TILE: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, PART_ROWS: gl.constexpr,
    SUMS: gl.constexpr, IN_8_BITS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    HELPER_REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    # Values in 8 bits come transposed.
    V_ROWS: gl.constexpr = D if IN_8_BITS else TILE
    V_COLUMNS: gl.constexpr = TILE if IN_8_BITS else D
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [4, 1, 1, 64, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, TILE, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(
        v_desc.dtype,
        [STAGES, 1, 1, V_ROWS, V_COLUMNS],
        v_desc.layout,
    )
    rows_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sums_smem = gl.allocate_shared_memory(gl.float32, [2, 8, TILE], rows_layout)
    full_q = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    empty_q = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    # In 8 bits keys and values arrive together, and the barriers of values are not used.
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    empty_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    full_s = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    empty_s = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(full_k.index(i), count=1)
        mbarrier.init(full_v.index(i), count=1)
        mbarrier.init(empty_k.index(i), count=2)
        mbarrier.init(empty_v.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(full_q.index(i), count=1)
        mbarrier.init(empty_q.index(i), count=2)
        mbarrier.init(full_s.index(i), count=2)
        mbarrier.init(empty_s.index(i), count=1)
    partition_barrier()
    descriptors = (q_desc, k_desc, v_desc)
    pointers = (o_ptr, lse_ptr, previous_ptr, factor_ptr, shift_ptr, v_scale_ptr, v_mean_ptr)
    strides = (stride_ob, stride_oh, stride_on)
    sizes = (items, row_tiles, H, N, M)
    summed = (items if SUMS else 0, row_tiles, H, N, M)
    smem = (
        q_smem, k_smem, v_smem, sums_smem,
        full_q, empty_q, full_k, empty_k, full_v, empty_v, full_s, empty_s,
    )  # fmt: skip
    of_sums = (sums_smem, full_s, empty_s)
    # Constants survive only inside these literals, so each partition spells them out.
    if IN_8_BITS:
        gl.warp_specialize(
            [
                (attend_8_bits, (pointers, smem, strides, sizes, TILE, STAGES, D, SUMS, 0)),
                (attend_8_bits, (pointers, smem, strides, sizes, TILE, STAGES, D, SUMS, 1)),
                (load_8_bits, (descriptors, smem, sizes, TILE, STAGES)),
                (write_sums, (sums_ptr, of_sums, summed, parts, stride_g, TILE, PART_ROWS)),
            ],
            [4, 1, 1],
            [CONSUMER_REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (pointers, smem, strides, sizes, scale_log2, TILE, STAGES, D, SUMS, 0)),
                (_attend, (pointers, smem, strides, sizes, scale_log2, TILE, STAGES, D, SUMS, 1)),
                (_load, (descriptors, smem, sizes, TILE, STAGES)),
                (write_sums, (sums_ptr, of_sums, summed, parts, stride_g, TILE, PART_ROWS)),
            ],
            [4, 1, 1],
            [CONSUMER_REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS],
        )


def dense_attention_column_sums(call: DenseAttentionColumnSums) -> Result:
    """Run a checked `DenseAttentionColumnSums`."""
    query, scale = triton_support.with_positive_scale(call.query, call.softmax_scale)
    tensors = query, call.key, call.value
    return _launch(call, *tensors, call.lse_previous, call.block_size_q, scale=scale)


def dense_attention(call: DenseAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a checked `DenseAttention`."""
    query, scale = triton_support.with_positive_scale(call.query, call.softmax_scale)
    output, lse, _ = _launch(call, query, call.key, call.value, None, BLOCK_ROWS, scale=scale)
    return output, lse


def fp8_dense_attention(call: Fp8DenseAttention) -> Result:
    """Run a checked `Fp8DenseAttention`."""
    tensors = call.tensors
    return _launch(
        call,
        tensors.query,
        tensors.key,
        tensors.value,
        call.lse_previous,
        call.block_size_q,
        factors=tensors.factors,
        dtype=tensors.dtype,
    )


def _launch(
    call: Call[Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lse_previous: torch.Tensor | None,
    block_size_q: int,
    *,
    scale: float = 1.0,
    factors: list[torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Result:
    """Return output and LSE; and column sums, where there is a previous LSE to weigh them with.

    Blocks of more than 128 rows are summed in parts of 64 or 128 rows, which are added afterwards.

    Numbers in 16 bits have a positive ``scale`` of the scores. Those in 8 bits, with the value
    ``[B, H, D, M']``, have the ``factors`` of `Fp8Attention` and the ``dtype`` of their output.
    """
    batch, heads, rows, head_dim = query.shape
    columns = key.shape[2]
    device = query.device
    part_rows = BLOCK_ROWS if block_size_q % BLOCK_ROWS == 0 else 64
    parts_per_block = block_size_q // part_rows
    blocks = block_count(rows, block_size_q)
    parts = blocks * parts_per_block
    output = torch.empty_like(query, dtype=dtype)
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=device)
    sums = None
    previous = lse
    if lse_previous is not None:
        shape = (batch, heads, parts, columns)
        sums = torch.empty(shape, dtype=torch.bfloat16, device=device)
        previous = lse_previous.float().contiguous()

    in_8_bits = factors is not None
    known = call.known()
    launch = known.get("gluon")
    if launch is None:
        row_tiles = block_count(rows if sums is None else parts * part_rows, BLOCK_ROWS)
        items = batch * heads * row_tiles
        sizes = (items, row_tiles, heads, rows, columns, parts, columns)
        launch = known["gluon"] = Launch(
            _attention_kernel,
            (min(items, triton_support.multiprocessors(device)),),
            *output.stride()[:3],
            *sizes,
            scale * LOG2_E.value,
            TILE=TILE,
            STAGES=STAGES[head_dim] * (2 if in_8_bits else 1),
            D=head_dim,
            PART_ROWS=part_rows,
            SUMS=sums is not None,
            IN_8_BITS=in_8_bits,
            CONSUMER_REGISTERS=CONSUMER_REGISTERS_8_BITS if in_8_bits else CONSUMER_REGISTERS,
            HELPER_REGISTERS=HELPER_REGISTERS,
            num_warps=4,
        )
    value_tile = (head_dim, TILE) if in_8_bits else (TILE, head_dim)
    launch(
        descriptor(known, "query", query, 1, 1, 64, head_dim),
        descriptor(known, "key", key, 1, 1, TILE, head_dim),
        descriptor(known, "value", value, 1, 1, *value_tile),
        output,
        lse,
        previous,
        lse if sums is None else sums,
        *(factors or [lse] * 4),  # never read of 16-bit numbers
    )
    if sums is not None and parts_per_block > 1:
        sums = sums.unflatten(2, (blocks, parts_per_block)).sum(3)
    return output, lse, sums


def compile_one(device: torch.device) -> None:
    """Launches the kernel in one of its forms, for `gluon_compat.not_compiled_reason`."""
    heads = torch.empty(1, 2, 128, 128, dtype=torch.bfloat16, device=device)
    dense_attention(DenseAttention(heads, heads, heads))

"""`fp8_dense_attention` for Hopper: the warps that load and attend in 8 bits.

``dense_attention_column_sums/gluon_sm90.py`` has the kernel around them: two consumer warpgroups of
64 query rows, one warp that loads tiles and one that finishes the column sums. What 8 bits change:

- Scores come as int32, and start from a number that makes their bits those of an fp32.
- The product of a tile's weights with its values is issued with the scores of the next tile. Both
  operands arrive together: a barrier less to wait for, and to hand back, in every round.
- In both operands of a product the summed dimension is contiguous, so values come transposed, in
  the order in which a thread holds its scores: weights become an operand where they are.
- Tensor cores keep about 14 bits of a sum of e4m3 products. So the product of each tile starts from
  zero, and is added to the output in float32 by the instruction that rescales the output anyway.
- Weights are taken relative to the largest score of their own tile, or 2 ** -32 of the largest so
  far, and not to the latter: in e4m3 what is far below that would be lost, however many columns it
  is.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from chipsparse.kernels.fp8_dense_attention import LOWEST_BITS, WEIGHT_BITS
from chipsparse.kernels.gluon_column_sums import first_column, locate_rows, sum_factor, sum_rows
from chipsparse.kernels.gluon_compat import tma_load
from chipsparse.kernels.gluon_rows import row_places, to_rows

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# Sums of int8 products, below 2 ** 21, become the last digits of this fp32 where they start from
# its bits: nothing has to be converted.
SCORE_OFFSET = gl.constexpr(1.5 * 2.0**23)
OFFSET_BITS = gl.constexpr(0x4B400000)
NO_SCORE = gl.constexpr(-0x800000)  # the bits of minus infinity
BITS = gl.constexpr(float(WEIGHT_BITS))
LOWEST = gl.constexpr(float(LOWEST_BITS))


@gluon.jit
def load_8_bits(descriptors, smem, sizes, TILE: gl.constexpr, STAGES: gl.constexpr):
    """Loads the query rows, then each tile of keys with the transposed values of the one before.

    Before the first tile there are no values and behind the last one no keys: what then comes in
    their place, zeros or a tile once more, is not used.
    """
    q_desc, k_desc, v_desc = descriptors
    q_smem, k_smem, v_smem, _, full_q, empty_q, full, empty = smem[:8]
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
            row = row_tile * 128 + w * 64
            tma_load(q_desc, [b, h, row, 0], full_q.index(side), q_smem.index(2 * side + w))
        turn += 1
        for t in range(tiles + 1):
            stage = filled % STAGES
            mbarrier.wait(empty.index(stage), ((filled // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            keys = first_column(t, tiles, TILE)
            values = first_column(t - 1, tiles, TILE)
            tma_load(k_desc, [b, h, keys, 0], full.index(stage), k_smem.index(stage))
            tma_load(v_desc, [b, h, 0, values], full.index(stage), v_smem.index(stage))
            filled += 1


@gluon.jit
def _packed(p, TILE: gl.constexpr, layout: gl.constexpr):
    """Weights in e4m3, four to an int32, each token at its place in the stored values.

    Nothing moves. Triton takes e4m3 apart into bytes where it goes around a loop, and puts it
    together again; an int32 it leaves alone. Not pure, so that it stays behind the product before:
    ptxas lets no two products overlap where one is under way while the operand of the next is made.
    """
    p = p.reshape([64, TILE // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, TILE])
    p = gl.convert_layout(p, layout, assert_trivial=True)
    # Of the four numbers of a register the first has all; the others are dropped.
    packed = gl.inline_asm_elementwise(
        """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $5, $4;
            cvt.rn.satfinite.e4m3x2.f32 high, $7, $6;
            mov.b32 $0, {low, high};
            mov.b32 $1, 0;
            mov.b32 $2, 0;
            mov.b32 $3, 0;
        }""",
        "=r,=r,=r,=r,f,f,f,f",
        [p],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )
    packed, _ = gl.split(packed.reshape([64, TILE // 4, 2, 2]))
    packed, _ = gl.split(packed)
    return packed


@gluon.jit
def _operand(packed, TILE: gl.constexpr, layout: gl.constexpr):
    """Return packed numbers as the tensor cores take them."""
    packed = gl.join(packed, packed)
    packed = gl.join(packed, packed).reshape([64, TILE])
    packed = gl.convert_layout(packed, layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;",
        "=r,r,r,r,r",
        [packed],
        dtype=gl.float8e4nv,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def _scores(q, k_tile, TILE: gl.constexpr, layout: gl.constexpr):
    """Begins a product of int8 queries and keys: int32 whose bits, as fp32, add SCORE_OFFSET."""
    start = gl.full([64, TILE], OFFSET_BITS, gl.int32, layout)
    return warpgroup_mma(q, k_tile.permute((1, 0)), start, is_async=True)


@gluon.jit
def _softmax(s, factor, total, level, largest):
    """Weights of a tile of scores as `_scores` gives them, times 2 ** BITS, and a row's numbers.

    The level is the score, in units of ln 2, that a weight of 1 has in the total and in the output;
    ``rescale`` takes these from the level before to the new one.
    """
    s = s.to(gl.float32, bitcast=True)
    of_tile = (gl.max(s, 1) - SCORE_OFFSET) * factor
    new_level = gl.maximum(of_tile, largest - LOWEST)
    p = gl.exp2(s * factor[:, None] - (new_level - BITS + SCORE_OFFSET * factor)[:, None])
    rescale = gl.exp2(level - new_level)
    total = total * rescale + gl.sum(p, 1)
    return p, total, rescale, new_level, gl.maximum(largest, of_tile)


@gluon.jit
def _pass_sums(p, level, previous, summed, smem, TILE: gl.constexpr, WG: gl.constexpr):
    """Hands the sums of a tile's weights over the rows of each warp to the warp that adds them."""
    sums_smem, full_s, empty_s = smem
    mbarrier.wait(empty_s.index(summed % 2), ((summed // 2) & 1) ^ 1)
    factor = sum_factor(level, previous) * gl.exp2(-BITS)
    sum_rows(p, factor, sums_smem.index(summed % 2), TILE, WG)
    mbarrier.arrive(full_s.index(summed % 2), count=1)


@gluon.jit
def attend_8_bits(
    pointers, smem, strides, sizes,
    TILE: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, SUMS: gl.constexpr,
    WG: gl.constexpr,
):  # fmt: skip
    """Attention of 64 query rows over all tiles, and their part of the column sums."""
    o_ptr, lse_ptr, previous_ptr, factor_ptr, shift_ptr, v_scale_ptr, v_mean_ptr = pointers
    q_smem, k_smem, v_smem, sums_smem = smem[:4]
    full_q, empty_q, full, empty = smem[4:8]
    full_s, empty_s = smem[10:]
    of_sums = (sums_smem, full_s, empty_s)
    items, row_tiles, H, N, M = sizes
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 4)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    in_tile = gl.arange(0, TILE, gl.SliceLayout(0, s_layout))
    channels = gl.arange(0, D, gl.SliceLayout(0, o_layout))
    tiles = (M + TILE - 1) // TILE
    used = 0
    summed = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, h, row_tile = locate_rows(item, row_tiles, H)
        row0 = row_tile * 128 + WG * 64
        s_row = row0 + gl.arange(0, 64, s_rows)
        per_row = (b * H + h).to(gl.int64) * N + s_row
        factor = gl.load(factor_ptr + per_row, mask=s_row < N, other=0.0) * LOG2_E
        shift = gl.load(shift_ptr + per_row, mask=s_row < N, other=0.0) * LOG2_E
        # Rows past the end get factors of exp2(-inf) = 0.
        previous = gl.load(previous_ptr + per_row, mask=s_row < N, other=float("inf"))
        previous = previous * LOG2_E - shift
        part = gl.full([64, D], 0.0, gl.float32, o_layout)
        o = gl.full([64, D], 0.0, gl.float32, o_layout)
        q = q_smem.index(2 * (turn & 1) + WG).reshape([64, D])
        mbarrier.wait(full_q.index(turn & 1), (turn >> 1) & 1)
        stage = used % STAGES
        mbarrier.wait(full.index(stage), (used // STAGES) & 1)
        s_token = _scores(q, k_smem.index(stage).reshape([TILE, D]), TILE, s_layout)
        s = warpgroup_mma_wait(0, deps=[s_token])
        mbarrier.arrive(empty.index(stage), count=1)
        used += 1
        s = gl.where((in_tile < M - (tiles - 1) * TILE)[None, :], s, NO_SCORE)
        level = gl.full([64], float("-inf"), gl.float32, s_rows)
        largest = level
        total = gl.full([64], 0.0, gl.float32, s_rows)
        p, total, rescale, level, largest = _softmax(s, factor, total, level, largest)
        if SUMS:
            _pass_sums(p, level, previous, summed, of_sums, TILE, WG)
            summed += 1
        weights = _packed(p, TILE, p_layout)
        # The product with the values of a tile may run under the softmax of the next one. ptxas
        # waits for it before; with a wait that it cannot move this was 10 % slower.
        for _ in range(tiles - 1):
            stage = used % STAGES
            operand = _operand(weights, TILE, p_layout)
            mbarrier.wait(full.index(stage), (used // STAGES) & 1)
            s_token = _scores(q, k_smem.index(stage).reshape([TILE, D]), TILE, s_layout)
            v_tile = v_smem.index(stage).reshape([D, TILE]).permute((1, 0))
            part_token = warpgroup_mma(operand, v_tile, part, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_token])
            before = rescale
            p, total, rescale, level, largest = _softmax(s, factor, total, level, largest)
            part = warpgroup_mma_wait(0, deps=[part_token])
            mbarrier.arrive(empty.index(stage), count=1)
            used += 1
            o = o * gl.convert_layout(before, o_rows)[:, None] + part
            if SUMS:
                _pass_sums(p, level, previous, summed, of_sums, TILE, WG)
                summed += 1
            weights = _packed(p, TILE, p_layout)
        mbarrier.arrive(empty_q.index(turn & 1), count=1)
        stage = used % STAGES
        mbarrier.wait(full.index(stage), (used // STAGES) & 1)
        v_tile = v_smem.index(stage).reshape([D, TILE]).permute((1, 0))
        operand = _operand(weights, TILE, p_layout)
        part_token = warpgroup_mma(operand, v_tile, part, use_acc=False, is_async=True)
        used += 1
        turn += 1
        lse = (level - BITS + gl.log2(total) + shift) * LN_2
        gl.store(lse_ptr + per_row, lse, mask=s_row < N)
        per_channel = (b * H + h) * D + channels
        v_scale = gl.load(v_scale_ptr + per_channel)
        v_mean = gl.load(v_mean_ptr + per_channel)
        total = gl.convert_layout(total, o_rows)
        places, inside = row_places(o_ptr, strides, b, h, row0, N, D)
        part = warpgroup_mma_wait(0, deps=[part_token])
        mbarrier.arrive(empty.index(stage), count=1)
        o = o * gl.convert_layout(rescale, o_rows)[:, None] + part
        o = (o / total[:, None]) * v_scale[None, :] + v_mean[None, :]
        gl.store(places, to_rows(o.to(o_ptr.dtype.element_ty)), mask=inside)

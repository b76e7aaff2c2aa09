"""Column selection in Triton: two passes over each row, one of them from the cache.

Sums are told apart by 16-bit keys in the same order (exact for fp16 and bf16, the upper half of
fp32). A sample of the row says where the key of rank ``keep_count`` must be; the first pass counts
the sums at and above four keys around it, and again closer by where that was not near enough; the
second pass writes the bits of all sums above the nearest of those keys, and of as many between it
and the next one as are left to keep. Long rows stop at keys within 1/LOOSENESS of the count.

Where the kernel's own PTX runs, two 16-bit sums are compared and counted by one instruction each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chipsparse.kernels.column_selection import ColumnSelection
from chipsparse.kernels.launch import launch
from chipsparse.kernels.mask_packing.triton_kernel import packed_bits, packed_counts
from chipsparse.kernels.triton_support import HALF_PRECISION, compute_capability, multiprocessors

# Few rows at a time, so that the second pass finds its row in the level 2 cache.
PROGRAMS_PER_MULTIPROCESSOR = 2
SELECT_WARPS = 16
# So that as many programs fit; no loop over columns spills.
OCCUPANCY = {"maxnreg": 64}
TILE_BYTES = 1024
SAMPLE_BYTES = 2048
# At most this part of the kept columns is exchanged for ones that come next; 0 for exact rows.
LOOSENESS = 50
PACKED_COMPARES = True

# Below all keys: their upper halves are from -0x8000 (only as NaN) to 0x7fff.
EXCLUDED = tl.constexpr(-0x80000000)


@triton.constexpr_function
def _pair(number: tl.dtype) -> str:
    """The type of two 16-bit numbers in PTX."""
    return "bf16x2" if number == tl.bfloat16 else "f16x2"


@triton.constexpr_function
def _count_ptx(number: tl.dtype, keys: int, static: bool) -> str:
    """Adds to packed counts, a pair of columns each, the sums at or above some keys.

    Operands: the counts, the 8 sums of a byte as 4 pairs, the keys as pairs of numbers, the counts
    before and the bits of the static columns, which turn into NaN and so are not counted.
    """
    dtype = _pair(number)
    add = "add.rn.bf16x2" if dtype == "bf16x2" else "add.f16x2"
    ptx = "{ .reg .b32 pair, one;"
    ptx += "".join(f" mov.b32 ${i}, ${2 * keys + 4 + i};" for i in range(keys))
    for j in range(4):
        ptx += f" mov.b32 pair, ${keys + j};"
        if static:
            bits = (1 << (15 - 2 * j)) + (1 << (30 - 2 * j))  # to the signs of both halves
            ptx += f" mul.lo.u32 one, ${3 * keys + 4}, {bits}; prmt.b32 one, one, 0, 0xBB99;"
            ptx += " or.b32 pair, pair, one;"
        for i in range(keys):
            ptx += f" set.ge.{dtype}.{dtype} one, pair, ${keys + 4 + i}; {add} ${i}, ${i}, one;"
    return ptx + " }"


@triton.constexpr_function
def _constraints(outputs: int, inputs: int) -> str:
    return ",".join(["=&r"] * outputs + ["r"] * inputs)


@triton.constexpr_function
def _bits_ptx(number: tl.dtype) -> str:
    """Bits of the columns of a byte at or above two keys; largest numbers so far, or NaN.

    A bit is a power of two that is added to 128 or 1024, so that it lands in the lowest bits.
    """
    dtype = _pair(number)
    powers = {"bf16x2": (0x3F80, 0x4080, 0x4180, 0x4280), "f16x2": (0x3C00, 0x4400, 0x4C00, 0x5400)}
    first = 0x4300 if dtype == "bf16x2" else 0x6400
    ptx = f"{{ .reg .b32 one, odd, power; mov.b32 $0, {first * 0x10001};"
    ptx += f" mov.b32 $1, {first * 0x10001}; mov.b32 $2, $9;"
    for j in range(4):
        ptx += f" mov.b32 power, {powers[dtype][j] * 0x10001};"
        for i in range(2):
            ptx += f" set.ge.{dtype}.{dtype} one, ${3 + j}, ${7 + i};"
            ptx += f" fma.rn.{dtype} ${i}, one, power, ${i};"
        ptx += f" max.NaN.{dtype} $2, $2, ${3 + j};"
    for i in range(2):
        ptx += f" shr.u32 odd, ${i}, 15; and.b32 odd, odd, 0xFE;"
        ptx += f" and.b32 ${i}, ${i}, 0x7F; or.b32 ${i}, ${i}, odd;"
    return ptx + " }"


# The lowest bits of a byte, at most so many, and how many may follow.
_LOWEST_BITS = tl.constexpr(
    """{
    .reg .pred p;
    .reg .b32 power;
    mov.b32 $0, $2;
    popc.b32 $1, $2;
    sub.s32 $1, $3, $1;
    setp.ge.s32 p, $1, 0;
    @p bra DONE;
    MORE:
    bfind.u32 power, $0;
    shl.b32 power, 1, power;
    xor.b32 $0, $0, power;
    add.s32 $1, $1, 1;
    setp.lt.s32 p, $1, 0;
    @p bra MORE;
    DONE:
    }""",
)


@triton.jit
def _load_pairs(row_ptr, byte, row_bytes, other, EVICTION: tl.constexpr):
    """The 8 sums of some bytes as 4 tensors of pairs of 16 bits."""
    pairs_ptr = row_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    pairs = tl.load(
        pairs_ptr + (byte[:, None] * 4 + tl.arange(0, 4)[None, :]),
        mask=(byte < row_bytes)[:, None],
        other=other,
        eviction_policy=EVICTION,
    )
    even, odd = tl.split(tl.reshape(pairs, [byte.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _number_pair(key):
    """Two numbers with a key, as 32 bits."""
    return tl.where(key < 0, 0x8000 - key, key) * 0x10001


@triton.jit
def _count(x, numbers, counts, static, STATIC: tl.constexpr, Number: tl.constexpr):
    """Packed counts, and the pairs of sums that are at or above each of four numbers.

    Static columns, given by their bits, are not counted.
    """
    given = x + numbers + counts
    if STATIC:
        given += (static,)
    return tl.inline_asm_elementwise(
        _count_ptx(Number, 4, STATIC),
        _constraints(4, len(given)),
        given,
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _whole(count, Number: tl.constexpr):
    """Sums of both halves of packed counts, int32."""
    low = (count & 0xFFFF).to(tl.int16).to(Number, bitcast=True).to(tl.float32)
    high = (count >> 16).to(tl.int16).to(Number, bitcast=True).to(tl.float32)
    return (low + high).to(tl.int32)


@triton.jit
def _static_bits(static_ptr, byte, row_bytes, STATIC: tl.constexpr):
    """Bits of the static columns of some bytes, int32."""
    bits = tl.zeros_like(byte)
    if STATIC:
        bits = tl.load(static_ptr + byte, mask=byte < row_bytes, other=0).to(tl.int32)
    return bits


@triton.jit
def _load_keys(sums_ptr, static_ptr, byte, row_bytes, columns, STATIC: tl.constexpr):
    """Keys of the columns of some bytes in the upper halves of int32 ``[bytes, 8]``.

    Static columns and those past the row have the key EXCLUDED. Also the bits without the sign.
    """
    bit = tl.arange(0, 8)[None, :]
    column = byte[:, None] * 8 + bit
    sums = tl.load(sums_ptr + column, mask=column < columns, other=0.0)
    if sums.dtype == tl.float32:
        key = sums.to(tl.int32, bitcast=True)
    else:
        key = sums.to(tl.int16, bitcast=True).to(tl.int32) << 16
    sign = key >> 31
    magnitude = key & 0x7FFFFFFF
    key = (magnitude ^ sign) - sign  # -0 and 0 are both 0
    if STATIC:
        static = _static_bits(static_ptr, byte, row_bytes, STATIC)
        key = tl.where(((static[:, None] >> bit) & 1) != 0, EXCLUDED, key)
    return tl.where(column < columns, key, EXCLUDED), magnitude


@triton.jit
def _bytes_at_least(keys, key):
    """Return the number of keys of each byte that are at or above one."""
    # Every key is at or above one that its 16 bits cannot hold; the excluded ones are not.
    return tl.sum(tl.where(keys >= key << 16, 1, 0), axis=1)


@triton.jit
def _byte_counts(
    row_ptr,
    static_ptr,
    keys,
    row_bytes,
    columns,
    STATIC: tl.constexpr,
    PACKED: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Numbers of sums of a row that are at or above each of four keys, by the byte of a tile."""
    Number: tl.constexpr = row_ptr.dtype.element_ty
    in_chunk = tl.arange(0, BYTES)
    none = tl.zeros([BYTES], tl.int32)
    c0 = none
    c1 = none
    c2 = none
    c3 = none
    if PACKED:
        numbers = (
            none + _number_pair(keys[0]),
            none + _number_pair(keys[1]),
            none + _number_pair(keys[2]),
            none + _number_pair(keys[3]),
        )
        # 64 tiles: a bf16 counts to 256.
        for part in range(0, row_bytes, BYTES * 64):
            p = (none, none, none, none)
            for first in range(part, tl.minimum(part + BYTES * 64, row_bytes), BYTES):
                byte = first + in_chunk
                x = _load_pairs(row_ptr, byte, row_bytes, -1, "evict_last")
                static = _static_bits(static_ptr, byte, row_bytes, STATIC)
                p = _count(x, numbers, p, static, STATIC, Number)
            c0 += _whole(p[0], Number)
            c1 += _whole(p[1], Number)
            c2 += _whole(p[2], Number)
            c3 += _whole(p[3], Number)
    else:
        for first in range(0, row_bytes, BYTES):
            byte = first + in_chunk
            values, _ = _load_keys(row_ptr, static_ptr, byte, row_bytes, columns, STATIC)
            c0 += _bytes_at_least(values, keys[0])
            c1 += _bytes_at_least(values, keys[1])
            c2 += _bytes_at_least(values, keys[2])
            c3 += _bytes_at_least(values, keys[3])
    return c0, c1, c2, c3


@triton.jit
def _sample_count(x, static, key, PACKED: tl.constexpr, Number: tl.constexpr):
    """Return the number of sums of the sample that are at or above a key."""
    if PACKED:
        number = tl.zeros_like(x[0]) + _number_pair(key)
        # Counts from 128 or 1024 on are in the lowest bits: both halves are summed as they are.
        first = tl.zeros_like(x[0]) + (0x43004300 if Number == tl.bfloat16 else 0x64006400)
        count = tl.inline_asm_elementwise(
            _count_ptx(Number, 1, True),
            _constraints(1, 7),
            [x[0], x[1], x[2], x[3], number, first, static],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        counts = tl.sum(count - first, axis=0)
        return (counts & 0xFFFF) + (counts >> 16)
    else:
        return tl.sum(_bytes_at_least(x[0], key), axis=0)


# Sizes stay unspecialized: none of the arithmetic gains by it, and one compiled kernel serves all.
# Nor is the alignment of static bits known: wider loads of them would go through shared memory.
@triton.jit(
    do_not_specialize=["rows", "columns", "row_bytes", "keep_count", "loose"],
    do_not_specialize_on_alignment=["static_ptr"],
)
def _select_kernel(
    sums_ptr,
    static_ptr,
    static_count_ptr,
    packed_ptr,
    rows,
    columns,
    row_bytes,
    keep_count,
    loose,
    INFINITY: tl.constexpr,
    EVEN: tl.constexpr,
    STATIC: tl.constexpr,
    PACKED: tl.constexpr,
    BYTES: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """Packed bits of the static columns and the highest sums; each program takes several rows."""
    Number: tl.constexpr = sums_ptr.dtype.element_ty
    NEAR: tl.constexpr = 128 if Number == tl.float16 else 16  # keys: about an eighth of a number
    in_chunk = tl.arange(0, BYTES)
    program_rows = tl.cdiv(rows, tl.num_programs(0))
    first_row = tl.program_id(0) * program_rows
    wanted = keep_count + 0
    if STATIC:
        wanted -= tl.load(static_count_ptr)
    middle = 0
    for next_row in range(0, tl.minimum(program_rows, rows - first_row)):
        row = first_row + next_row
        if EVEN:  # said so that the compiler knows rows to be aligned
            row_ptr = sums_ptr + row.to(tl.int64) * row_bytes * 8
        else:
            row_ptr = sums_ptr + row.to(tl.int64) * columns
        bits_ptr = packed_ptr + row.to(tl.int64) * row_bytes

        # At least `wanted` sums are at or above `low`, and fewer (`above`) at or above `high`; the
        # same for each byte of the tiles. Both ends to begin with are no keys of numbers.
        low = -INFINITY - 1
        high = INFINITY + 1
        at_low = columns + 0
        above = 0
        lows = tl.zeros([BYTES], tl.int32)
        highs = tl.zeros([BYTES], tl.int32)
        base = 0
        step = 1
        spare = 0
        if keep_count >= columns:
            high = -INFINITY
        elif wanted <= 0:
            low = INFINITY
        else:
            if loose > 0:
                spare = wanted // loose
            sample = tl.arange(0, SAMPLE) * tl.maximum(row_bytes // SAMPLE, 1)
            static = _static_bits(static_ptr, sample, row_bytes, STATIC)
            if PACKED:
                x = _load_pairs(row_ptr, sample, row_bytes, -1, "")
            else:
                keys, _ = _load_keys(row_ptr, static_ptr, sample, row_bytes, columns, STATIC)
                x = (keys, keys, keys, keys)
            sampled = (tl.minimum(row_bytes, SAMPLE) * 8).to(tl.float32)
            rank = (sampled * wanted.to(tl.float32) / columns.to(tl.float32)).to(tl.int32) + 1
            # Near the key of the row before, or anywhere: the result is the same.
            left = tl.maximum(middle - 4 * NEAR, -INFINITY)
            right = tl.minimum(middle + 4 * NEAR, INFINITY)
            left_count = _sample_count(x, static, left, PACKED, Number)
            right_count = _sample_count(x, static, right, PACKED, Number)
            if left_count < rank:
                right = left
                left = -INFINITY - 1
            elif right_count >= rank:
                left = right
                right = INFINITY + 1
            while right - left > 1:
                key = (left + right) >> 1
                count = _sample_count(x, static, key, PACKED, Number)
                left = tl.where(count >= rank, key, left)
                right = tl.where(count >= rank, right, key)
            middle = tl.maximum(left, -INFINITY)
            # The keys to count at are so far apart that 4 % of the wanted sums are between them.
            left = tl.maximum(middle - NEAR, -INFINITY)
            left_count = _sample_count(x, static, left, PACKED, Number)
            right = tl.minimum(middle + NEAR, INFINITY)
            right_count = _sample_count(x, static, right, PACKED, Number)
            density = tl.maximum(left_count - right_count, 1).to(tl.float32) / (2 * NEAR)
            step = tl.minimum(0.04 * rank.to(tl.float32) / density + 0.5, 8.0 * NEAR).to(tl.int32)
            step = tl.maximum(step, 1)
            base = middle - (3 * step - 1) // 2

        # Both ends have to be keys that were counted at, or nothing is known of what lies between.
        while (high - low > 1) & (
            (low < -INFINITY)
            | (high > INFINITY)
            | (tl.minimum(wanted - above, at_low - wanted) > spare)
        ):
            least = tl.maximum(low, -INFINITY)
            keys = (
                tl.minimum(tl.maximum(base, least), high),
                tl.minimum(tl.maximum(base + step, least), high),
                tl.minimum(tl.maximum(base + 2 * step, least), high),
                tl.minimum(tl.maximum(base + 3 * step, least), high),
            )
            counts = _byte_counts(
                row_ptr,
                static_ptr,
                keys,
                row_bytes,
                columns,
                STATIC,
                PACKED,
                BYTES,
            )
            count = at_low
            for i in tl.static_range(4):
                before = count
                count = tl.sum(counts[i], axis=0)
                if count >= wanted:  # the last one of these
                    low = keys[i]
                    at_low = count
                    lows = counts[i]
                elif before >= wanted:  # the first one of the others
                    high = keys[i]
                    above = count
                    highs = counts[i]
            # Between two keys in five parts; or beyond one of them, twice as far as before.
            if (low >= -INFINITY) & ((high <= INFINITY) | (count < wanted)):
                step = (high - low + 4) // 5
                base = low + step
            else:
                step = step * 2
                base = tl.where(low < -INFINITY, high - 4 * step, low + step)

        # How many sums between the two keys each byte of the tiles keeps.
        between = lows - highs
        left_over = wanted - above - (tl.cumsum(between, axis=0) - between)
        left_over = tl.minimum(tl.maximum(left_over, 0), between)
        low = tl.maximum(low, -INFINITY)
        largest = tl.zeros([BYTES], tl.int32)
        if PACKED:
            number0 = tl.zeros([BYTES], tl.int32) + _number_pair(high)
            number1 = tl.zeros([BYTES], tl.int32) + _number_pair(low)
        for first in range(0, row_bytes, BYTES):
            byte = first + in_chunk
            static = _static_bits(static_ptr, byte, row_bytes, STATIC)
            if PACKED:
                x = _load_pairs(row_ptr, byte, row_bytes, 0, "evict_first")
                kept, maybe, largest = tl.inline_asm_elementwise(
                    _bits_ptx(Number),
                    _constraints(3, 7),
                    [x[0], x[1], x[2], x[3], number0, number1, largest],
                    dtype=(tl.int32, tl.int32, tl.int32),
                    is_pure=True,
                    pack=1,
                )
                maybe = tl.where(left_over > 0, maybe & ~(kept | static), 0)
                maybe, left_over = tl.inline_asm_elementwise(
                    _LOWEST_BITS,
                    "=&r,=&r,r,r",
                    [maybe, left_over],
                    dtype=(tl.int32, tl.int32),
                    is_pure=True,
                    pack=1,
                )
                kept |= maybe
            else:
                bit = tl.arange(0, 8)[None, :]
                keys, magnitude = _load_keys(row_ptr, static_ptr, byte, row_bytes, columns, STATIC)
                kept = tl.sum(tl.where(keys >= high << 16, 1 << bit, 0), axis=1)
                maybe = tl.sum(tl.where(keys >= low << 16, 1 << bit, 0), axis=1) & ~kept
                for j in tl.static_range(8):
                    taken = tl.where(left_over > 0, (maybe >> j) & 1, 0)
                    kept |= taken << j
                    left_over -= taken
                largest |= tl.max((magnitude > INFINITY << 16).to(tl.int32), axis=1)
            kept |= static
            tl.store(bits_ptr + byte, kept.to(tl.uint8), mask=byte < row_bytes)

        if PACKED:
            is_nan = (largest & 0x7FFF) > INFINITY
            largest = (is_nan | (((largest >> 16) & 0x7FFF) > INFINITY)).to(tl.int32)
        if tl.max(largest, axis=0) > 0:  # NaN: the sums of this row say nothing
            tl.debug_barrier()
            for first in range(0, row_bytes, BYTES):
                byte = first + in_chunk
                kept = tl.full([BYTES], 0xFF, tl.int32)
                if not EVEN:
                    kept = tl.where(byte == columns // 8, (1 << columns % 8) - 1, kept)
                tl.store(bits_ptr + byte, kept.to(tl.uint8), mask=byte < row_bytes)


def column_selection(call: ColumnSelection) -> torch.Tensor:
    """Run a checked `ColumnSelection`; fp32 sums count by 16 bits."""
    column_sums = call.column_sums
    infinity = 0x7C00 if column_sums.dtype == torch.float16 else 0x7F80
    batch, heads, blocks, columns = column_sums.shape
    rows = batch * heads * blocks
    row_bytes = -(-columns // 8)
    device = column_sums.device
    packed = torch.empty(batch, heads, blocks, row_bytes, dtype=torch.uint8, device=device)
    if packed.numel() == 0:
        return packed
    static = static_count = packed  # which is not read
    if call.static_columns is not None:
        static = packed_bits(call.static_columns)
        static_count = packed_counts(static, columns)
    programs = min(rows, multiprocessors(device) * PROGRAMS_PER_MULTIPROCESSOR)
    whole_bytes = columns % 8 == 0
    tile_bytes = TILE_BYTES if whole_bytes else TILE_BYTES // 2
    packed_compares = (
        PACKED_COMPARES
        and whole_bytes
        and column_sums.dtype in HALF_PRECISION
        and column_sums.is_cuda
        and torch.version.hip is None
        and compute_capability(device) >= (9, 0)
    )
    launch(
        _select_kernel,
        (programs,),
        column_sums.contiguous(),
        static,
        static_count,
        packed,
        rows,
        columns,
        row_bytes,
        min(call.keep_count, columns),
        LOOSENESS if row_bytes > tile_bytes else 0,  # rows of one tile are exact
        INFINITY=infinity,
        EVEN=whole_bytes,
        STATIC=call.static_columns is not None,
        PACKED=packed_compares,
        BYTES=tile_bytes,
        SAMPLE=SAMPLE_BYTES,
        num_warps=SELECT_WARPS,
        **(OCCUPANCY if packed_compares else {}),
    )
    return packed

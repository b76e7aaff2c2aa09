"""Column selection in Triton: the exact top-k of each row from two passes over it.

Sums become 16-bit keys in the same order (exact for fp16 and bf16, the upper half of fp32). A
sample of the row brackets the key of rank ``keep_count``; the first pass builds the histogram of
the keys inside the bracket and counts those above it, which gives the exact threshold; the second
pass, by then from the cache, writes the bits. A rank outside of the bracket costs more first
passes, and no exactness. Atomics only add and count integers, so their order does not show.

A second kernel draws the random columns from the bits, one stratum a lane.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chipsparse.kernels.column_selection.reference import position_state
from chipsparse.kernels.mask_packing.triton_kernel import pack_mask, packed_counts
from chipsparse.kernels.triton_support import HALF_PRECISION, multiprocessors

# Few rows at a time, so that the second pass finds its row in the level 2 cache.
PROGRAMS_PER_MULTIPROCESSOR = 2
SELECT_WARPS = 16
# So that as many programs fit; without spills where a thread loads the sums of a whole byte.
OCCUPANCY = {} if torch.version.hip else {"maxnreg": 64}
TILE_BYTES = 1024
SAMPLE_BYTES = 1024
BINS = 256

STRATA = 512
DRAW_WARPS = 4
# A byte has 8 columns: strata of one column are drawn in 9 turns, so that two that are drawn in the
# same turn never write the same byte.
BYTE_COLUMNS = 8

# Below all keys: their upper halves are from -0x8000 (only as NaN) to 0x7fff.
EXCLUDED = tl.constexpr(-0x80000000)


@triton.jit
def _load_keys(
    sums_ptr, static_ptr, byte, row_bytes, columns, lowest, EVEN: tl.constexpr, STATIC: tl.constexpr
):
    """Keys of the columns of some bytes, int32 ``[bytes, 8]``; also their bits without the sign.

    The key proper is the upper half. Static columns have the key EXCLUDED; those past the row are
    -inf, behind all others. If keys are only compared with ``lowest`` and above, and that is
    positive, then the bits are good enough: those of negative numbers are negative integers.
    """
    column = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    # Rows of whole bytes: the mask is known to be the same for 8 columns, one wide load.
    inside = (byte < row_bytes)[:, None] if EVEN else column < columns
    sums = tl.load(sums_ptr + column, mask=inside, other=-float("inf"))
    if sums.dtype == tl.float32:
        key = sums.to(tl.int32, bitcast=True)
    else:
        key = sums.to(tl.int16, bitcast=True).to(tl.int32) << 16
    magnitude = key & 0x7FFFFFFF
    if lowest <= 0:
        sign = key >> 31
        key = (magnitude ^ sign) - sign  # -0 and 0 are both 0
    if STATIC:
        static = tl.load(static_ptr + byte, mask=byte < row_bytes, other=0).to(tl.int32)
        is_static = (static[:, None] >> tl.arange(0, 8)[None, :]) & 1
        key = tl.where(is_static != 0, EXCLUDED, key)
    return key, magnitude


@triton.jit
def _bracket(key, low_rank, high_rank):
    """Upper halves of the keys of two ranks in the sample, by bisection; ranks are below 2**15."""
    low, high = -0x8000, -0x8000
    step = 0x8000
    while step > 0:
        # Both counts in one sum.
        above = tl.where(key >= (low + step) << 16, 1, 0)
        above += tl.where(key >= (high + step) << 16, 0x10000, 0)
        counts = tl.sum(tl.sum(above, axis=1), axis=0)
        low += tl.where((counts & 0xFFFF) >= low_rank, step, 0)
        high += tl.where((counts >> 16) >= high_rank, step, 0)
        step = step >> 1
    return low, high


@triton.jit
def _count_keys(bins_ptr, key, first_key, last_key, shift):
    inside = (key >= first_key) & (key <= last_key)
    tl.atomic_add(bins_ptr + (key >> (16 + shift)), 1, mask=inside, sem="relaxed")


@triton.jit
def _popcount8(bits):
    bits = bits - ((bits >> 1) & 0x55)
    bits = (bits & 0x33) + ((bits >> 2) & 0x33)
    return (bits + (bits >> 4)) & 0xF


# Sizes stay unspecialized: none of the arithmetic gains by it, and one compiled kernel serves all.
@triton.jit(
    do_not_specialize=[
        "rows",
        "heads",
        "groups",
        "columns",
        "row_bytes",
        "keep_count",
        "static_stride_b",
        "static_stride_h",
        "static_stride_g",
    ]
)
def _select_kernel(
    sums_ptr,
    static_ptr,
    static_counts_ptr,
    packed_ptr,
    histograms_ptr,
    rows,
    heads,
    groups,
    columns,
    row_bytes,
    keep_count,
    static_stride_b,
    static_stride_h,
    static_stride_g,
    NAN_LIMIT: tl.constexpr,
    EVEN: tl.constexpr,
    STATIC: tl.constexpr,
    BYTES: tl.constexpr,
    SAMPLE: tl.constexpr,
    BINS: tl.constexpr,
):
    """Packed bits of the static columns and the highest sums; each program takes several rows."""
    bit = tl.arange(0, 8)[None, :]
    bins = tl.arange(0, BINS)
    histogram_ptr = histograms_ptr + tl.program_id(0) * BINS
    for first_row in range(0, rows - tl.program_id(0), tl.num_programs(0)):
        row = tl.program_id(0) + first_row
        if EVEN:
            row_ptr = sums_ptr + row.to(tl.int64) * row_bytes * 8
        else:
            row_ptr = sums_ptr + row.to(tl.int64) * columns
        bits_ptr = packed_ptr + row.to(tl.int64) * row_bytes
        static_row_ptr = static_ptr
        wanted = keep_count + 0
        candidates = columns + 0
        if STATIC:
            static_row = (
                (row // (heads * groups)) * static_stride_b
                + (row // groups % heads) * static_stride_h
                + (row % groups) * static_stride_g
            )
            static_row_ptr = static_ptr + static_row.to(tl.int64) * row_bytes
            static_count = tl.load(static_counts_ptr + static_row)
            wanted -= static_count
            candidates -= static_count

        # The threshold is in [low, high): at least `wanted` keys are >= low, `above` are >= high.
        low = -0x8000
        high = 0x8000
        above = 0
        start = low
        stop = high
        if wanted >= candidates:
            high = low + 1  # the threshold is below all keys
        elif wanted <= 0:
            low = high - 1
        else:
            every = tl.maximum(row_bytes // SAMPLE, 1)
            sampled = tl.minimum(row_bytes, SAMPLE) * 8
            key, _ = _load_keys(
                row_ptr,
                static_row_ptr,
                tl.arange(0, SAMPLE) * every,
                row_bytes,
                columns,
                low,
                EVEN,
                STATIC,
            )
            rank = sampled.to(tl.float32) * wanted.to(tl.float32) / columns.to(tl.float32)
            # Three standard deviations, of neighbouring sums that come in pairs.
            margin = 3.0 * tl.sqrt(2.0 * rank) + 1.0
            start, stop = _bracket(
                key, (rank + margin).to(tl.int32), tl.maximum(rank - margin, 0.0).to(tl.int32)
            )
            stop += 1

        while high - low > 1:
            shift = tl.where(stop - start <= BINS, 0, 8)
            start = (start >> shift) << shift  # whole bins, at multiples of their width
            stop = ((stop + (1 << shift) - 1) >> shift) << shift
            bins_ptr = histogram_ptr - (start >> shift)
            tl.debug_barrier()
            tl.store(histogram_ptr + bins, tl.zeros([BINS], tl.int32))
            tl.debug_barrier()
            first_key = start << 16
            last_key = ((stop - 1) << 16) | 0xFFFF
            overs = tl.zeros([BYTES], tl.int32)
            for first in range(0, row_bytes, BYTES):
                byte = first + tl.arange(0, BYTES)
                key, _ = _load_keys(
                    row_ptr, static_row_ptr, byte, row_bytes, columns, start, EVEN, STATIC
                )
                overs += tl.sum(tl.where(key > last_key, 1, 0), axis=1)
                if EVEN:  # a thread has all columns of a byte: each of them in its turn, in place
                    for j in tl.static_range(8):
                        key_j = tl.sum(tl.where(bit == j, key, 0), axis=1)
                        _count_keys(bins_ptr, key_j, first_key, last_key, shift)
                else:
                    _count_keys(bins_ptr, key, first_key, last_key, shift)
            tl.debug_barrier()
            over = tl.sum(overs, axis=0)
            histogram = tl.load(histogram_ptr + bins, cache_modifier=".cg")
            inside = tl.sum(histogram, axis=0)
            if over >= wanted:
                low = stop
            elif over + inside < wanted:
                high = start
                above = over + inside
            else:
                below = tl.cumsum(histogram, axis=0) - histogram
                reached = over + inside - below  # keys in this bin or a higher one
                chosen = tl.sum(tl.where(reached >= wanted, 1, 0), axis=0) - 1
                above = over + inside - tl.sum(tl.where(bins <= chosen, histogram, 0), axis=0)
                low = start + (chosen << shift)
                high = low + (1 << shift)
            start = low
            stop = high

        # Keys above the threshold, and the first of those equal to it.
        first_key = low << 16
        last_key = first_key | 0xFFFF
        equal_wanted = wanted - above
        equal_found = 0
        magnitudes = tl.zeros([BYTES], tl.int32)
        for first in range(0, row_bytes, BYTES):
            byte = first + tl.arange(0, BYTES)
            key, magnitude = _load_keys(
                row_ptr, static_row_ptr, byte, row_bytes, columns, low, EVEN, STATIC
            )
            magnitudes = tl.maximum(magnitudes, tl.max(magnitude, axis=1))
            kept = tl.sum(tl.where(key > last_key, 1 << bit, 0), axis=1)
            if equal_found < equal_wanted:
                equal = tl.sum(tl.where(key >= first_key, 1 << bit, 0), axis=1) - kept
                counts = _popcount8(equal)
                count = tl.sum(counts, axis=0)
                if equal_found + count > equal_wanted:
                    rank = equal_found + tl.cumsum(counts, axis=0) - counts
                    for j in tl.static_range(8):
                        is_equal = (equal >> j) & 1
                        kept += tl.where(rank < equal_wanted, is_equal << j, 0)
                        rank += is_equal
                else:
                    kept += equal
                equal_found += count
            if STATIC:
                kept |= tl.load(static_row_ptr + byte, mask=byte < row_bytes, other=0).to(tl.int32)
            if not EVEN:
                kept = tl.where(byte == columns // 8, kept & ((1 << columns % 8) - 1), kept)
            tl.store(bits_ptr + byte, kept.to(tl.uint8), mask=byte < row_bytes)

        if tl.max(magnitudes, axis=0) > NAN_LIMIT:  # NaN: the sums of this row say nothing
            tl.debug_barrier()
            for first in range(0, row_bytes, BYTES):
                byte = first + tl.arange(0, BYTES)
                kept = tl.full([BYTES], 0xFF, tl.int32)
                if not EVEN:
                    kept = tl.where(byte == columns // 8, (1 << columns % 8) - 1, kept)
                tl.store(bits_ptr + byte, kept.to(tl.uint8), mask=byte < row_bytes)


@triton.jit
def _mix(state, part):
    """The 32-bit finalizer of MurmurHash3 on a state and the next part, as in the reference."""
    state = (state + 0x9E3779B9) ^ part.to(tl.uint32)
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    return state ^ (state >> 16)


@triton.jit(
    do_not_specialize=["heads", "groups", "columns", "row_bytes", "strata", "seed_state", "turns"]
)
def _draw_kernel(
    packed_ptr,
    heads,
    groups,
    columns,
    row_bytes,
    strata,
    seed_state,
    turns,
    WIDE: tl.constexpr,
    STRATA: tl.constexpr,
):
    """Sets one free column in each stratum of a row.

    The strata of one turn are so far apart that they share no byte; a barrier parts the turns.
    """
    row = tl.program_id(0)
    bits_ptr = packed_ptr + row.to(tl.int64) * row_bytes
    state = tl.zeros([1], tl.uint32) + seed_state.to(tl.uint32)
    state = _mix(state, row // (heads * groups))
    state = _mix(state, row // groups % heads)
    state = _mix(state, row % groups)
    for turn in range(0, turns):
        for first in range(0, tl.cdiv(strata - turn, turns), STRATA):
            stratum = turn + (first + tl.arange(0, STRATA)) * turns
            inside = stratum < strata
            stratum = tl.where(inside, stratum, 0)
            # floor(stratum * columns / strata), by parts that stay within 32 bits where they can
            whole, rest = columns // strata, columns % strata
            if WIDE:
                left = (stratum.to(tl.int64) * rest // strata).to(tl.int32)
                right = ((stratum + 1).to(tl.int64) * rest // strata).to(tl.int32)
            else:
                left = stratum * rest // strata
                right = (stratum + 1) * rest // strata
            left += stratum * whole
            right += (stratum + 1) * whole
            width = (right - left).to(tl.uint32)
            middle = left + (_mix(state, stratum) % width).to(tl.int32)

            # From the middle to the right, then from the left to the middle, in windows of 32
            # columns that start with the byte of the position.
            position = middle
            end = right
            again = inside
            drawn = tl.full([STRATA], -1, tl.int32)
            while tl.max(again.to(tl.int32), axis=0) > 0:
                byte = position // 8
                taken = tl.zeros([STRATA], tl.uint32)
                for j in tl.static_range(4):
                    part = tl.load(
                        bits_ptr + byte + j, mask=again & (byte + j < row_bytes), other=0xFF
                    )
                    taken |= part.to(tl.uint32) << (8 * j)
                skipped = (position - byte * 8).to(tl.uint32)
                past = tl.minimum(tl.maximum(byte * 8 + 32 - end, 0), 31).to(tl.uint32)
                free = ((~taken >> skipped) << skipped) << past >> past
                lowest = (free ^ (free & (free - 1))).to(tl.float32).to(tl.int32, bitcast=True)
                found = again & (free != 0)
                drawn = tl.where(found, byte * 8 + (lowest >> 23) - 127, drawn)
                position = byte * 8 + 32
                again = again & (free == 0)
                # Past the end: once more for the part before the middle, if there is one.
                ended = position >= end
                again = again & ((ended == 0) | ((end == right) & (left < middle)))
                wrapped = ended & again
                position = tl.where(wrapped, left, position)
                end = tl.where(wrapped, middle, end)
            kept = tl.load(bits_ptr + drawn // 8, mask=drawn >= 0, other=0)
            kept = kept | (1 << (drawn & 7)).to(tl.uint8)
            tl.store(bits_ptr + drawn // 8, kept, mask=drawn >= 0)
        tl.debug_barrier()


def column_selection(
    column_sums: torch.Tensor,
    *,
    keep_count: int,
    static_columns: torch.Tensor | None,
    random_count: int,
    seed: int,
) -> torch.Tensor:
    """See `chipsparse.kernels.column_selection.column_selection`; fp32 sums count by 16 bits."""
    batch, heads, groups, columns = column_sums.shape
    rows, row_bytes, device = batch * heads * groups, -(-columns // 8), column_sums.device
    packed = torch.empty(batch, heads, groups, row_bytes, dtype=torch.uint8, device=device)
    if packed.numel() == 0:
        return packed
    if static_columns is None:
        static, static_counts, static_strides = packed, packed, (0, 0, 0)  # never read
    else:
        static, static_counts, static_strides = _packed_static(static_columns)
    programs = min(rows, multiprocessors(device) * PROGRAMS_PER_MULTIPROCESSOR)
    histograms = torch.empty(programs, BINS, dtype=torch.int32, device=device)
    whole_bytes = columns % 8 == 0
    with torch.cuda.device_of(column_sums):
        _select_kernel[(programs,)](
            column_sums.contiguous(),
            static,
            static_counts,
            packed,
            histograms,
            rows,
            heads,
            groups,
            columns,
            row_bytes,
            min(keep_count, columns),
            *static_strides,
            NAN_LIMIT=_infinity_bits(column_sums.dtype),
            EVEN=whole_bytes,
            STATIC=static_columns is not None,
            BYTES=TILE_BYTES if whole_bytes else TILE_BYTES // 2,
            SAMPLE=SAMPLE_BYTES,
            BINS=BINS,
            num_warps=SELECT_WARPS,
            **(OCCUPANCY if whole_bytes and column_sums.dtype in HALF_PRECISION else {}),
        )
        strata = min(random_count, columns)
        if strata > 0:
            state = position_state(seed)
            _draw_kernel[(rows,)](
                packed,
                heads,
                groups,
                columns,
                row_bytes,
                strata,
                state - (1 << 32) if state >= 1 << 31 else state,
                turns=-(-BYTE_COLUMNS // (columns // strata)) + 1,
                WIDE=strata >= 1 << 15,
                STRATA=STRATA,
                num_warps=DRAW_WARPS,
            )
    return packed


def _packed_static(static: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int, int]]:
    """Bits and counts of the distinct rows of a broadcast mask, and the strides between rows."""
    distinct = static
    for dim in range(3):
        if static.stride(dim) == 0:
            distinct = distinct.narrow(dim, 0, 1)
    packed = pack_mask(distinct)
    batch, heads, groups, _ = packed.shape
    strides = (
        heads * groups if batch > 1 else 0,
        groups if heads > 1 else 0,
        1 if groups > 1 else 0,
    )
    return packed, packed_counts(packed, static.shape[-1]), strides


def _infinity_bits(dtype: torch.dtype) -> int:
    """The bits of +inf, the largest number that is not NaN, at the top of 32 bits."""
    return 0x7C000000 if dtype == torch.float16 else 0x7F800000

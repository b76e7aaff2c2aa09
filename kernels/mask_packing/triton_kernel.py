"""Bit packing and index lists in Triton.

The lists are compacted by a prefix sum over set bits, so every entry has one writer and the result
is the same on every run. Rows of bits are read as aligned 32-bit words wherever they start: the
word at either end of a row may hold bits of its neighbours, which are cut off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from chipsparse.kernels.launch import launch, launch_changing
from chipsparse.kernels.mask_packing import PackedToIndices, PackMask, UnpackMask
from chipsparse.kernels.triton_support import cdiv

if TYPE_CHECKING:
    from triton.runtime.jit import KernelInterface

PACK_BYTES = 512
PACK_WARPS = 4
COUNT_WORDS = 512
COUNT_WARPS = 4
# Through shared memory where the kernel's own PTX runs: on CUDA devices.
LIST_STAGED = True


@triton.jit
def _pack_kernel(mask_ptr, packed_ptr, row_bytes, columns, EVEN: tl.constexpr, BYTES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    bit = tl.arange(0, 8)
    column = byte[:, None] * 8 + bit[None, :]
    if EVEN:  # rows of whole bytes: a thread loads the 8 bools of a byte at once
        offset = row * row_bytes * 8 + column
        inside = (byte < row_bytes)[:, None]
    else:
        offset = row * columns + column
        inside = column < columns
    kept = tl.load(mask_ptr + offset, mask=inside, other=0) != 0
    packed = tl.sum(tl.where(kept, 1 << bit[None, :], 0), axis=1)
    tl.store(packed_ptr + row * row_bytes + byte, packed.to(tl.uint8), mask=byte < row_bytes)


@triton.jit
def _unpack_kernel(
    packed_ptr,
    mask_ptr,
    row_bytes,
    columns,
    EVEN: tl.constexpr,
    BYTES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    bit = tl.arange(0, 8)
    packed = tl.load(packed_ptr + row * row_bytes + byte, mask=byte < row_bytes, other=0)
    kept = (packed.to(tl.int32)[:, None] >> bit[None, :]) & 1
    column = byte[:, None] * 8 + bit[None, :]
    if EVEN:
        offset = row * row_bytes * 8 + column
        inside = (byte < row_bytes)[:, None]
    else:
        offset = row * columns + column
        inside = column < columns
    tl.store(mask_ptr + offset, kept.to(tl.uint8), mask=inside)


@triton.jit
def _load_words(packed_ptr, row, row_bytes, columns, word):
    """32-bit words of a row, and the columns of their lowest bits; bits of other rows are 0."""
    start = row.to(tl.int64) * row_bytes
    lead = (start & 3).to(tl.int32) * 8  # bits of the row before, in the first word
    column = word * 32 - lead
    words_ptr = packed_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + (start >> 2)
    bits = tl.load(words_ptr + word, mask=column < columns, other=0)
    before = tl.where(word == 0, lead, 0).to(tl.uint32)
    after = tl.minimum(tl.maximum(column + 32 - columns, 0), 31).to(tl.uint32)
    bits = (bits >> before) << before
    return (bits << after) >> after, column


@triton.jit
def _popcount(bits):
    """Set bits of 32-bit words; LLVM knows this pattern as one instruction."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["row_bytes"])
def _count_kernel(packed_ptr, counts_ptr, row_bytes, columns, WORDS: tl.constexpr):
    row = tl.program_id(0)
    counts = tl.zeros([WORDS], tl.int32)
    for first in range(0, row_bytes + 3, WORDS * 4):  # 3: bytes of the row before in the first word
        word = first // 4 + tl.arange(0, WORDS)
        bits, _ = _load_words(packed_ptr, row, row_bytes, columns, word)
        counts += _popcount(bits)
    tl.store(counts_ptr + row, tl.sum(counts, axis=0))


# A warp writes the entries of 128 words to shared memory (as 16 bits, counted from the first column
# of the tile) and stores them from there, 32 neighbours at a time: straight from the words, each
# store would reach 10 sectors. Triton has no scatter into shared memory. A lane takes the bits of
# its four words from the highest down. Operands: the end of the lane's entries, how many entries of
# the tile fit, where the lane stores its first one, the first column of the tile, the words.
_STORE_ENTRIES = tl.constexpr(
    """{
    .shared .align 4 .b16 entries[4096];
    .reg .pred p;
    .reg .b32 bits, at, end, bit, power, word, lane;
    .reg .b16 entry;
    .reg .b64 out;
    mov.u32 lane, %laneid;
    mov.b32 at, entries;
    shl.b32 end, $1, 1;
    add.u32 at, at, end;
    """
    + "".join(
        f"""
    shl.b32 word, lane, 7;
    add.u32 word, word, {32 * k};
    mov.b32 bits, ${5 + k};
    setp.eq.u32 p, bits, 0;
    @p bra SCATTERED{k};
    SCATTER{k}:
    bfind.u32 bit, bits;
    shl.b32 power, 1, bit;
    xor.b32 bits, bits, power;
    add.u32 bit, bit, word;
    sub.u32 at, at, 2;
    cvt.u16.u32 entry, bit;
    st.shared.b16 [at], entry;
    setp.ne.u32 p, bits, 0;
    @p bra SCATTER{k};
    SCATTERED{k}:
    """
        for k in (3, 2, 1, 0)
    )
    + """
    bar.warp.sync 0xffffffff;
    shl.b32 bit, lane, 1;
    mov.b32 at, entries;
    add.u32 at, at, bit;
    mov.b32 end, $2;
    mov.b64 out, $3;
    setp.ge.s32 p, lane, end;
    @p bra COPIED;
    COPY:
    ld.shared.b16 entry, [at];
    cvt.u32.u16 bit, entry;
    add.u32 bit, bit, $4;
    st.global.b32 [out], bit;
    add.u32 at, at, 64;
    add.u64 out, out, 128;
    add.s32 lane, lane, 32;
    setp.lt.s32 p, lane, end;
    @p bra COPY;
    COPIED:
    bar.warp.sync 0xffffffff;
    mov.b32 $0, 0;
    }""",
)


@triton.jit
def _store_scattered(list_ptr, bits, column, place, capacity):
    """Stores the columns of the set bits of some words, from ``place`` on, and moves it past."""
    for _ in range(tl.max(_popcount(bits), axis=0)):
        others = bits & (bits - 1)
        lowest = (bits ^ others).to(tl.float32).to(tl.int32, bitcast=True)
        index = column + (lowest >> 23) - 127  # the exponent of a power of two
        tl.store(list_ptr + place, index, mask=(bits != 0) & (place < capacity))
        place += tl.where(bits != 0, 1, 0)
        bits = others
    return place


@triton.jit(do_not_specialize=["row_bytes", "capacity"])
def _list_kernel(
    packed_ptr,
    indices_ptr,
    counts_ptr,
    row_bytes,
    columns,
    capacity,
    STAGED: tl.constexpr,
):
    row = tl.program_id(0)
    list_ptr = indices_ptr + row.to(tl.int64) * capacity
    lane = tl.arange(0, 32)
    listed = 0
    word = lane * 4
    next0, column = _load_words(packed_ptr, row, row_bytes, columns, word)
    next1, _ = _load_words(packed_ptr, row, row_bytes, columns, word + 1)
    next2, _ = _load_words(packed_ptr, row, row_bytes, columns, word + 2)
    next3, _ = _load_words(packed_ptr, row, row_bytes, columns, word + 3)
    first_column = tl.min(column, axis=0)
    for first in range(0, row_bytes + 3, 512):
        bits0 = next0
        bits1 = next1
        bits2 = next2
        bits3 = next3
        # One tile ahead, so that a warp does not wait for what it has just asked for.
        word = first // 4 + 128 + lane * 4
        next0, _ = _load_words(packed_ptr, row, row_bytes, columns, word)
        next1, _ = _load_words(packed_ptr, row, row_bytes, columns, word + 1)
        next2, _ = _load_words(packed_ptr, row, row_bytes, columns, word + 2)
        next3, _ = _load_words(packed_ptr, row, row_bytes, columns, word + 3)
        count = _popcount(bits0) + _popcount(bits1) + _popcount(bits2) + _popcount(bits3)
        upto = tl.cumsum(count, axis=0)
        total = tl.sum(count, axis=0)
        tile_column = first_column + first * 8
        if STAGED:
            tl.inline_asm_elementwise(
                _STORE_ENTRIES,
                "=r,r,r,l,r,r,r,r,r,~{memory}",
                [
                    upto,
                    tl.minimum(total, capacity - listed),
                    (list_ptr + listed + lane).to(tl.int64),
                    tile_column,
                    bits0,
                    bits1,
                    bits2,
                    bits3,
                ],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            column = tile_column + lane * 128
            place = listed + upto - count
            place = _store_scattered(list_ptr, bits0, column, place, capacity)
            place = _store_scattered(list_ptr, bits1, column + 32, place, capacity)
            place = _store_scattered(list_ptr, bits2, column + 64, place, capacity)
            _store_scattered(list_ptr, bits3, column + 96, place, capacity)
        listed += total
    listed = tl.minimum(listed, capacity)
    tl.store(counts_ptr + row, listed)
    for first in range(listed, capacity, 32):
        tl.store(list_ptr + first + lane, tl.zeros([32], tl.int32), mask=first + lane < capacity)


def pack_mask(call: PackMask) -> torch.Tensor:
    """Run a checked `PackMask`."""
    return packed_bits(call.mask)


def packed_bits(mask: torch.Tensor) -> torch.Tensor:
    """Bools ``[..., M]`` as uint8 ``[..., ceil(M / 8)]``."""
    columns = mask.shape[-1]
    packed = torch.empty(*mask.shape[:-1], cdiv(columns, 8), dtype=torch.uint8, device=mask.device)
    _convert(_pack_kernel, mask.contiguous().view(torch.uint8), packed, packed, columns)
    return packed


def unpack_mask(call: UnpackMask) -> torch.Tensor:
    """Run a checked `UnpackMask`."""
    packed = call.packed.contiguous()
    columns = call.columns
    mask = torch.empty(*packed.shape[:-1], columns, dtype=torch.bool, device=packed.device)
    _convert(_unpack_kernel, packed, mask.view(torch.uint8), packed, columns)
    return mask


def _convert(
    kernel: KernelInterface,
    source: torch.Tensor,
    result: torch.Tensor,
    packed: torch.Tensor,
    columns: int,
) -> None:
    """Launch a kernel for every row of packed bits, from the source to the result."""
    if result.numel():
        row_bytes = packed.shape[-1]
        launch_changing(
            kernel,
            (packed.shape[:-1].numel(), cdiv(row_bytes, PACK_BYTES)),
            source,
            result,
            row_bytes,
            columns,
            EVEN=columns % 8 == 0,
            BYTES=PACK_BYTES,
            num_warps=PACK_WARPS,
        )


def packed_counts(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Set columns of each row of packed bits: int32 ``[...]``, without waiting for the device."""
    shape = packed.shape[:-1]
    row_bytes = packed.shape[-1]
    packed = _word_aligned(packed)
    counts = torch.zeros(shape, dtype=torch.int32, device=packed.device)
    if packed.numel():
        launch_changing(
            _count_kernel,
            (shape.numel(),),
            packed,
            counts,
            row_bytes,
            columns,
            WORDS=COUNT_WORDS,
            num_warps=COUNT_WARPS,
        )
    return counts


def packed_to_indices(call: PackedToIndices) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a checked `PackedToIndices`."""
    columns = call.columns
    capacity = call.capacity
    shape = call.packed.shape[:-1]
    row_bytes = call.packed.shape[-1]
    packed = _word_aligned(call.packed)
    if capacity is None:
        capacity = int(packed_counts(packed, columns).max()) if shape.numel() else 0
    indices = torch.empty(*shape, capacity, dtype=torch.int32, device=packed.device)
    counts = torch.empty(shape, dtype=torch.int32, device=packed.device)
    if shape.numel():
        launch(
            _list_kernel,
            (shape.numel(),),
            packed,
            indices,
            counts,
            row_bytes,
            columns,
            capacity,
            STAGED=LIST_STAGED and packed.is_cuda and torch.version.hip is None,
            num_warps=1,  # sums and prefix sums are shuffles, and rows need no barrier
        )
    return indices, counts


def _word_aligned(packed: torch.Tensor) -> torch.Tensor:
    """Contiguous bits that start at a whole word.

    The last word may reach up to 3 bytes past the tensor: allocations are multiples of 16 bytes.
    """
    packed = packed.contiguous()
    return packed.clone() if packed.data_ptr() % 4 else packed

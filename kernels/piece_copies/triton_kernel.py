"""Pieces of tensors, copied by few programs: most multiprocessors go on with what runs beside."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from chipsparse.kernels.launch import launch
from chipsparse.kernels.piece_copies import MOST_TENSORS, CopyPieces
from chipsparse.kernels.triton_support import next_power_of_2

# More are no faster between two H200s with NVLink; each has so many bytes under way.
PROGRAMS = 24
WARPS = 16
TILE_BYTES = 32768
# Entries of a piece in the table: first token or head, their number, where the places of three
# tensors lie, and the strides of all of them.
ENTRIES = tl.constexpr(2 + MOST_TENSORS + 3)


@triton.jit
def _copy_kernel(
    first_ptr,
    second_ptr,
    third_ptr,
    near_ptr,
    table_ptr,
    batch,
    tokens,
    heads,
    first_stride_b,
    first_stride_n,
    first_stride_h,
    second_stride_b,
    second_stride_n,
    second_stride_h,
    third_stride_b,
    third_stride_n,
    third_stride_h,
    TENSORS: tl.constexpr,
    CUTS_HEADS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Tiles of rows ``[D]`` of one piece, of all tensors."""
    entry_ptr = table_ptr + tl.program_id(1) * ENTRIES
    start = tl.load(entry_ptr)
    count = tl.load(entry_ptr + 1).to(tl.int32)
    place_stride_b = tl.multiple_of(tl.load(entry_ptr + 5), ALIGNED)
    place_stride_n = tl.multiple_of(tl.load(entry_ptr + 6), ALIGNED)
    place_stride_h = tl.multiple_of(tl.load(entry_ptr + 7), ALIGNED)
    if CUTS_HEADS:
        piece_tokens = tokens
        piece_heads = count
    else:
        piece_tokens = count
        piece_heads = heads
    tiles = tl.cdiv(piece_tokens, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    for number in tl.static_range(TENSORS):
        if number == 0:
            tensor_ptr = first_ptr
            stride_b = first_stride_b
            stride_n = first_stride_n
            stride_h = first_stride_h
        elif number == 1:
            tensor_ptr = second_ptr
            stride_b = second_stride_b
            stride_n = second_stride_n
            stride_h = second_stride_h
        else:
            tensor_ptr = third_ptr
            stride_b = third_stride_b
            stride_n = third_stride_n
            stride_h = third_stride_h
        tensor_ptr += start * (stride_h if CUTS_HEADS else stride_n)
        # From a tensor whose alignment the compiler knows, or it would copy single numbers.
        place_ptr = near_ptr + tl.multiple_of(tl.load(entry_ptr + 2 + number), ALIGNED)
        for tile in range(tl.program_id(0), batch * piece_heads * tiles, tl.num_programs(0)):
            token = (tile % tiles * ROWS + tl.arange(0, ROWS))[:, None]
            sample = (tile // tiles // piece_heads).to(tl.int64)
            head = (tile // tiles % piece_heads).to(tl.int64)
            mask = token < piece_tokens
            if WIDTH < COLUMNS:
                mask = mask & (column < WIDTH)
            rows_ptr = tensor_ptr + sample * stride_b + head * stride_h
            rows = tl.load(rows_ptr + token.to(tl.int64) * stride_n + column, mask=mask)
            rows_ptr = place_ptr + sample * place_stride_b + head * place_stride_h
            tl.store(rows_ptr + token.to(tl.int64) * place_stride_n + column, rows, mask=mask)


def copy_pieces(call: CopyPieces) -> None:
    """Run a checked `CopyPieces`."""
    given = [
        (piece.start, len(piece), tuple(place.data_ptr() for place in places), places[0].stride())
        for piece, places in zip(call.pieces, call.places, strict=True)
        if piece and places[0].numel()
    ]
    if not given:
        return
    first = call.tensors[0]
    batch, tokens, heads, width = first.shape
    near = next(places[0] for piece, places in zip(call.pieces, call.places, strict=True) if piece)
    table, aligned = _table(tuple(given), near.data_ptr(), near.itemsize, near.device)
    columns = next_power_of_2(width)
    three = (*call.tensors, *([first] * (MOST_TENSORS - len(call.tensors))))
    launch(
        _copy_kernel,
        (max(1, PROGRAMS // len(given)), len(given)),
        *three,
        near,
        table,
        batch,
        tokens,
        heads,
        *(stride for tensor in three for stride in tensor.stride()[:3]),
        TENSORS=len(call.tensors),
        CUTS_HEADS=call.dim == 2,
        ALIGNED=aligned,
        WIDTH=width,
        ROWS=max(1, TILE_BYTES // near.itemsize // columns),
        COLUMNS=columns,
        num_warps=WARPS,
    )


@functools.lru_cache(maxsize=4096)
def _table(
    pieces: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...],
    near: int,
    itemsize: int,
    device: torch.device,
) -> tuple[torch.Tensor, int]:
    """The kernel's table, and by which number all offsets and strides can be divided."""
    entries = []
    numbers = []
    for start, count, places, strides in pieces:
        offsets = [(place - near) // itemsize for place in places]
        numbers += [*offsets, *strides[:3]]
        offsets += [0] * (MOST_TENSORS - len(offsets))
        entries.append([start, count, *offsets, *strides[:3]])
    aligned = 16 // itemsize
    while any(number % aligned for number in numbers):
        aligned //= 2
    # Sent without waiting for the stream, which may wait for other GPUs.
    pin = torch.cuda.is_available()
    table = torch.tensor(entries, dtype=torch.int64, device="cpu", pin_memory=pin)
    return table.to(device=device, non_blocking=True), aligned

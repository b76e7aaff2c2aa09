"""The pieces that processes exchange, copied in one pass; one kernel packs and unpacks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from chipsparse.kernels.launch import launch
from chipsparse.kernels.rank_pieces import MOST_TENSORS, PackPieces, UnpackPieces
from chipsparse.kernels.triton_support import cdiv, next_power_of_2

TILE_ELEMENTS = 4096
WARPS = 4


@triton.jit
def _copy_kernel(
    first_ptr,
    second_ptr,
    third_ptr,
    buffer_ptr,
    pieces_ptr,
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
    PACKS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of rows ``[D]`` of one tensor, between its place there and its rank's piece."""
    rank, number = tl.program_id(1), tl.program_id(2)
    start = tl.load(pieces_ptr + 3 * rank)
    count = tl.load(pieces_ptr + 3 * rank + 1)
    room = tl.load(pieces_ptr + 3 * rank + 2)  # before it in the buffer
    if CUTS_HEADS:
        piece_tokens, piece_heads = tokens, count
        first_token, first_head = 0, start
        per_count = tl.cast(batch, tl.int64) * tokens  # an int where it is 1
    else:
        piece_tokens, piece_heads = count, heads
        first_token, first_head = start, 0
        per_count = tl.cast(batch, tl.int64) * heads
    rows = per_count * count
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]

    wide_heads = tl.maximum(piece_heads, 1)  # a rank may have none
    wide_tokens = tl.maximum(piece_tokens, 1)
    head = row % wide_heads + first_head
    token = row // wide_heads % wide_tokens + first_token
    sample = row // wide_heads // wide_tokens
    tensor_ptr = first_ptr
    stride_b, stride_n, stride_h = first_stride_b, first_stride_n, first_stride_h
    if number == 1:
        tensor_ptr = second_ptr
        stride_b, stride_n, stride_h = second_stride_b, second_stride_n, second_stride_h
    if number == 2:
        tensor_ptr = third_ptr
        stride_b, stride_n, stride_h = third_stride_b, third_stride_n, third_stride_h
    place = sample * stride_b + token * stride_n + head * stride_h
    in_tensor = tensor_ptr + place[:, None] + column[None, :]
    piece = (per_count * room * TENSORS + number * rows + row) * WIDTH
    in_buffer = buffer_ptr + piece[:, None] + column[None, :]
    if PACKS:
        tl.store(in_buffer, tl.load(in_tensor, mask=mask), mask=mask)
    else:
        tl.store(in_tensor, tl.load(in_buffer, mask=mask), mask=mask)


def pack_pieces(call: PackPieces) -> torch.Tensor:
    """Run a checked `PackPieces`; tensors that lie so already are not copied."""
    first = call.tensors[0]
    if len(call.tensors) == 1 and first.shape[0] == 1 and call.dim == 1 and first.is_contiguous():
        starts = [0, *(piece.stop for piece in call.pieces)]
        if [piece.start for piece in call.pieces] == starts[:-1] and starts[-1] == first.shape[1]:
            return first.flatten()
    lengths = [len(piece) for piece in call.pieces]
    rest = first.numel() // max(1, first.shape[call.dim])
    buffer = first.new_empty(len(call.tensors) * rest * sum(lengths))
    _copy(call.tensors, buffer, call.pieces, lengths, call.dim, packs=True)
    return buffer


def unpack_pieces(call: UnpackPieces) -> None:
    """Run a checked `UnpackPieces`."""
    _copy(call.tensors, call.buffer, call.pieces, call.capacities(), call.dim, packs=False)


def _copy(
    tensors: tuple[torch.Tensor, ...],
    buffer: torch.Tensor,
    pieces: Sequence[range],
    capacities: Sequence[int],
    dim: int,
    *,
    packs: bool,
) -> None:
    if not buffer.numel():
        return
    batch, tokens, heads, width = tensors[0].shape
    columns = next_power_of_2(width)
    rows = max(1, TILE_ELEMENTS // columns)
    longest = batch * max(map(len, pieces)) * (tokens if dim == 2 else heads)
    three = (*tensors, *(tensors[:1] * (MOST_TENSORS - len(tensors))))
    before = itertools.accumulate(capacities[:-1], initial=0)
    places = tuple(
        (piece.start, len(piece), room) for piece, room in zip(pieces, before, strict=True)
    )
    launch(
        _copy_kernel,
        (cdiv(longest, rows), len(pieces), len(tensors)),
        *three,
        buffer,
        _table(places, buffer.device),
        batch,
        tokens,
        heads,
        *(stride for tensor in three for stride in tensor.stride()[:3]),
        TENSORS=len(tensors),
        CUTS_HEADS=dim == 2,
        PACKS=packs,
        WIDTH=width,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=WARPS,
    )


@functools.lru_cache(maxsize=256)
def _table(places: tuple[tuple[int, int, int], ...], device: torch.device) -> torch.Tensor:
    """Start, length and place in the buffer of each; kept, since the host waits to send it."""
    return torch.tensor(places, dtype=torch.int32, device=device)

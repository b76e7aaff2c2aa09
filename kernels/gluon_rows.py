"""The result of an attention kernel in memory: 64 rows of a head, 16 bytes of each a thread.

Products leave a thread two neighbouring channels of a row at a time, 4 bytes. Shuffles within four
threads make them eight, so that a load or store moves four times as much.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def row_layout(head_dim, turns):
    """Layout ``[64, head_dim]`` in which a thread has 2, 4 or 8 neighbouring channels.

    A product leaves 2. Each turn doubles that, by exchanging halves between pairs of threads.
    """
    registers = [[0, 1], [8, 0], *([0, 8 << bit] for bit in range(4) if 8 << bit < head_dim)]
    lanes = [[0, 2], [0, 4]]
    for turn in range(turns):
        exchanged = [0, 8 << turn]
        registers.remove(exchanged)
        registers.insert(1 + turn, lanes[turn])
        lanes[turn] = exchanged
    lanes += [[1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, head_dim])


@gluon.jit
def row_places(ptr, strides, b, h, row0, N, D: gl.constexpr):
    """Addresses of 64 rows of a head, ``[64, D]``, and a mask of the rows that exist."""
    layout: gl.constexpr = row_layout(D, 2)
    stride_b, stride_h, stride_n = strides
    row = row0 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    channels = gl.arange(0, D, gl.SliceLayout(0, layout))
    head = ptr + b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h
    return head + (row.to(gl.int64) * stride_n)[:, None] + channels[None, :], (row < N)[:, None]


@gluon.jit
def to_rows(product):
    """The result of a product, in the layout of `row_places`."""
    D: gl.constexpr = product.shape[1]
    return gl.convert_layout(gl.convert_layout(product, row_layout(D, 1)), row_layout(D, 2))


@gluon.jit
def from_rows(rows, layout: gl.constexpr):
    """Rows that were loaded from `row_places`, in the layout of a product."""
    D: gl.constexpr = rows.shape[1]
    return gl.convert_layout(gl.convert_layout(rows, row_layout(D, 1)), layout)

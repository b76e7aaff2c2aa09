"""What the Triton attention kernels share: row blocks of a group, and a product of two tiles."""

# Triton reads the annotations of a kernel in its own way.
# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

# What a block costs whatever its rows, in rows: gathering its keys and values. On an H200 a block
# of 64 rows takes 0.8 of the time of one of 128.
FIXED_COST_ROWS = 240


def row_block(group_rows: int, largest: int) -> int:
    """Rows of a program: the power of two with which a group takes least time."""
    sizes = [size for size in (16, 32, 64, 128) if size <= largest]
    return min(sizes, key=lambda size: triton.cdiv(group_rows, size) * (size + FIXED_COST_ROWS))


@triton.jit
def dot(a, b, sums, WIDE_PRODUCTS: tl.constexpr):
    """``a @ b + sums`` in fp32."""
    # Triton's interpreter multiplies the bits of bf16 numbers as if they were integers.
    if WIDE_PRODUCTS:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums)

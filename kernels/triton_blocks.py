"""What the Triton attention kernels share: row blocks of a group, and a product of two tiles."""

# Triton reads the annotations of a kernel in its own way.
# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl


def row_block(group_rows: int, largest: int) -> int:
    """Rows of a program: a power of two, of those that waste least of a group the largest."""
    sizes = [size for size in (16, 32, 64, 128, 256) if size <= largest]
    return min(sizes, key=lambda size: (triton.cdiv(group_rows, size) * size, -size))


@triton.jit
def dot(a, b, sums, WIDE_PRODUCTS: tl.constexpr):
    """``a @ b + sums`` in fp32."""
    # Triton's interpreter multiplies the bits of bf16 numbers as if they were integers.
    if WIDE_PRODUCTS:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums)

"""Rows of a program, order of programs and products of tiles, shared by the Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from chipsparse.kernels.triton_support import cdiv

# What a program costs whatever its rows, in rows: gathering its keys and values. On an H200 one
# with 64 rows takes 0.8 of the time of one with 128.
FIXED_COST_ROWS = 240


def rows_per_program(block_size: int, largest: int) -> int:
    """Rows of a program: the power of two with which a block takes least time."""
    sizes = [size for size in (16, 32, 64, 128) if size <= largest]
    return min(sizes, key=lambda size: cdiv(block_size, size) * (size + FIXED_COST_ROWS))


@triton.jit
def dot(a, b, sums, WIDE_PRODUCTS: tl.constexpr):
    """``a @ b + sums`` in fp32."""
    # Triton's interpreter multiplies the bits of bf16 numbers as if they were integers.
    if WIDE_PRODUCTS:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums)


@triton.jit
def to_fp8(x, INTERPRETED: tl.constexpr):
    """Numbers within ±448, and NaN, rounded to the nearest of e4m3."""
    if not INTERPRETED:
        return x.to(tl.float8e4nv)
    # Triton's interpreter truncates and forgets NaN: a sum that leaves 3 bits of mantissa rounds.
    exponent = x.to(tl.int32, bitcast=True) & 0x7F800000
    large = tl.maximum(exponent, 0x3C800000).to(tl.float32, bitcast=True) * (1.5 * 2.0**20)
    bits = ((x + large) - large).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(x == x, bits, 0x7F).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


# What `int8_dot` adds: sums over up to 128 channels are below 2 ** 21, and become the last digits
# of this number.
SCORE_OFFSET = tl.constexpr(1.5 * 2.0**23)
OFFSET_BITS = tl.constexpr(0x4B400000)


@triton.jit
def int8_dot(a, b):
    """``a @ b + SCORE_OFFSET`` of int8 numbers in fp32, without rounding."""
    return (tl.dot(a, b) + OFFSET_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _wide(x):
    """e4m3 in fp32, for the interpreter, which reads NaN as 480."""
    bits = x.to(tl.uint8, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), x.to(tl.float32))


@triton.jit
def fp8_dot(a, b, INTERPRETED: tl.constexpr):
    """``a @ b`` of e4m3 numbers in fp32."""
    if INTERPRETED:
        return tl.dot(_wide(a), _wide(b))
    return tl.dot(a, b)


@triton.jit
def fp8_bits(x):
    """Numbers within ±448 as bytes of e4m3, rounded to nearest even; on every GPU alike."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.abs(x)
    # Three digits behind the first one: what is rounded off carries into them, and they into the
    # exponent. Below 2^-6 digits stand for multiples of 2^-9, which a large sum rounds to.
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 15
    code = tl.where(size < 0.015625, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_fp8_bits(bits):
    """Bytes of finite e4m3 numbers in fp32; on every GPU alike.

    Moved instead of converted: GPUs before Ada cannot, and Triton's interpreter reads NaN as 480.
    """
    # As fp16, whose exponents are 8 higher and whose subnormal numbers have as many digits.
    wide = bits.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def to_fp8_bytes(x, CONVERTS: tl.constexpr):
    """Return the bits of e4m3 numbers, by the instruction of GPUs that have one."""
    if CONVERTS:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return fp8_bits(x)


@triton.jit
def from_fp8_bytes(bits, CONVERTS: tl.constexpr):
    """Return the numbers of e4m3 bits, by the instruction of GPUs that have one."""
    if CONVERTS:
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return from_fp8_bits(bits)


@triton.jit
def stored_token(place):
    """The token at a place of stored FP8 values: 8 u + 2 t + e of 16 at 4 t + 2 u + e."""
    return (place & ~15) + ((place & 2) << 2) + ((place & 12) >> 1) + (place & 1)


@triton.jit
def order(program, units, tiles, TOGETHER: tl.constexpr):
    """The unit and the tile of a program: tile by tile over TOGETHER units, then the next units.

    Their lists are sorted: with the same tile they gather nearly the same weights, from the cache.
    """
    first = program // (TOGETHER * tiles) * TOGETHER
    together = tl.minimum(units - first, TOGETHER)
    in_part = program % (TOGETHER * tiles)
    return first + in_part % together, in_part // together

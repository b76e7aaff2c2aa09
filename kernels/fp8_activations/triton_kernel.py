"""`fp8_activations` in Triton: one kernel finds the largest of each token, another one rounds.

Tokens have too many neurons for one program, and are too few for one program each to be fast, so
programs for some neurons each find a token's largest together, by atomic maxima of its bits.

Eight tokens move at once where they are contiguous, those that pad them included: sizes of which
the compiler does not know that eight divides them would make it move one by one, eight apart.
"""

# Triton reads the annotations of a kernel in its own way.
# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from chipsparse.kernels.fp8_activations import (
    GROWTH,
    SCALE_OF_ZEROS,
    SMALLEST_SCALE,
    Fp8ActivationRounding,
    Fp8Activations,
)
from chipsparse.kernels.fp8_quantization import FP8, LARGEST_FP8
from chipsparse.kernels.launch import launch
from chipsparse.kernels.token_layout import empty_token_contiguous, has_padding
from chipsparse.kernels.triton_blocks import to_fp8_bytes
from chipsparse.kernels.triton_support import cdiv, converts_fp8

UNITS = tl.constexpr(GROWTH / LARGEST_FP8)
LEAST = tl.constexpr(SMALLEST_SCALE)
OF_ZEROS = tl.constexpr(SCALE_OF_ZEROS)
INFINITY = tl.constexpr(float("inf"))
# Of a program: whole cache lines whichever of the two are contiguous, also of FP8.
TOKENS, NEURONS, WARPS = 128, 128, 8


def fp8_activations(call: Fp8ActivationRounding) -> Fp8Activations:
    """Run a checked `Fp8ActivationRounding`."""
    activation = call.activation
    batch, tokens, neurons = activation.shape
    data = empty_token_contiguous(activation, batch, tokens, neurons, dtype=FP8)
    scale = activation.new_empty(batch, tokens, 1, dtype=torch.float32)
    if not scale.numel():
        return Fp8Activations(data, scale)
    largest = activation.new_zeros(batch, tokens, dtype=torch.int32)
    grid = cdiv(tokens, TOKENS), cdiv(neurons, NEURONS), batch
    sizes = {
        "EIGHT_AT_ONCE": has_padding(activation),
        "TOKENS": TOKENS,
        "NEURONS": NEURONS,
        "num_warps": WARPS,
    }
    with torch.cuda.device_of(activation):
        of_input = activation, *activation.stride()
        launch(_largest_kernel, grid, *of_input, largest, tokens, neurons, **sizes)
        launch(
            _round_kernel,
            grid,
            *of_input,
            largest,
            data.view(torch.uint8),
            scale,
            data.stride(0),
            data.stride(2),
            tokens,
            neurons,
            CONVERTS=converts_fp8(activation.device),
            **sizes,
        )
    return Fp8Activations(data, scale)


@triton.jit
def _tile(
    activation_ptr,
    stride_b,
    stride_n,
    stride_f,
    tokens,
    neurons,
    EIGHT_AT_ONCE: tl.constexpr,
    TOKENS: tl.constexpr,
    NEURONS: tl.constexpr,
):
    """A program's batch, tokens, neurons, and their activations; zeros where there are none."""
    if EIGHT_AT_ONCE:
        stride_b = stride_b // 8 * 8
        stride_f = stride_f // 8 * 8
        tokens = (tokens + 7) // 8 * 8
    b = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    neuron = tl.program_id(1) * NEURONS + tl.arange(0, NEURONS)
    places = activation_ptr + b * stride_b + token.to(tl.int64)[:, None] * stride_n
    places += neuron.to(tl.int64)[None, :] * stride_f
    inside = (token < tokens)[:, None] & (neuron < neurons)[None, :]
    x = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    return b, token, neuron, x


@triton.jit(do_not_specialize=["tokens"])
def _largest_kernel(
    activation_ptr,  # [B, N, F]
    stride_b,
    stride_n,
    stride_f,
    largest_ptr,  # [B, N], contiguous, zeros: the bits of a number that is not negative
    tokens,
    neurons,
    EIGHT_AT_ONCE: tl.constexpr,
    TOKENS: tl.constexpr,
    NEURONS: tl.constexpr,
):
    b, token, _, x = _tile(
        activation_ptr,
        stride_b,
        stride_n,
        stride_f,
        tokens,
        neurons,
        EIGHT_AT_ONCE,
        TOKENS,
        NEURONS,
    )
    # A maximum may pass over NaN.
    size = tl.where(x == x, tl.abs(x), INFINITY)
    bits = tl.max(size, 1).to(tl.int32, bitcast=True)
    tl.atomic_max(largest_ptr + b * tokens + token, bits, mask=token < tokens, sem="relaxed")


@triton.jit(do_not_specialize=["data_stride_f", "tokens"])
def _round_kernel(
    activation_ptr,  # [B, N, F]
    stride_b,
    stride_n,
    stride_f,
    largest_ptr,  # [B, N], contiguous
    data_ptr,  # [B, N, F], tokens contiguous and padded; as bytes
    scale_ptr,  # [B, N], contiguous
    data_stride_b,
    data_stride_f,
    tokens,
    neurons,
    CONVERTS: tl.constexpr,
    EIGHT_AT_ONCE: tl.constexpr,
    TOKENS: tl.constexpr,
    NEURONS: tl.constexpr,
):
    b, token, neuron, x = _tile(
        activation_ptr,
        stride_b,
        stride_n,
        stride_f,
        tokens,
        neurons,
        EIGHT_AT_ONCE,
        TOKENS,
        NEURONS,
    )
    bits = tl.load(largest_ptr + b * tokens + token, mask=token < tokens, other=0)
    scale = tl.maximum(bits.to(tl.float32, bitcast=True) * UNITS, LEAST)
    scale = tl.where(bits == 0, OF_ZEROS, scale)
    finite = scale < INFINITY
    if tl.program_id(1) == 0:
        stored = tl.where(finite, scale, float("nan"))
        tl.store(scale_ptr + b * tokens + token, stored, mask=token < tokens)
    units = tl.div_rn(1.0, tl.where(finite, scale, 1.0))
    x = tl.where(finite[:, None], x, 0.0) * units[:, None]
    data_stride_f = data_stride_f // 8 * 8
    places = data_ptr + b * data_stride_b + token[:, None]
    places += neuron.to(tl.int64)[None, :] * data_stride_f
    padded = (tokens + 7) // 8 * 8
    tl.store(
        places,
        to_fp8_bytes(x, CONVERTS),
        mask=(token < padded)[:, None] & (neuron < neurons)[None, :],
    )

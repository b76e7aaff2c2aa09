"""`sparse_mlp_up` in plain Triton: every GPU from Ampere on, and Triton's interpreter.

One program computes a tile of listed neurons for a tile of rows of one block. The weight rows of
the tile are gathered straight from the layer's weight. In the cache the tokens of a neuron are
contiguous, so the tile meets it with neurons as its rows: the product is taken that way, or turned.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chipsparse.kernels.checks import block_count
from chipsparse.kernels.fp8_quantization import LARGEST_FP8 as LARGEST
from chipsparse.kernels.launch import launch, launch_changing
from chipsparse.kernels.sparse_mlp_up import DenseActivation, SparseMLPUp
from chipsparse.kernels.token_layout import aligned_rows, empty_token_contiguous, with_padding
from chipsparse.kernels.triton_blocks import (
    dot,
    from_fp8_bytes,
    order,
    rows_per_program,
    to_fp8_bytes,
)
from chipsparse.kernels.triton_support import cdiv, converts_fp8, has_large_shared_memory

LARGEST_FP8 = tl.constexpr(LARGEST)
INFINITY = tl.constexpr(float("inf"))

# Tokens and neurons of a program that only applies the activation function.
ACTIVATE_TOKENS = 512
ACTIVATE_NEURONS = 4
ACTIVATE_WARPS = 4


def _config(device: torch.device, *, gated: bool, in_fp8: bool) -> dict[str, int]:
    """Return the tiles for this device.

    BLOCK_M is the largest tile of token rows (smaller blocks take smaller ones), BLOCK_N of
    neurons, BLOCK_K of channels. TURNED products have tokens as their rows.
    """
    # A gate has a second tile of weights and sums, and to round to FP8 takes registers.
    config = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "TOGETHER": 32, "TURNED": False}
    if not has_large_shared_memory(device):
        return {**config, "BLOCK_N": 64 if gated else 128, "BLOCK_K": 32, "STAGES": 4}
    if not gated and not in_fp8:
        return {**config, "BLOCK_N": 256, "BLOCK_K": 64, "STAGES": 3, "TURNED": True}
    return {**config, "BLOCK_K": 64, "STAGES": 4}


def sparse_mlp_up(call: SparseMLPUp) -> torch.Tensor:
    """Run a checked `SparseMLPUp`."""
    hidden = call.hidden
    weight = call.weight
    bias = call.bias
    neuron_indices = call.neuron_indices
    gate_weight = call.gate_weight
    gate_bias = call.gate_bias
    block_size = call.block_size
    batch, rows, channels = hidden.shape
    capacity = neuron_indices.shape[2]
    delta = empty_token_contiguous(hidden, batch, rows, capacity)
    if delta.numel() == 0:
        return delta
    gated = gate_weight is not None
    in_fp8 = call.cache_scale is not None
    options = _config(hidden.device, gated=gated, in_fp8=in_fp8)
    tile_rows = rows_per_program(block_size, options.pop("BLOCK_M"))
    blocks = block_count(rows, block_size)
    row_tiles = cdiv(block_size, tile_rows)
    tiles = cdiv(capacity, options["BLOCK_N"])
    cache = with_padding(call.activation_cache)
    sizes = (rows, channels, capacity, blocks, block_size, row_tiles)
    # The kernel never reads the tensors that are not there.
    gate_weight = weight if gate_weight is None else gate_weight
    launch(
        _sparse_mlp_up_kernel,
        (blocks * row_tiles * tiles, batch),
        hidden,
        weight,
        gate_weight,
        weight if bias is None else bias.contiguous(),
        weight if gate_bias is None else gate_bias.contiguous(),
        neuron_indices,
        cache.view(torch.uint8) if in_fp8 else cache,
        hidden if call.cache_scale is None else call.cache_scale.contiguous(),
        delta,
        *hidden.stride()[:2],
        weight.stride(0),
        gate_weight.stride(0),
        *neuron_indices.stride(),
        cache.stride(0),
        cache.stride(2),
        delta.stride(0),
        delta.stride(2),
        *sizes,
        ACTIVATION=call.activation,
        GATED=gated,
        BIAS=bias is not None,
        GATE_BIAS=gate_bias is not None,
        IN_FP8=in_fp8,
        CONVERTS=in_fp8 and converts_fp8(hidden.device),
        EVEN_CHANNELS=channels % options["BLOCK_K"] == 0,
        WIDE_PRODUCTS=hidden.device.type == "cpu",
        BLOCK_M=tile_rows,
        **options,
    )
    if cache is not call.activation_cache:
        call.activation_cache.copy_(cache)
    return delta


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """`reference.activate` for fp32."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # tanh by way of the logistic function: (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y))
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-inner))


@triton.jit
def _product(weight, hidden, sums, TURNED: tl.constexpr, WIDE_PRODUCTS: tl.constexpr):
    """Adds ``weight @ hidden.T``, or its transpose."""
    if TURNED:
        return dot(hidden, weight.T, sums, WIDE_PRODUCTS)
    else:
        return dot(weight, hidden.T, sums, WIDE_PRODUCTS)


# What does not decide about alignment stays unspecialized: one compiled kernel serves many shapes.
@triton.jit(do_not_specialize=["rows", "channels", "capacity", "blocks", "row_tiles"])
def _sparse_mlp_up_kernel(
    hidden_ptr,  # [B, N, C]
    weight_ptr,  # [F, C], as the gate's
    gate_ptr,
    bias_ptr,  # [F], as the gate's
    gate_bias_ptr,
    indices_ptr,  # [B, G, K]
    cache_ptr,  # [B, N, F], tokens contiguous and padded; e4m3 as bytes
    cache_scale_ptr,  # [B, N], contiguous
    delta_ptr,  # [B, N, K], likewise
    hidden_stride_b,
    hidden_stride_n,
    weight_stride_f,
    gate_stride_f,
    indices_stride_b,
    indices_stride_g,
    indices_stride_k,
    cache_stride_b,
    cache_stride_f,
    delta_stride_b,
    delta_stride_k,
    rows,
    channels,
    capacity,
    blocks,
    block_size,
    row_tiles,  # per block
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    GATE_BIAS: tl.constexpr,
    IN_FP8: tl.constexpr,
    CONVERTS: tl.constexpr,
    EVEN_CHANNELS: tl.constexpr,
    WIDE_PRODUCTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    TOGETHER: tl.constexpr,
    TURNED: tl.constexpr,
):
    # Neuron tile by neuron tile, and in each of them row tile by row tile.
    tiles = tl.cdiv(capacity, BLOCK_N)
    unit, tile = order(tl.program_id(0), blocks * row_tiles, tiles, TOGETHER)
    block = unit // row_tiles
    row_tile = unit % row_tiles
    b = tl.program_id(1).to(tl.int64)
    # Tells Triton what is checked: rows of channels and of tokens start at whole 16 bytes.
    channels = channels // 8 * 8
    cache_stride_b = cache_stride_b // 8 * 8
    cache_stride_f = cache_stride_f // 8 * 8
    delta_stride_b = delta_stride_b // 8 * 8
    delta_stride_k = delta_stride_k // 8 * 8

    in_block = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = block * block_size + in_block
    # Eight tokens are there or not together: those that pad the last ones are stored like them.
    row_exists = (in_block < block_size) & (row < tl.cdiv(rows, 8) * 8)
    entry = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    listed = entry < capacity
    indices_ptr += b * indices_stride_b + block.to(tl.int64) * indices_stride_g
    neuron = tl.load(indices_ptr + entry * indices_stride_k, mask=listed, other=0).to(tl.int64)

    # Rows past the end read the last one: what comes of them is not stored.
    k = tl.arange(0, BLOCK_K)
    hidden_row = tl.minimum(row, rows - 1).to(tl.int64)
    hidden_ptrs = hidden_ptr + b * hidden_stride_b + hidden_row[:, None] * hidden_stride_n
    hidden_ptrs += k[None, :]
    weight_ptrs = weight_ptr + neuron[:, None] * weight_stride_f + k[None, :]
    gate_ptrs = gate_ptr + neuron[:, None] * gate_stride_f + k[None, :]
    if TURNED:
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    gate = up
    # At least once: where sums may skip the loop, ptxas makes matrix products wait for each other.
    for first in tl.range(0, tl.maximum(channels, BLOCK_K), BLOCK_K, num_stages=STAGES):
        if EVEN_CHANNELS:
            hidden = tl.load(hidden_ptrs)
            weight = tl.load(weight_ptrs)
        else:
            there = (first + k < channels)[None, :]
            hidden = tl.load(hidden_ptrs, mask=there, other=0.0)
            weight = tl.load(weight_ptrs, mask=there, other=0.0)
        up = _product(weight, hidden, up, TURNED, WIDE_PRODUCTS)
        if GATED:
            if EVEN_CHANNELS:
                weight = tl.load(gate_ptrs)
            else:
                weight = tl.load(gate_ptrs, mask=(first + k < channels)[None, :], other=0.0)
            gate = _product(weight, hidden, gate, TURNED, WIDE_PRODUCTS)
            gate_ptrs += BLOCK_K
        hidden_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K

    if TURNED:
        up = up.T
        gate = gate.T
    if BIAS:
        up += tl.load(bias_ptr + neuron).to(tl.float32)[:, None]
    if GATED:
        if GATE_BIAS:
            gate += tl.load(gate_bias_ptr + neuron).to(tl.float32)[:, None]
        new = activate(gate, ACTIVATION) * up
    else:
        new = activate(up, ACTIVATION)
    delta_ptrs = delta_ptr + b * delta_stride_b + entry[:, None].to(tl.int64) * delta_stride_k
    delta_ptrs += row[None, :]
    inside = listed[:, None] & row_exists[None, :]
    cache_ptrs = cache_ptr + b * cache_stride_b + neuron[:, None] * cache_stride_f + row[None, :]
    old = tl.load(cache_ptrs, mask=inside, other=0)
    if IN_FP8:
        scale = tl.load(cache_scale_ptr + b * rows + row, mask=row < rows, other=1.0)[None, :]
        units = new * tl.div_rn(1.0, scale)
        units = tl.where(units > LARGEST_FP8, LARGEST_FP8, units)
        units = tl.where(units < -LARGEST_FP8, -LARGEST_FP8, units)
        stored = to_fp8_bytes(tl.where(units == units, units, 0.0), CONVERTS)
        change = (from_fp8_bytes(stored, CONVERTS) - from_fp8_bytes(old, CONVERTS)) * scale
        change = tl.where(tl.abs(new) < INFINITY, change, new)
    else:
        stored = new.to(cache_ptr.dtype.element_ty)
        change = stored.to(tl.float32) - old.to(tl.float32)
    tl.debug_barrier()  # no thread overwrites what another one has yet to read
    tl.store(cache_ptrs, stored, mask=inside)
    # Nothing else is stored; but the kernel takes 30 registers less by it.
    change = tl.where(listed[:, None], change, 0.0)
    tl.store(delta_ptrs, change.to(delta_ptr.dtype.element_ty), mask=inside)


@torch.no_grad()
def dense_activation(call: DenseActivation) -> torch.Tensor:
    """Run a checked `DenseActivation`: library products, then one kernel in place."""
    hidden = call.hidden
    weight = call.weight
    bias = call.bias
    gate_weight = call.gate_weight
    gate_bias = call.gate_bias
    batch = hidden.shape[0]
    neurons = weight.shape[0]
    up = _products(hidden, weight)
    if up.numel() == 0:
        return up
    gate = up if gate_weight is None else _products(hidden, gate_weight)
    grid = (cdiv(up.stride(2), ACTIVATE_TOKENS), cdiv(neurons, ACTIVATE_NEURONS), batch)
    launch_changing(
        _activate_kernel,
        grid,
        up,
        gate,
        weight if bias is None else bias.contiguous(),
        weight if gate_bias is None else gate_bias.contiguous(),
        up.stride(0),
        up.stride(2),
        neurons,
        ACTIVATION=call.activation,
        GATED=gate_weight is not None,
        BIAS=bias is not None,
        GATE_BIAS=gate_bias is not None,
        TOKENS=ACTIVATE_TOKENS,
        NEURONS=ACTIVATE_NEURONS,
        num_warps=ACTIVATE_WARPS,
    )
    return up


def _products(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``hidden @ weight.T`` ``[B, N, F]`` with contiguous tokens."""
    batch, rows, _ = hidden.shape
    result = empty_token_contiguous(hidden, batch, rows, weight.shape[0])
    aligned = aligned_rows(rows)
    for b in range(batch):
        torch.mm(weight, hidden[b, :aligned].t(), out=result[b, :aligned].t())
    if aligned < rows:
        result[:, aligned:] = hidden[:, aligned:] @ weight.t()
    return result


@triton.jit(do_not_specialize=["stride_f", "neurons"])
def _activate_kernel(
    up_ptr,  # [B, F, N'], contiguous, as the gate's
    gate_ptr,
    bias_ptr,
    gate_bias_ptr,
    stride_b,
    stride_f,  # N', a multiple of 8; what pads the tokens is activated as well
    neurons,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    GATE_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    NEURONS: tl.constexpr,
):
    """Bias, activation function and gate, in place of ``up``."""
    stride_f = stride_f // 8 * 8
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    neuron = tl.program_id(1) * NEURONS + tl.arange(0, NEURONS)
    mask = (neuron < neurons)[:, None] & (token < stride_f)[None, :]
    offsets = tl.program_id(2).to(tl.int64) * stride_b
    offsets += neuron[:, None].to(tl.int64) * stride_f + token[None, :]
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        up += tl.load(bias_ptr + neuron, mask=neuron < neurons, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if GATE_BIAS:
            bias = tl.load(gate_bias_ptr + neuron, mask=neuron < neurons, other=0.0)
            gate += bias.to(tl.float32)[:, None]
        up = activate(gate, ACTIVATION) * up
    else:
        up = activate(up, ACTIVATION)
    tl.store(up_ptr + offsets, up.to(up_ptr.dtype.element_ty), mask=mask)

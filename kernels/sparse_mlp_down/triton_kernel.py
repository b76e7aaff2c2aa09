"""`sparse_mlp_down` in plain Triton: every GPU from Ampere on, and Triton's interpreter.

One program computes a tile of rows of one block for a tile of channels. Changes are read neuron by
neuron, and the weights of the listed neurons gathered, as rows of contiguous channels. What the
cache holds is read once, after the products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chipsparse.kernels.checks import block_count
from chipsparse.kernels.launch import launch
from chipsparse.kernels.sparse_mlp_down import SparseMLPDown
from chipsparse.kernels.token_layout import with_padding
from chipsparse.kernels.triton_blocks import dot, order, rows_per_program
from chipsparse.kernels.triton_support import cdiv, has_large_shared_memory

# BLOCK_M is the largest tile of token rows (smaller blocks take smaller ones), BLOCK_N of
# channels, BLOCK_K of neurons.
SHARED: dict[str, int] = {"BLOCK_M": 128, "num_warps": 8, "TOGETHER": 32}
LARGE_CONFIG = {**SHARED, "BLOCK_N": 256, "BLOCK_K": 64, "STAGES": 3}
SMALL_CONFIG = {**SHARED, "BLOCK_N": 128, "BLOCK_K": 32, "STAGES": 4}


def sparse_mlp_down(call: SparseMLPDown) -> torch.Tensor:
    """Run a checked `SparseMLPDown`."""
    delta = call.delta
    weight = call.weight
    neuron_indices = call.neuron_indices
    output_cache = call.output_cache
    addend = call.addend
    block_size = call.block_size
    batch, rows, capacity = delta.shape
    channels = weight.shape[0]
    result = torch.empty(batch, rows, channels, dtype=delta.dtype, device=delta.device)
    if result.numel() == 0:
        return result
    delta = with_padding(delta)
    options = dict(LARGE_CONFIG if has_large_shared_memory(delta.device) else SMALL_CONFIG)
    tile_rows = rows_per_program(block_size, options.pop("BLOCK_M"))
    blocks = block_count(rows, block_size)
    row_tiles = cdiv(block_size, tile_rows)
    tiles = cdiv(channels, options["BLOCK_N"])
    sizes = (rows, channels, capacity, blocks, block_size, row_tiles)
    # The kernel never reads the tensors that are not there.
    added = result if addend is None else addend
    launch(
        _sparse_mlp_down_kernel,
        (blocks * row_tiles * tiles, batch),
        delta,
        weight,
        neuron_indices,
        output_cache,
        added,
        result,
        delta.stride(0),
        delta.stride(2),
        weight.stride(1),
        *neuron_indices.stride(),
        *output_cache.stride(),
        *added.stride(),
        *sizes,
        ADDEND=addend is not None,
        EVEN_CHANNELS=channels % options["BLOCK_N"] == 0,
        EVEN_NEURONS=capacity > 0 and capacity % options["BLOCK_K"] == 0,
        WIDE_OFFSETS=weight.shape[1] * weight.stride(1) >= 2**31,
        WIDE_PRODUCTS=delta.device.type == "cpu",
        BLOCK_M=tile_rows,
        **options,
    )
    return result


# What does not decide about alignment stays unspecialized: one compiled kernel serves many shapes.
@triton.jit(do_not_specialize=["rows", "channels", "capacity", "blocks", "row_tiles"])
def _sparse_mlp_down_kernel(
    delta_ptr,  # [B, N, K], tokens contiguous and padded
    weight_ptr,  # [C, F], channels contiguous
    indices_ptr,  # [B, G, K]
    cache_ptr,  # [B, N, C]
    addend_ptr,  # [B, N, C]
    result_ptr,  # [B, N, C], contiguous
    delta_stride_b,
    delta_stride_k,
    weight_stride_f,
    indices_stride_b,
    indices_stride_g,
    indices_stride_k,
    cache_stride_b,
    cache_stride_n,
    cache_stride_c,
    addend_stride_b,
    addend_stride_n,
    addend_stride_c,
    rows,
    channels,
    capacity,
    blocks,
    block_size,
    row_tiles,  # per block
    ADDEND: tl.constexpr,
    EVEN_CHANNELS: tl.constexpr,
    EVEN_NEURONS: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
    WIDE_PRODUCTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    # Channel tile by channel tile, and in each of them row tile by row tile.
    tiles = tl.cdiv(channels, BLOCK_N)
    unit, tile = order(tl.program_id(0), blocks * row_tiles, tiles, TOGETHER)
    block = unit // row_tiles
    row_tile = unit % row_tiles
    b = tl.program_id(1).to(tl.int64)
    # Tells Triton what is checked: rows of channels and of tokens start at whole 16 bytes.
    channels = channels // 8 * 8
    delta_stride_b = delta_stride_b // 8 * 8
    delta_stride_k = delta_stride_k // 8 * 8

    indices_ptr += b * indices_stride_b + block.to(tl.int64) * indices_stride_g
    in_block = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = block * block_size + in_block
    of_block = in_block < block_size
    row_exists = of_block & (row < rows)
    # Eight tokens are read or not together; sums of those that pad the last ones are not stored.
    row_in_delta = of_block & (row < tl.cdiv(rows, 8) * 8)
    channel = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    entry = tl.arange(0, BLOCK_K)

    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    delta_ptrs = delta_ptr + b * delta_stride_b
    delta_ptrs += entry[:, None].to(tl.int64) * delta_stride_k + row[None, :]
    # The neurons of a tile are read one iteration early, so that the gather of their weights waits
    # for no other load. At least one iteration, of zeros if need be: where sums may skip the loop,
    # ptxas makes matrix products wait for each other.
    next_neurons = tl.load(indices_ptr + entry * indices_stride_k, mask=entry < capacity, other=0)
    for first in tl.range(0, tl.maximum(capacity, BLOCK_K), BLOCK_K, num_stages=STAGES):
        neurons = next_neurons
        following = first + BLOCK_K + entry
        next_neurons = tl.load(
            indices_ptr + following * indices_stride_k,
            mask=following < capacity,
            other=0,
        )
        if WIDE_OFFSETS:
            neurons = neurons.to(tl.int64)
        weight_ptrs = weight_ptr + (neurons[:, None] * weight_stride_f + channel[None, :])
        if EVEN_NEURONS:
            delta = tl.load(delta_ptrs, mask=row_in_delta[None, :], other=0.0)
            if EVEN_CHANNELS:
                weight = tl.load(weight_ptrs)
            else:
                weight = tl.load(weight_ptrs, mask=(channel < channels)[None, :], other=0.0)
        else:
            listed = (first + entry < capacity)[:, None]
            delta = tl.load(delta_ptrs, mask=listed & row_in_delta[None, :], other=0.0)
            if EVEN_CHANNELS:
                weight = tl.load(weight_ptrs, mask=listed, other=0.0)
            else:
                inside = listed & (channel < channels)[None, :]
                weight = tl.load(weight_ptrs, mask=inside, other=0.0)
        sums = dot(delta.T, weight, sums, WIDE_PRODUCTS)
        delta_ptrs += BLOCK_K * delta_stride_k

    mask = row_exists[:, None] & (channel < channels)[None, :]
    cache_ptrs = cache_ptr + b * cache_stride_b + row[:, None].to(tl.int64) * cache_stride_n
    cache_ptrs += channel[None, :].to(tl.int64) * cache_stride_c
    sums += tl.load(cache_ptrs, mask=mask, other=0.0).to(tl.float32)
    stored = sums.to(cache_ptr.dtype.element_ty)
    tl.debug_barrier()  # no thread overwrites what another one has yet to read
    tl.store(cache_ptrs, stored, mask=mask)
    result = stored.to(tl.float32)
    if ADDEND:
        addend_ptrs = addend_ptr + b * addend_stride_b
        addend_ptrs += row[:, None].to(tl.int64) * addend_stride_n
        addend_ptrs += channel[None, :].to(tl.int64) * addend_stride_c
        result += tl.load(addend_ptrs, mask=mask, other=0.0).to(tl.float32)
    result_ptrs = result_ptr + (b * rows + row[:, None]) * channels + channel[None, :]
    tl.store(result_ptrs, result.to(result_ptr.dtype.element_ty), mask=mask)

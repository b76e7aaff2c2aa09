"""`neuron_selection` in Triton, by three launches: block means, a thin product, an exact top-k.

The means are split into two numbers of hidden's dtype, whose sum has twice its bits, so that matrix
units compute the mean pre-activations; both meet the same tile of weights, which is read once. The
top-k has all scores of a block in the registers of a program and counts them at thresholds until
one parts the highest from the others; scores compare as their bits do, since none is negative. With
few blocks several programs search the same threshold, and each lists its own part of the neurons.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from chipsparse.kernels.calls import FirstLayerCall
from chipsparse.kernels.checks import block_count
from chipsparse.kernels.launch import Launch
from chipsparse.kernels.neuron_selection import MeanPreactivations, NeuronSelection
from chipsparse.kernels.sparse_mlp_up.triton_kernel import activate
from chipsparse.kernels.triton_blocks import dot
from chipsparse.kernels.triton_support import (
    cdiv,
    has_large_shared_memory,
    multiprocessors,
    next_power_of_2,
)

# Blocks that one launch makes means of, the most of a grid's second axis. On the first axis, whose
# neighbours share a block's rows, they would take 2 % longer (H200).
MOST_BLOCKS = 65535

# Scores of one program, and its warps, smallest first.
TOP_WARPS = ((2048, 4), (16384, 8), (65536, 32))
# Neurons that a program lists where one program per block would leave multiprocessors idle.
TOP_PART = 4096

NAN = tl.constexpr(0x7FC00000)  # the bits of every score that is not a number: the highest


def _product_config(device: torch.device, blocks: int, *, gated: bool) -> dict[str, int]:
    """Return the tiles of the thin product for so many blocks of all batches.

    A tile has BLOCK_F neurons, up to BLOCK_M blocks and BLOCK_K channels. Those of 128 neurons need
    the shared memory of a data-center GPU.
    """
    config = {"BLOCK_F": 64, "BLOCK_K": 64, "num_warps": 4}
    if blocks <= 32:
        config |= {"BLOCK_M": 32, "STAGES": 4}
    elif gated or not has_large_shared_memory(device):
        config |= {"BLOCK_M": 64, "STAGES": 3}
    elif blocks <= 64:
        config |= {"BLOCK_F": 128, "BLOCK_M": 64, "STAGES": 4}
    else:
        config |= {"BLOCK_F": 128, "BLOCK_M": 128, "num_warps": 8, "STAGES": 4}
    return {**config, "BLOCK_M": min(config["BLOCK_M"], max(16, next_power_of_2(blocks)))}


def mean_preactivations(call: MeanPreactivations) -> torch.Tensor:
    """Run a checked `MeanPreactivations`."""
    means, _ = thin_product(mean_tokens(call), call, None)
    return means


def neuron_selection(call: NeuronSelection) -> torch.Tensor:
    """Run a checked `NeuronSelection`."""
    mean_cache = call.mean_cache
    batch, blocks, neurons = mean_cache.shape
    keep = min(call.keep_count, neurons)
    indices = torch.empty(batch, blocks, keep, dtype=torch.int32, device=mean_cache.device)
    if indices.numel() == 0:
        return indices
    means, scores = thin_product(mean_tokens(call), call, mean_cache)
    launch = call.known().get("top")
    if launch is None:
        padded = max(16, next_power_of_2(neurons))
        # A program lists as few neurons as the device has multiprocessors for, `TOP_PART` or more.
        part = min(padded, TOP_PART)
        programs = batch * blocks * cdiv(neurons, part)
        if mean_cache.is_cuda and programs > multiprocessors(mean_cache.device):
            part = padded
        sizes = (blocks, neurons, keep)
        launch = call.known()["top"] = Launch(
            _top_kernel,
            (blocks, cdiv(neurons, part), batch),
            *mean_cache.stride(),
            *sizes,
            BLOCK=padded,
            PART=part,
            num_warps=next(warps for most, warps in TOP_WARPS if padded <= most),
        )
    launch(scores, means, mean_cache, indices)
    return indices


def mean_tokens(call: FirstLayerCall[Any]) -> torch.Tensor:
    """Mean token of each block, as two numbers whose sum it is: ``[2, B, G, C]``, contiguous."""
    hidden = call.hidden
    block_size = call.block_size
    batch, rows, channels = hidden.shape
    blocks = block_count(rows, block_size)
    parts = torch.empty(2, batch, blocks, channels, dtype=hidden.dtype, device=hidden.device)
    if parts.numel() == 0:
        return parts
    for first in range(0, blocks, MOST_BLOCKS):
        part = first, min(MOST_BLOCKS, blocks - first)
        launch = call.known().get(part)
        if launch is None:
            # CHANNELS channels of up to ROWS tokens at a time.
            channels_at_once, most_rows = (512, 16) if channels >= 512 else (64, 64)
            sizes = (rows, channels, first, blocks, block_size)
            launch = call.known()[part] = Launch(
                _means_kernel,
                (cdiv(channels, channels_at_once), part[1], batch),
                *hidden.stride()[:2],
                *sizes,
                CHANNELS=channels_at_once,
                ROWS=min(most_rows, next_power_of_2(block_size)),
                num_warps=4,
            )
        launch(hidden, parts)
    return parts


def thin_product(
    parts: torch.Tensor,
    call: FirstLayerCall[Any],
    mean_cache: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The first layer on `mean_tokens`, and how far it is from a ``mean_cache`` if there is one.

    Returns the means and their absolute differences, float32 ``[B, G, F]``.
    """
    _, batch, blocks, channels = parts.shape
    weight = call.weight
    gate_bias = call.gate_bias
    neurons = weight.shape[0]
    means = torch.empty(batch, blocks, neurons, dtype=torch.float32, device=parts.device)
    scores = None if mean_cache is None else torch.empty_like(means)
    if means.numel() == 0:
        return means, scores
    cache = means if mean_cache is None else mean_cache
    gated = call.gate_weight is not None
    # Never read where there is none.
    gate_weight = weight if call.gate_weight is None else call.gate_weight
    launch = call.known().get("product")
    if launch is None:
        all_blocks = batch * blocks
        options = _product_config(parts.device, all_blocks, gated=gated)
        sizes = (blocks, all_blocks, neurons, channels)
        launch = call.known()["product"] = Launch(
            _product_kernel,
            (cdiv(all_blocks, options["BLOCK_M"]), cdiv(neurons, options["BLOCK_F"])),
            weight.stride(0),
            gate_weight.stride(0),
            *cache.stride(),
            *sizes,
            ACTIVATION=call.activation or "none",
            GATED=gated,
            BIAS=call.bias is not None,
            GATE_BIAS=gate_bias is not None,
            SCORES=scores is not None,
            EVEN_CHANNELS=channels % options["BLOCK_K"] == 0,
            WIDE_PRODUCTS=parts.device.type == "cpu",
            **options,
        )
    launch(
        parts,
        weight,
        gate_weight,
        weight if call.bias is None else call.bias.contiguous(),
        weight if gate_bias is None else gate_bias.contiguous(),
        cache,
        means,
        means if scores is None else scores,
    )
    return means, scores


@triton.jit(do_not_specialize=["rows", "channels", "first_block", "blocks", "block_size"])
def _means_kernel(
    hidden_ptr,  # [B, N, C]
    parts_ptr,  # [2, B * G, C], contiguous
    hidden_stride_b,
    hidden_stride_n,
    rows,
    channels,
    first_block,
    blocks,
    block_size,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Means of a block in fp32, as the sum of two numbers of hidden's dtype."""
    block = first_block + tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    channels = channels // 8 * 8  # tells Triton what is checked: rows have whole 16 bytes
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.arange(0, ROWS)
    count = tl.minimum(block_size, rows - block * block_size)
    hidden_ptr += b * hidden_stride_b + (block * block_size).to(tl.int64) * hidden_stride_n
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    for first in range(0, count, ROWS):
        offsets = (first + row)[:, None].to(tl.int64) * hidden_stride_n + channel[None, :]
        mask = (first + row < count)[:, None] & (channel < channels)[None, :]
        total += tl.load(hidden_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / count.to(tl.float32)
    high = mean.to(parts_ptr.dtype.element_ty)
    rest = mean - high.to(tl.float32)
    # Infinity has no rest, and infinity less itself is none.
    rest = tl.where(tl.abs(mean) < float("inf"), rest, 0.0)
    place = (b * blocks + block) * channels + channel
    tl.store(parts_ptr + place, high, mask=channel < channels)
    parts_ptr += blocks.to(tl.int64) * tl.num_programs(2) * channels
    tl.store(parts_ptr + place, rest.to(parts_ptr.dtype.element_ty), mask=channel < channels)


@triton.jit(do_not_specialize=["blocks", "all_blocks", "channels"])
def _product_kernel(
    parts_ptr,  # [2, B * G, C], contiguous
    weight_ptr,  # [F, C], as the gate's
    gate_ptr,
    bias_ptr,  # [F], as the gate's
    gate_bias_ptr,
    cache_ptr,  # [B, G, F]
    means_ptr,  # [B, G, F], contiguous
    scores_ptr,  # [B, G, F], contiguous
    weight_stride_f,
    gate_stride_f,
    cache_stride_b,
    cache_stride_g,
    cache_stride_f,
    blocks,
    all_blocks,
    neurons,
    channels,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    GATE_BIAS: tl.constexpr,
    SCORES: tl.constexpr,
    EVEN_CHANNELS: tl.constexpr,
    WIDE_PRODUCTS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The layer on the mean tokens of some blocks, for a tile of neurons.

    Programs of the same neurons are neighbours, so that their weights come from memory once.
    """
    channels = channels // 8 * 8
    block = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    neuron = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    k = tl.arange(0, BLOCK_K)
    # Neurons past the end read the last one, blocks past the end nothing: neither is stored.
    real = (block < all_blocks)[:, None]
    high_ptrs = parts_ptr + block.to(tl.int64)[:, None] * channels + k[None, :]
    rest_ptrs = high_ptrs + all_blocks.to(tl.int64) * channels
    row = tl.minimum(neuron, neurons - 1).to(tl.int64)[:, None]
    weight_ptrs = weight_ptr + row * weight_stride_f + k[None, :]
    gate_ptrs = gate_ptr + row * gate_stride_f + k[None, :]
    up = tl.zeros([BLOCK_F, BLOCK_M], tl.float32)
    gate = tl.zeros([BLOCK_F, BLOCK_M], tl.float32)
    for first in tl.range(0, tl.maximum(channels, BLOCK_K), BLOCK_K, num_stages=STAGES):
        if EVEN_CHANNELS:
            high = tl.load(high_ptrs, mask=real, other=0.0)
            rest = tl.load(rest_ptrs, mask=real, other=0.0)
            weight = tl.load(weight_ptrs)
        else:
            inside = (first + k < channels)[None, :]
            high = tl.load(high_ptrs, mask=real & inside, other=0.0)
            rest = tl.load(rest_ptrs, mask=real & inside, other=0.0)
            weight = tl.load(weight_ptrs, mask=inside, other=0.0)
        up = dot(weight, high.T, up, WIDE_PRODUCTS)
        up = dot(weight, rest.T, up, WIDE_PRODUCTS)
        if GATED:
            if EVEN_CHANNELS:
                weight = tl.load(gate_ptrs)
            else:
                weight = tl.load(gate_ptrs, mask=(first + k < channels)[None, :], other=0.0)
            gate = dot(weight, high.T, gate, WIDE_PRODUCTS)
            gate = dot(weight, rest.T, gate, WIDE_PRODUCTS)
            gate_ptrs += BLOCK_K
        high_ptrs += BLOCK_K
        rest_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K

    exists = neuron < neurons
    if BIAS:
        up += tl.load(bias_ptr + neuron, mask=exists, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if GATE_BIAS:
            gate += tl.load(gate_bias_ptr + neuron, mask=exists, other=0.0).to(tl.float32)[:, None]
        up = activate(gate, ACTIVATION) * up
    place = block[None, :].to(tl.int64) * neurons + neuron[:, None]
    mask = exists[:, None] & (block < all_blocks)[None, :]
    tl.store(means_ptr + place, up, mask=mask)
    if SCORES:
        cached = (block // blocks).to(tl.int64) * cache_stride_b
        cached += (block % blocks).to(tl.int64) * cache_stride_g
        cache_ptrs = cache_ptr + cached[None, :] + neuron[:, None] * cache_stride_f
        before = tl.load(cache_ptrs, mask=mask, other=0.0)
        tl.store(scores_ptr + place, tl.abs(up - before), mask=mask)


@triton.jit
def _counts_at(bits, lower, upper):
    """Return the number of scores at or above two thresholds; one sum counts both if it can."""
    at_lower = (bits >= lower).to(tl.int32)
    at_upper = (bits >= upper).to(tl.int32)
    if bits.shape[0] > 32768:
        return tl.sum(at_lower, axis=0), tl.sum(at_upper, axis=0)
    else:
        counts = tl.sum(at_lower + (at_upper << 16), axis=0)
        return counts & 0xFFFF, (counts >> 16) & 0xFFFF


@triton.jit
def _comparable(scores_ptr, neuron, neurons):
    """Bits that compare as the scores do; below all scores where there is no neuron."""
    score = tl.load(scores_ptr + neuron, mask=neuron < neurons, other=0.0)
    bits = tl.where(score == score, score.to(tl.int32, bitcast=True), NAN)
    return score, tl.where(neuron < neurons, bits, -1)


@triton.jit(do_not_specialize=["blocks", "keep"])
def _top_kernel(
    scores_ptr,  # [B, G, F], contiguous
    means_ptr,  # [B, G, F], contiguous
    cache_ptr,  # [B, G, F]
    indices_ptr,  # [B, G, K], contiguous
    cache_stride_b,
    cache_stride_g,
    cache_stride_f,
    blocks,
    neurons,
    keep,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    """Neurons of the highest scores, ascending; of equal ones the lower neurons."""
    first = tl.program_id(1) * PART
    block = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    row = b * blocks + block
    scores_ptr += row * neurons
    neuron = tl.arange(0, BLOCK)
    score, bits = _comparable(scores_ptr, neuron, neurons)

    # `at_low` scores are at or above the bits `low`, at least `keep`; fewer (`above`) are at or
    # above `high`. Two thresholds are counted at a time: to begin with an octave below and above
    # the mean score; then where, on a straight line through the counts, a few more and a few less
    # than `keep` would be; and every fourth time at thirds of the bits, which always comes to an
    # end. For 12,288 normal, log-normal or Cauchy numbers that takes six to eleven turns.
    low = 0
    high = tl.max(bits, axis=0) + 1
    at_low = neurons + 0
    above = 0
    average = tl.sum(score, axis=0) / neurons.to(tl.float32)
    lower = (0.5 * average).to(tl.int32, bitcast=True)
    upper = (2.0 * average).to(tl.int32, bitcast=True)
    turn = 0
    while (high - low > 1) & (at_low != keep):
        # Within the range, also where the mean is not a number or the line leaves it.
        lower = tl.minimum(tl.maximum(lower, low + 1), high - 1)
        upper = tl.minimum(tl.maximum(upper, lower), high - 1)
        at_lower, at_upper = _counts_at(bits, lower, upper)
        # The highest threshold with enough scores, and the lowest one with too few.
        new_low = tl.where(at_upper >= keep, upper, tl.where(at_lower >= keep, lower, low))
        new_at_low = tl.where(at_upper >= keep, at_upper, at_lower)
        at_low = tl.where(at_lower >= keep, new_at_low, at_low)
        new_high = tl.where(at_lower < keep, lower, tl.where(at_upper < keep, upper, high))
        new_above = tl.where(at_lower < keep, at_lower, at_upper)
        above = tl.where(at_upper < keep, new_above, above)
        low = new_low
        high = new_high

        turn += 1
        between = (at_low - above).to(tl.float32)
        share = (at_low - keep).to(tl.float32) / between
        margin = 1 / 16 + 0.5 / between
        width = (high - low).to(tl.float32)
        by_thirds = turn % 4 == 0
        lower_share = tl.where(by_thirds, 1 / 3, tl.maximum(share - margin, 0.0))
        upper_share = tl.where(by_thirds, 2 / 3, tl.minimum(share + margin, 1.0))
        lower = low + (width * lower_share).to(tl.int32)
        upper = low + (width * upper_share).to(tl.int32)

    # Either `low` parts the scores, or it is the lowest score to keep, and equal ones compete.
    parted = at_low == keep
    threshold = tl.where(parted, low, high)
    left_over = tl.where(parted, 0, keep - above)
    listed = 0
    equals = 0
    if PART < BLOCK:  # what the programs before this one list
        earlier = neuron < first
        listed = tl.sum((earlier & (bits >= threshold)).to(tl.int32), axis=0)
        equals = tl.sum((earlier & (bits == low)).to(tl.int32), axis=0)
        neuron = first + tl.arange(0, PART)
        _, bits = _comparable(scores_ptr, neuron, neurons)
    sure = bits >= threshold
    equal = bits == low
    # Both are counted by one scan, in the halves of a number.
    if PART > 32768:
        counts = tl.cumsum(sure.to(tl.int64) + (equal.to(tl.int64) << 32), axis=0)
        equals_so_far = (counts >> 32).to(tl.int32)
        place = counts.to(tl.int32)
    else:
        counts = tl.cumsum(sure.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
        equals_so_far = (counts >> 16) & 0xFFFF
        place = counts & 0xFFFF
    equals_so_far += equals
    kept = sure | (equal & (equals_so_far <= left_over))
    place += listed + tl.minimum(equals_so_far, left_over) - 1
    tl.store(indices_ptr + row * keep + place, neuron, mask=kept)
    mean = tl.load(means_ptr + row * neurons + neuron, mask=kept, other=0.0)
    cache_ptr += b * cache_stride_b + block.to(tl.int64) * cache_stride_g
    tl.store(cache_ptr + neuron * cache_stride_f, mean, mask=kept)

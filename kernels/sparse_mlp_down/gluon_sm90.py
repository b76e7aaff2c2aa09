"""`sparse_mlp_down` for Hopper: gathered weight rows, warp-specialized, persistent.

A work item is one token block and a tile of 256 output channels; it sums over the block's list of
neurons. The producer warps gather the neurons' rows of the transposed weight with 16-byte
`cp.async`, beside TMA loads of the changes, and run ahead into the next item; two consumer
warpgroups own 64 tokens each and add the sums to the cached output, 64 channels at a time.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from chipsparse.kernels import triton_support
from chipsparse.kernels.gluon_blocks import (
    CONSTANTS,
    DEPTH,
    TILE,
    halves,
    lists_at_once,
    locate,
    row_offsets,
    stages,
)
from chipsparse.kernels.gluon_compat import (
    async_load,
    descriptor,
    mbarrier_arrive_on_copies,
    tma_load,
)
from chipsparse.kernels.launch import Launch
from chipsparse.kernels.sparse_mlp_down import SparseMLPDown
from chipsparse.kernels.token_layout import empty_token_contiguous, padded_rows, with_padding


@gluon.jit
def _produce(
    delta_desc, pointers, smem, sizes,
    TILE: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    EVEN_CHANNELS: gl.constexpr, WIDE_ROWS: gl.constexpr,
):  # fmt: skip
    """Loads the changes and gathers the weight rows of every item."""
    w_ptr, indices_ptr = pointers
    d_smem, w_smem, full, empty = smem
    items, tiles, list_sizes, channels8, stride_w8 = sizes
    _, _, blocks, capacity = list_sizes
    # A row is read by the 32 threads of a warp, 16 bytes each.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    entry = gl.arange(0, DEPTH, gl.SliceLayout(1, layout))
    channel = gl.arange(0, TILE, gl.SliceLayout(0, layout))
    filled = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        batch, block, tile = locate(item, tiles, list_sizes)
        list_ptr = indices_ptr + (batch * blocks + block).to(gl.int64) * capacity
        weights = w_ptr + tile * TILE
        inside = (tile * TILE + channel < channels8 * 8)[None, :]
        # A partly filled stage comes first: it alone needs a mask. Its other rows are zeros.
        steps = (capacity + DEPTH - 1) // DEPTH
        first = capacity - (steps - 1) * DEPTH
        neurons = gl.load(list_ptr + entry, mask=entry < first, other=0)
        position = 0
        for i in range(steps):
            stage = filled % STAGES
            offsets = row_offsets(neurons, stride_w8, WIDE_ROWS) + channel[None, :]
            # The next rows' numbers arrive while this stage waits for room.
            if i + 1 < steps:
                neurons = gl.load(list_ptr + first + i * DEPTH + entry)
            mbarrier.wait(empty.index(stage), ((filled // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), 2 * delta_desc.block_type.nbytes)
            for half in gl.static_range(2):
                tma_load(
                    delta_desc,
                    [batch, position, block * 128 + 64 * half],
                    full.index(stage),
                    d_smem.index(2 * stage + half),
                )
            if i == 0:
                async_load(
                    w_smem.index(stage),
                    weights + offsets,
                    mask=inside & (entry < first)[:, None],
                )
                position = first
            else:
                if EVEN_CHANNELS:
                    async_load(w_smem.index(stage), weights + offsets)
                else:
                    async_load(w_smem.index(stage), weights + offsets, mask=inside)
                position += DEPTH
            mbarrier_arrive_on_copies(full.index(stage), increment_count=False)
            filled += 1


@gluon.jit
def _old(first, cache, row, ends, LAYOUT: gl.constexpr):
    """Cached output of 64 tokens and 64 channels, where it lies, and which of it there is."""
    rows, channels, stride_cn8, _ = ends
    channel = first + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    inside = (row < rows)[:, None] & (channel < channels)[None, :]
    cached = cache + (row.to(gl.int64) * (stride_cn8 * 8))[:, None] + channel[None, :]
    return gl.load(cached, mask=inside, other=0.0), cached, inside


@gluon.jit
def _finish(x, old, first, addend, out, row, ends, HAS_ADDEND: gl.constexpr, LAYOUT: gl.constexpr):
    """Adds the sums of 64 tokens and 64 channels to the cached output, and stores the result."""
    old, cached, inside = old
    _, channels, _, stride_an8 = ends
    total = (gl.convert_layout(x, LAYOUT) + old.to(gl.float32)).to(old.dtype)
    gl.store(cached, total, mask=inside)
    channel = first + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    row = row.to(gl.int64)[:, None]
    result = total.to(gl.float32)
    if HAS_ADDEND:
        added = gl.load(addend + row * (stride_an8 * 8) + channel[None, :], mask=inside, other=0.0)
        result = result + added.to(gl.float32)
    gl.store(out + row * channels + channel[None, :], result.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _multiply(smem, stage, sums, use_acc, DEPTH: gl.constexpr, WG: gl.constexpr):
    """Begins to add the products of a stage's changes of 64 tokens and weight rows."""
    changes = smem[0].index(2 * stage + WG).reshape([DEPTH, 64]).permute((1, 0))
    return warpgroup_mma(changes, smem[1].index(stage), sums, use_acc=use_acc, is_async=True)


@gluon.jit
def _consume(
    pointers, smem, sizes,
    TILE: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, HAS_ADDEND: gl.constexpr,
    WG: gl.constexpr,
):  # fmt: skip
    """Sums of 64 tokens and a tile of channels over the block's neurons."""
    cache_ptr, addend_ptr, out_ptr = pointers
    full = smem[2]
    empty = smem[3]
    items, tiles, list_sizes, rows, channels8, stride_cb, stride_cn8, stride_ab, stride_an8 = sizes
    _, _, _, capacity = list_sizes
    ends = (rows, channels8 * 8, stride_cn8, stride_an8)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    # Eight neighbouring channels of a token per thread, 64 of four tokens per warp.
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    used = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        batch, block, tile = locate(item, tiles, list_sizes)
        first = tile * TILE
        cache = cache_ptr + batch.to(gl.int64) * stride_cb
        addend = addend_ptr + batch.to(gl.int64) * stride_ab
        out = out_ptr + batch.to(gl.int64) * rows * (channels8 * 8)
        row = block * 128 + WG * 64 + gl.arange(0, 64, gl.SliceLayout(1, lines))
        sums = gl.full([64, TILE], 0.0, gl.float32, layout)
        stage = used % STAGES
        mbarrier.wait(full.index(stage), (used // STAGES) & 1)
        token = _multiply(smem, stage, sums, False, DEPTH, WG)
        used += 1
        for _ in range(DEPTH, capacity, DEPTH):
            before = stage
            stage = used % STAGES
            mbarrier.wait(full.index(stage), (used // STAGES) & 1)
            token = _multiply(smem, stage, token, True, DEPTH, WG)
            token = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[token]))
            mbarrier.arrive(empty.index(before), count=1)
            used += 1
        sums = warpgroup_mma_wait(0, deps=[token])
        mbarrier.arrive(empty.index(stage), count=1)
        old = _old(first, cache, row, ends, lines)
        after = _old(first + 64, cache, row, ends, lines)
        left, right = halves(sums)
        x0, x1 = halves(left)
        x2, x3 = halves(right)
        _finish(x0, old, first, addend, out, row, ends, HAS_ADDEND, lines)
        old = _old(first + 128, cache, row, ends, lines)
        _finish(x1, after, first + 64, addend, out, row, ends, HAS_ADDEND, lines)
        after = _old(first + 192, cache, row, ends, lines)
        _finish(x2, old, first + 128, addend, out, row, ends, HAS_ADDEND, lines)
        _finish(x3, after, first + 192, addend, out, row, ends, HAS_ADDEND, lines)


@gluon.jit
def _sparse_mlp_down_kernel(
    delta_desc, w_ptr, indices_ptr, cache_ptr, addend_ptr, out_ptr,
    items, tiles, list_count, at_once, blocks, rows, channels8, capacity, stride_w8,
    stride_cb, stride_cn8, stride_ab, stride_an8,
    TILE: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, PRODUCER_WARPS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    HAS_ADDEND: gl.constexpr, EVEN_CHANNELS: gl.constexpr, WIDE_ROWS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    smem = stages(
        delta_desc, [2 * STAGES, 1, DEPTH, 64], [STAGES, DEPTH, TILE], w_ptr.dtype.element_ty,
        STAGES, 128, PRODUCER_WARPS,
    )  # fmt: skip
    results = (cache_ptr, addend_ptr, out_ptr)
    list_sizes = (list_count, at_once, blocks, capacity)
    sizes = (
        items, tiles, list_sizes, rows, channels8, stride_cb, stride_cn8, stride_ab, stride_an8,
    )  # fmt: skip
    inputs = (w_ptr, indices_ptr)
    input_sizes = (items, tiles, list_sizes, channels8, stride_w8)
    # Constants survive only inside these literals, so each partition spells them out.
    # fmt: off
    gl.warp_specialize(
        [
            (_consume, (results, smem, sizes, TILE, DEPTH, STAGES, HAS_ADDEND, 0)),
            (_consume, (results, smem, sizes, TILE, DEPTH, STAGES, HAS_ADDEND, 1)),
            (_produce, (delta_desc, inputs, smem, input_sizes, TILE, DEPTH, STAGES,
                        PRODUCER_WARPS, EVEN_CHANNELS, WIDE_ROWS)),
        ],
        [4, PRODUCER_WARPS], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
    # fmt: on


def sparse_mlp_down(call: SparseMLPDown) -> torch.Tensor:
    """Run a checked `SparseMLPDown`."""
    delta = call.delta
    weight = call.weight
    neuron_indices = call.neuron_indices
    output_cache = call.output_cache
    addend = call.addend
    batch, rows, capacity = delta.shape
    channels = weight.shape[0]
    blocks = neuron_indices.shape[1]
    output = torch.empty(batch, rows, channels, dtype=delta.dtype, device=delta.device)
    if output.numel() == 0:
        return output
    if capacity == 0:
        total = output_cache.float() if addend is None else output_cache.float() + addend.float()
        return output.copy_(total)
    delta = with_padding(delta)
    cache = _aligned(output_cache)
    added = cache if addend is None else _aligned(addend)
    # With what pads the tokens: the sums with it are not stored.
    strides = (delta.stride(0), delta.stride(2), 1)
    changes = delta.as_strided((batch, capacity, padded_rows(rows)), strides)
    launch = call.known().get("gluon")
    if launch is None:
        tiles = -(-channels // TILE)
        items = batch * blocks * tiles
        sizes = (blocks, rows, channels // 8, capacity)
        launch = call.known()["gluon"] = Launch(
            _sparse_mlp_down_kernel,
            (min(items, triton_support.multiprocessors(delta.device)),),
            items,
            tiles,
            batch * blocks,
            lists_at_once(128 * capacity * delta.itemsize),
            *sizes,
            weight.stride(1) // 8,
            cache.stride(0),
            cache.stride(1) // 8,
            added.stride(0),
            added.stride(1) // 8,
            **CONSTANTS,
            HAS_ADDEND=addend is not None,
            EVEN_CHANNELS=channels % TILE == 0,
            WIDE_ROWS=weight.shape[1] * weight.stride(1) >= 2**31,
        )
    launch(
        descriptor(call.known(), strides, changes, 1, DEPTH, 64),
        weight,
        neuron_indices.contiguous(),
        cache,
        added,
        output,
    )
    if cache is not output_cache:
        output_cache.copy_(cache)
    return output


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor ``[B, N, C]``, or a copy, of which 16 bytes can be read at each eighth channel."""
    aligned = tensor.stride(2) == 1 and tensor.stride(1) % 8 == 0 and tensor.data_ptr() % 16 == 0
    return tensor if aligned else tensor.clone(memory_format=torch.contiguous_format)


def compile_one(device: torch.device) -> None:
    """Launches the kernel in one of its forms, for `gluon_compat.not_compiled_reason`."""
    output = torch.empty(1, 128, 256, dtype=torch.bfloat16, device=device)
    weight = torch.empty(512, 256, dtype=torch.bfloat16, device=device)
    indices = torch.empty(1, 1, 64, dtype=torch.int32, device=device)
    delta = empty_token_contiguous(output, 1, 128, 64)
    sparse_mlp_down(SparseMLPDown(delta, weight.t(), indices, output))

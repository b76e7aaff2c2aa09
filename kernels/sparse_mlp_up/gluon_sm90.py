"""`sparse_mlp_up` for Hopper: gathered weight rows, warp-specialized, persistent.

A work item is one token block and a tile of 256 neurons of its list. The producer warps gather the
neurons' weight rows with 16-byte `cp.async` into swizzled tiles, beside TMA loads of the tokens,
and run ahead into the next item; two consumer warpgroups own 64 tokens each. Their epilogue turns
the activations to the caches' layout, tokens contiguous, 64 neurons at a time, so that old values,
new values and changes move 16 bytes at once.
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
from chipsparse.kernels.sparse_mlp_up import SparseMLPUp
from chipsparse.kernels.token_layout import empty_token_contiguous, with_padding

# Stages by which the second consumer warpgroup trails the first.
LAG = 1
LOG2_E = gl.constexpr(1.4426950408889634)
ACTIVATIONS: dict[str | None, int] = {"gelu-tanh": 0, "gelu": 1, "silu": 2}


@gluon.jit
def _sigmoid(x_log2):
    """1 / (1 + 2 ** -x_log2), with the hardware's reciprocal (1 ulp)."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;",
        "=f,f",
        [1.0 + gl.exp2(-x_log2)],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _activate(x, ACTIVATION: gl.constexpr):
    if ACTIVATION == 0:  # 0.5 (1 + tanh(u)) is the sigmoid of 2 u
        y = x * _sigmoid(x * (2.302208198 + 0.1029432397 * (x * x)))
    elif ACTIVATION == 1:
        y = 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    else:
        y = x * _sigmoid(x * LOG2_E)
    return y


@gluon.jit
def _item(item, tiles, whole, sizes, TILE: gl.constexpr):
    """Return a work item's batch, block and first list entry, and whether it is half a tile."""
    # The last round of items goes out in halves, so that all multiprocessors share it.
    half = item >= whole
    side = gl.where(half, (item - whole) & 1, 0)
    item = gl.where(half, whole + ((item - whole) >> 1), item)
    batch, block, tile = locate(item, tiles, sizes)
    return batch, block, tile * TILE + side * (TILE // 2), half


@gluon.jit
def _gather(
    x_desc, w_ptr, list_ptr, first, capacity, row, channels, stride_w8, smem, filled,
    ROWS: gl.constexpr, TILE: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, EVEN_CHANNELS: gl.constexpr, WIDE_ROWS: gl.constexpr,
):  # fmt: skip
    """Loads 128 tokens and gathers the weight rows of ROWS neurons, all channels."""
    x_smem, w_smem, full, empty = smem
    # A row's part is read by DEPTH / 8 neighbouring threads, 16 bytes each.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DEPTH, DEPTH // 8], [WARPS, 1], [1, 0])
    entry = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    channel = gl.arange(0, DEPTH, gl.SliceLayout(0, layout))
    # Entries past the end repeat the first one; what they give is not stored.
    neurons = gl.load(list_ptr + gl.where(entry < capacity, entry, first))
    weights = w_ptr + row_offsets(neurons, stride_w8, WIDE_ROWS) + channel[None, :]
    for c in range(0, channels, DEPTH):
        stage = filled % STAGES
        mbarrier.wait(empty.index(stage), ((filled // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), 2 * x_desc.block_type.nbytes)
        tma_load(x_desc, [row, c], full.index(stage), x_smem.index(2 * stage))
        tma_load(x_desc, [row + 64, c], full.index(stage), x_smem.index(2 * stage + 1))
        w_tile = w_smem.index(stage)
        if ROWS < TILE:
            w_tile = w_tile.slice(0, ROWS, dim=0)
        if EVEN_CHANNELS:
            async_load(w_tile, weights + c)
        else:
            async_load(w_tile, weights + c, mask=(c + channel < channels)[None, :])
        mbarrier_arrive_on_copies(full.index(stage), increment_count=False)
        filled += 1
    return filled


@gluon.jit
def _produce(
    x_desc, pointers, smem, sizes,
    TILE: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    EVEN_CHANNELS: gl.constexpr, WIDE_ROWS: gl.constexpr,
):  # fmt: skip
    """Loads the tokens and gathers the weight rows of every item."""
    w_ptr, indices_ptr = pointers
    items, tiles, whole, list_sizes, rows, channels8, stride_w8 = sizes
    _, _, blocks, capacity = list_sizes
    filled = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        batch, block, first, half = _item(item, tiles, whole, list_sizes, TILE)
        if first < capacity:
            list_ptr = indices_ptr + (batch * blocks + block).to(gl.int64) * capacity
            row = batch * rows + block * 128
            if half:
                filled = _gather(
                    x_desc, w_ptr, list_ptr, first, capacity, row, channels8 * 8, stride_w8, smem,
                    filled, TILE // 2, TILE, DEPTH, STAGES, WARPS, EVEN_CHANNELS, WIDE_ROWS,
                )  # fmt: skip
            else:
                filled = _gather(
                    x_desc, w_ptr, list_ptr, first, capacity, row, channels8 * 8, stride_w8, smem,
                    filled, TILE, TILE, DEPTH, STAGES, WARPS, EVEN_CHANNELS, WIDE_ROWS,
                )  # fmt: skip


@gluon.jit
def _listed(first, list_ptr, capacity, TURNED: gl.constexpr):
    """Numbers of 64 neurons of the list, in the two layouts that the epilogue needs."""
    entry = first + gl.arange(0, 64, gl.SliceLayout(0, TURNED))
    neurons = gl.load(list_ptr + entry, mask=entry < capacity, other=0)
    entry = first + gl.arange(0, 64, gl.BlockedLayout([1], [32], [4], [0]))
    return neurons, gl.load(list_ptr + entry, mask=entry < capacity, other=0)


@gluon.jit
def _biases(bias_ptr, neurons, HAS_BIAS: gl.constexpr):
    bias = gl.full([64], 0.0, gl.float32, neurons.type.layout)
    if HAS_BIAS:
        bias = gl.load(bias_ptr + neurons).to(gl.float32)
    return bias


@gluon.jit
def _old(neurons, first, cache, token, sizes, TURNED: gl.constexpr):
    """Cached activations of 64 tokens and 64 neurons, where they lie, and which to store."""
    capacity, padded8, stride_cf8 = sizes
    entry = first + gl.arange(0, 64, gl.SliceLayout(0, TURNED))
    # Eight tokens are there or not together: those that pad the last ones are stored like them.
    stored = (token < padded8 * 8)[:, None] & (entry < capacity)[None, :]
    cached = cache + token[:, None] + (neurons.to(gl.int64) * (stride_cf8 * 8))[None, :]
    return gl.load(cached, mask=stored, other=0.0), cached, stored


@gluon.jit
def _finish(
    x,
    bias,
    old,
    first,
    delta,
    token,
    sizes,
    ACTIVATION: gl.constexpr,
    TURNED: gl.constexpr,
):
    """Stores the activations of 64 tokens and 64 neurons, and their change."""
    old, cached, stored = old
    _, padded8, _ = sizes
    x = x + gl.convert_layout(bias, gl.SliceLayout(0, x.type.layout))[None, :]
    new = gl.convert_layout(_activate(x, ACTIVATION).to(old.dtype), TURNED)
    gl.store(cached, new, mask=stored)
    entry = first + gl.arange(0, 64, gl.SliceLayout(0, TURNED))
    change = (new.to(gl.float32) - old.to(gl.float32)).to(delta.dtype.element_ty)
    places = delta + token[:, None] + (entry.to(gl.int64) * (padded8 * 8))[None, :]
    gl.store(places, change, mask=stored)


@gluon.jit
def _multiply(smem, stage, sums, use_acc, ROWS: gl.constexpr, TILE: gl.constexpr, WG: gl.constexpr):
    """Begins to add the products of a stage's 64 tokens and ROWS weight rows."""
    x_smem, w_smem, _, _ = smem
    w_tile = w_smem.index(stage)
    if ROWS < TILE:
        w_tile = w_tile.slice(0, ROWS, dim=0)
    return warpgroup_mma(
        x_smem.index(2 * stage + WG),
        w_tile.permute((1, 0)),
        sums,
        use_acc=use_acc,
        is_async=True,
    )


@gluon.jit
def _compute(
    smem, used, first, list_ptr, bias_ptr, cache, delta, row, ends, channels,
    ROWS: gl.constexpr, TILE: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, TURNED: gl.constexpr, LAG: gl.constexpr,
    WG: gl.constexpr,
):  # fmt: skip
    """Computes and stores 64 tokens and ROWS neurons, 128 or 256 of them."""
    full = smem[2]
    empty = smem[3]
    capacity = ends[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    neurons0, line0 = _listed(first, list_ptr, capacity, TURNED)
    neurons1, line1 = _listed(first + 64, list_ptr, capacity, TURNED)
    if ROWS == 256:
        neurons2, line2 = _listed(first + 128, list_ptr, capacity, TURNED)
        neurons3, line3 = _listed(first + 192, list_ptr, capacity, TURNED)
    # One warpgroup trails the other, so that one's epilogue runs under the other's products: it
    # waits for a later stage of the first item, if that has so many.
    if (WG * LAG > 0) & (used == 0) & (channels > LAG * DEPTH):
        mbarrier.wait(full.index(LAG), 0)
    stage = used % STAGES
    mbarrier.wait(full.index(stage), (used // STAGES) & 1)
    zero = gl.full([64, ROWS], 0.0, gl.float32, layout)
    token = _multiply(smem, stage, zero, False, ROWS, TILE, WG)
    used += 1
    # The numbers of the neurons arrive under the first product.
    bias0 = _biases(bias_ptr, line0, HAS_BIAS)
    bias1 = _biases(bias_ptr, line1, HAS_BIAS)
    if ROWS == 256:
        bias2 = _biases(bias_ptr, line2, HAS_BIAS)
        bias3 = _biases(bias_ptr, line3, HAS_BIAS)
    for _ in range(DEPTH, channels, DEPTH):
        before = stage
        stage = used % STAGES
        mbarrier.wait(full.index(stage), (used // STAGES) & 1)
        token = _multiply(smem, stage, token, True, ROWS, TILE, WG)
        token = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[token]))
        mbarrier.arrive(empty.index(before), count=1)
        used += 1
    # Old values are asked for 64 neurons ahead.
    old = _old(neurons0, first, cache, row, ends, TURNED)
    sums = warpgroup_mma_wait(0, deps=[token])
    mbarrier.arrive(empty.index(stage), count=1)
    left, right = halves(sums)
    after = _old(neurons1, first + 64, cache, row, ends, TURNED)
    if ROWS == 128:
        _finish(left, bias0, old, first, delta, row, ends, ACTIVATION, TURNED)
        _finish(right, bias1, after, first + 64, delta, row, ends, ACTIVATION, TURNED)
    else:
        x0, x1 = halves(left)
        x2, x3 = halves(right)
        _finish(x0, bias0, old, first, delta, row, ends, ACTIVATION, TURNED)
        old = _old(neurons2, first + 128, cache, row, ends, TURNED)
        _finish(x1, bias1, after, first + 64, delta, row, ends, ACTIVATION, TURNED)
        after = _old(neurons3, first + 192, cache, row, ends, TURNED)
        _finish(x2, bias2, old, first + 128, delta, row, ends, ACTIVATION, TURNED)
        _finish(x3, bias3, after, first + 192, delta, row, ends, ACTIVATION, TURNED)
    return used


@gluon.jit
def _consume(
    pointers, smem, sizes,
    TILE: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, LAG: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    """Activations of 64 tokens of every item, and all that is stored of them."""
    bias_ptr, indices_ptr, cache_ptr, delta_ptr = pointers
    items, tiles, whole, list_sizes, channels8, padded8, stride_cb, stride_cf8 = sizes
    _, _, blocks, capacity = list_sizes
    ends = (capacity, padded8, stride_cf8)
    # Eight neighbouring tokens of a neuron per thread, 64 of four neurons per warp.
    turned: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    used = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        batch, block, first, half = _item(item, tiles, whole, list_sizes, TILE)
        if first < capacity:
            list_ptr = indices_ptr + (batch * blocks + block).to(gl.int64) * capacity
            cache = cache_ptr + batch.to(gl.int64) * stride_cb
            delta = delta_ptr + batch.to(gl.int64) * capacity * (padded8 * 8)
            row = block * 128 + WG * 64 + gl.arange(0, 64, gl.SliceLayout(1, turned))
            if half:
                used = _compute(
                    smem, used, first, list_ptr, bias_ptr, cache, delta, row, ends,
                    channels8 * 8, TILE // 2, TILE, DEPTH, STAGES, HAS_BIAS, ACTIVATION, turned,
                    LAG, WG,
                )  # fmt: skip
            else:
                used = _compute(
                    smem, used, first, list_ptr, bias_ptr, cache, delta, row, ends,
                    channels8 * 8, TILE, TILE, DEPTH, STAGES, HAS_BIAS, ACTIVATION, turned, LAG, WG,
                )  # fmt: skip


@gluon.jit
def _sparse_mlp_up_kernel(
    x_desc, w_ptr, bias_ptr, indices_ptr, cache_ptr, delta_ptr,
    items, whole, tiles, list_count, at_once, blocks, rows, channels8, capacity, padded8,
    stride_w8, stride_cb, stride_cf8,
    TILE: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, PRODUCER_WARPS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    EVEN_CHANNELS: gl.constexpr, WIDE_ROWS: gl.constexpr, LAG: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    smem = stages(
        x_desc, [2 * STAGES, 64, DEPTH], [STAGES, TILE, DEPTH], w_ptr.dtype.element_ty, STAGES,
        2 * DEPTH, PRODUCER_WARPS,
    )  # fmt: skip
    results = (bias_ptr, indices_ptr, cache_ptr, delta_ptr)
    list_sizes = (list_count, at_once, blocks, capacity)
    sizes = (items, tiles, whole, list_sizes, channels8, padded8, stride_cb, stride_cf8)
    inputs = (w_ptr, indices_ptr)
    input_sizes = (items, tiles, whole, list_sizes, rows, channels8, stride_w8)
    # Constants survive only inside these literals, so each partition spells them out.
    # fmt: off
    gl.warp_specialize(
        [
            (_consume, (results, smem, sizes, TILE, DEPTH, STAGES, HAS_BIAS, ACTIVATION, LAG, 0)),
            (_consume, (results, smem, sizes, TILE, DEPTH, STAGES, HAS_BIAS, ACTIVATION, LAG, 1)),
            (_produce, (x_desc, inputs, smem, input_sizes, TILE, DEPTH, STAGES, PRODUCER_WARPS,
                        EVEN_CHANNELS, WIDE_ROWS)),
        ],
        [4, PRODUCER_WARPS], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
    # fmt: on


def sparse_mlp_up(call: SparseMLPUp) -> torch.Tensor:
    """Run a checked `SparseMLPUp`."""
    hidden = call.hidden
    weight = call.weight
    bias = call.bias
    neuron_indices = call.neuron_indices
    batch, rows, channels = hidden.shape
    blocks, capacity = neuron_indices.shape[1:]
    delta = empty_token_contiguous(hidden, batch, rows, capacity)
    if delta.numel() == 0:
        return delta
    cache = with_padding(call.activation_cache)
    # A view: the rows of all batches lie at one distance.
    tokens = hidden.as_strided((batch * rows, channels), (hidden.stride(1), 1))
    strides = cache.stride()  # of a copy where the tensor given lacks padding
    launch = call.known().get(strides)
    if launch is None:
        tiles = -(-capacity // TILE)
        sms = triton_support.multiprocessors(hidden.device)
        total = batch * blocks * tiles
        whole = total // sms * sms
        if 2 * (total - whole) > sms:  # halves would take two rounds more
            whole = total
        items = whole + 2 * (total - whole)
        work = (items, whole, tiles, batch * blocks)
        sizes = (blocks, rows, channels // 8, capacity)
        launch = call.known()[strides] = Launch(
            _sparse_mlp_up_kernel,
            (min(items, sms),),
            *work,
            lists_at_once(128 * channels * hidden.itemsize),
            *sizes,
            delta.stride(2) // 8,
            weight.stride(0) // 8,
            cache.stride(0),
            cache.stride(2) // 8,
            **CONSTANTS,
            HAS_BIAS=bias is not None,
            ACTIVATION=ACTIVATIONS[call.activation],
            EVEN_CHANNELS=channels % DEPTH == 0,
            WIDE_ROWS=weight.shape[0] * weight.stride(0) >= 2**31,
            LAG=LAG,
        )
    launch(
        descriptor(call.known(), "tokens", tokens, 64, DEPTH),
        weight,
        weight if bias is None else bias,
        neuron_indices.contiguous(),
        cache,
        delta,
    )
    if cache is not call.activation_cache:
        call.activation_cache.copy_(cache)
    return delta


def compile_one(device: torch.device) -> None:
    """Launches the kernel in one of its forms, for `gluon_compat.not_compiled_reason`."""
    hidden = torch.empty(1, 128, 256, dtype=torch.bfloat16, device=device)
    weight = torch.empty(512, 256, dtype=torch.bfloat16, device=device)
    indices = torch.empty(1, 1, 64, dtype=torch.int32, device=device)
    cache = empty_token_contiguous(hidden, 1, 128, 512)
    sparse_mlp_up(SparseMLPUp(hidden, weight, None, indices, cache, activation="gelu-tanh"))

"""Adds the change of some neurons to their cached activations; see `mlp_writeback`."""

# Triton reads the annotations of a kernel in its own way.
# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

ENTRIES = 32  # neurons that a program writes back at a time


@triton.jit
def write_back_kernel(
    cache_ptr, delta_ptr, indices_ptr, items, blocks, capacity, rows,
    cache_stride_b, cache_stride_f, delta_stride_b, delta_stride_k,
    ENTRIES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Adds the change of listed neurons to their cached activations, ENTRIES of a block at a time.

    Both tensors hold the tokens of a neuron side by side.
    """
    tiles = tl.cdiv(capacity, ENTRIES)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        batch_block = item // tiles
        batch, block = (batch_block // blocks).to(tl.int64), batch_block % blocks
        entry = (item % tiles) * ENTRIES + tl.arange(0, ENTRIES)
        token = block * ROWS + tl.arange(0, ROWS)
        listed = entry < capacity
        list_ptr = indices_ptr + batch_block.to(tl.int64) * capacity
        neuron = tl.load(list_ptr + entry, mask=listed, other=0).to(tl.int64)
        inside = listed[:, None] & (token < rows)[None, :]
        delta = delta_ptr + batch * delta_stride_b + token[None, :]
        change = tl.load(delta + entry.to(tl.int64)[:, None] * delta_stride_k, mask=inside)
        cached = cache_ptr + batch * cache_stride_b + token[None, :]
        cached += neuron[:, None] * cache_stride_f
        old = tl.load(cached, mask=inside)
        new = old.to(tl.float32) + change.to(tl.float32)
        tl.store(cached, new.to(cache_ptr.dtype.element_ty), mask=inside)

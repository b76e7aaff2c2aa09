"""Definition of `sparse_mlp_down`: a few token blocks at a time."""

from __future__ import annotations

import torch

from chipsparse.kernels.checks import block_chunks, compute_dtype, tile_bytes
from chipsparse.kernels.sparse_mlp_down import SparseMLPDown


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
    dtype = compute_dtype(delta)
    # Whole rows are packed much faster than columns, which is worth a transposed copy per call
    # where the weight is not stored that way.
    neuron_rows = weight.t().contiguous()
    block_bytes = (capacity + 2 * block_size) * channels * dtype.itemsize
    limit = tile_bytes(delta.device)
    for b in range(batch):
        for chunk in block_chunks(rows, block_size, block_bytes, limit):
            change = delta[b, chunk.rows].to(dtype).unflatten(0, chunk.shape)
            neurons = neuron_indices[b, chunk.blocks]
            weight_tile = neuron_rows.index_select(0, neurons.flatten()).to(dtype)
            cached = output_cache[b, chunk.rows].unflatten(0, chunk.shape)
            weight_tile = weight_tile.unflatten(0, neurons.shape)
            cached.copy_(torch.baddbmm(cached.to(dtype), change, weight_tile))
    result = output_cache if addend is None else output_cache.to(dtype) + addend.to(dtype)
    return torch.empty(result.shape, dtype=delta.dtype, device=delta.device).copy_(result)

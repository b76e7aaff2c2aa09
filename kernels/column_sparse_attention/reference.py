"""Definition of `column_sparse_attention`."""

from __future__ import annotations

import math

import torch

from chipsparse.kernels.checks import compute_dtype, ranges, tile_bytes
from chipsparse.kernels.column_sparse_attention import ColumnSparseAttention


def column_sparse_attention(call: ColumnSparseAttention) -> torch.Tensor:
    """Run a checked `ColumnSparseAttention`, as many blocks of heads at a time as fit a tile."""
    query = call.query
    key = call.key
    value = call.value
    indices = call.indices
    counts = call.counts
    block_size_q = call.block_size_q
    dtype = compute_dtype(query)
    device = query.device
    batch, heads, rows, head_dim = query.shape
    means = 0
    if call.mean_key is not None and call.mean_value is not None:  # every list begins with them
        means = call.mean_key.shape[2]
        key = torch.cat([call.mean_key, key], 2)
        value = torch.cat([call.mean_value, value], 2)
        listed = torch.arange(means, dtype=torch.int32, device=device)
        indices = torch.cat([listed.expand(*counts.shape, means), indices + means], 3)
        counts = counts + means
    columns = key.shape[2]
    capacity = indices.shape[3]
    bias = torch.zeros(capacity, dtype=dtype, device=device)
    bias[:means] = math.log(call.mean_weight)
    flat_key = key.flatten(0, 2)
    flat_value = value.flatten(0, 2)
    first_row = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1) * columns
    packed_rows = indices + first_row
    # Looking at the counts would make the host wait for a GPU; there the tail is always masked.
    masked = device.type != "cpu" or not bool((counts == capacity).all())
    block_bytes = 2 * (block_size_q + head_dim) * capacity * dtype.itemsize
    limit = tile_bytes(device)
    full = rows // block_size_q
    output = torch.empty(batch, heads, rows, head_dim, dtype=dtype, device=device)
    # First all whole blocks of all heads as one list of tiles, then the ragged last ones.
    for blocks, row_slice, size in (
        (slice(0, full), slice(0, full * block_size_q), block_size_q),
        (slice(full, full + 1), slice(full * block_size_q, rows), rows % block_size_q),
    ):
        if size == 0 or blocks.stop == 0:
            continue
        tiles = query[:, :, row_slice].unflatten(2, (-1, size)).flatten(0, 2)
        lists = packed_rows[:, :, blocks].flatten(0, 2)
        list_counts = counts[:, :, blocks].flatten()
        if masked:  # no row is read that a list does not name: what is NaN there would show
            counted = torch.arange(capacity, device=device) < list_counts[:, None]
            lists = torch.where(counted, lists, lists[:, :1])
        kept = torch.empty(tiles.shape, dtype=dtype, device=device)
        for first, last in ranges(len(tiles), block_bytes, limit):
            kept[first:last] = _attend(
                tiles[first:last].to(dtype) * call.softmax_scale,
                _pack_rows(flat_key, lists[first:last]).to(dtype),
                _pack_rows(flat_value, lists[first:last]).to(dtype),
                list_counts[first:last] if masked else None,
                bias,
            )
        output[:, :, row_slice] = kept.view(batch, heads, -1, head_dim)
    if call.residual is not None:
        residual = call.residual.to(dtype)
        if call.residual_scale is not None:
            residual = residual * call.residual_scale.unsqueeze(-1)
        output += residual
    return output.to(query.dtype)


def _pack_rows(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Packs the rows ``[M, D]`` that lists ``[G, K]`` name into tiles ``[G, K, D]``."""
    return rows.index_select(0, columns.flatten()).unflatten(0, columns.shape)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    counts: torch.Tensor | None,
    bias: torch.Tensor,
) -> torch.Tensor:
    """The output ``[G, R, D]`` of each block: 0 without an entry.

    The query ``[G, R, D]`` is scaled, key and value are ``[G, K, D]``; without counts all K
    entries count. The bias ``[K]`` is added to their scores.
    """
    if key.shape[1] == 0:
        return torch.zeros_like(query)
    if counts is not None:
        ignored = torch.arange(key.shape[1], device=key.device) >= counts[:, None]
        bias = bias.masked_fill(ignored, -torch.inf)[:, None]
    weights = torch.softmax(torch.baddbmm(bias, query, key.mT), dim=-1)
    output = torch.bmm(weights, value)
    return output if counts is None else output.masked_fill_((counts == 0)[:, None, None], 0)

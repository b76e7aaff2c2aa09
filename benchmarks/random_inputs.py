"""Random tensors in the models' layout and of realistic spread, made on the device.

Generators are explicit: the same seed gives the same tensors on one device, and the global random
state is left alone.
"""

from __future__ import annotations

import math

import torch

from benchmarks.cases import Case
from chipsparse.kernels.checks import ranges
from chipsparse.kernels.mask_packing import pack_mask

# Random scores held at a time, with what a sort of them needs.
CHUNK_BYTES = 512 << 20
# Column sums of the bundled model: the top 5, 10 and 20 % of the columns hold 33, 48 and 66 % of a
# block's mass, as in a lognormal of deviation 1.22 = hypot(1, 0.7).
SHARED_DEVIATION, OWN_DEVIATION = 1.0, 0.7
# Groups of neighbouring rows look at similar columns.
NEIGHBOURS = 8


def query_key_value(
    case: Case, *, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normal ``[B, H, N, D]``, views of ``[B, N, H, D]`` as the models' projections give them."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (case.batch, case.tokens, case.heads, case.head_dim)
    query, key, value = (
        torch.randn(shape, generator=generator, device=device, dtype=dtype).transpose(1, 2)
        for _ in range(3)
    )
    return query, key, value


def index_lists(
    batch: int,
    heads: int,
    blocks: int,
    columns: int,
    count: int,
    *,
    device: torch.device,
) -> torch.Tensor:
    """Uniformly drawn distinct columns, ascending: int32 ``[B, H, G, count]``."""
    generator = torch.Generator(device).manual_seed(1)
    lists = torch.empty(batch * heads * blocks, count, dtype=torch.int32, device=device)
    # scores, and values and int64 indices of the top-k
    row_bytes = columns * 16
    for first, last in ranges(len(lists), row_bytes, CHUNK_BYTES):
        scores = torch.rand(last - first, columns, generator=generator, device=device)
        drawn = scores.topk(count, dim=-1, sorted=False).indices.int()
        lists[first:last] = drawn.sort(-1).values
    return lists.view(batch, heads, blocks, count)


def column_sums(
    batch: int,
    heads: int,
    blocks: int,
    columns: int,
    *,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
) -> torch.Tensor:
    """Heavy-tailed sums ``[B, H, G, M]``: lognormal, with a part that neighbouring blocks share.

    A block's sums add up to about its rows, as attention weights do.
    """
    generator = torch.Generator(device).manual_seed(seed)
    sums = torch.empty(batch * heads, blocks, columns, dtype=dtype, device=device)
    variance = SHARED_DEVIATION**2 + OWN_DEVIATION**2
    log_mean = math.log(block_size / columns) - variance / 2
    row_bytes = columns * 16
    for head_sums in sums:
        for first, last in ranges(-(-blocks // NEIGHBOURS), NEIGHBOURS * row_bytes, CHUNK_BYTES):
            part = head_sums[first * NEIGHBOURS : last * NEIGHBOURS]
            shared = torch.randn(last - first, columns, generator=generator, device=device)
            own = torch.randn(part.shape, generator=generator, device=device)
            own.mul_(OWN_DEVIATION).add_(log_mean)
            own += (shared * SHARED_DEVIATION).repeat_interleave(NEIGHBOURS, 0)[: len(part)]
            part.copy_(own.exp_())
    return sums.view(batch, heads, blocks, columns)


def packed_masks(
    batch: int,
    heads: int,
    blocks: int,
    columns: int,
    density: float,
    *,
    device: torch.device,
) -> tuple[torch.Tensor, int]:
    """Packed bits uint8 ``[B, H, G, ceil(M / 8)]`` of random columns, and the largest count."""
    generator = torch.Generator(device).manual_seed(3)
    rows = batch * heads * blocks
    packed = torch.empty(rows, -(-columns // 8), dtype=torch.uint8, device=device)
    largest = 0
    for first, last in ranges(rows, columns * 16, CHUNK_BYTES):
        scores = torch.rand(last - first, columns, generator=generator, device=device)
        mask = scores < density
        largest = max(largest, int(mask.sum(-1).max()))
        packed[first:last] = pack_mask(mask, backend="reference")
    return packed.view(batch, heads, blocks, -1), largest

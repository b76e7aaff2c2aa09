"""Random tensors in the models' layout and of realistic spread, made on the device head by head.

Generators are explicit: the same seed gives the same tensors on one device, and the global random
state is left alone.
"""

from __future__ import annotations

import math

import torch

from benchmarks.cases import Case
from chipsparse.kernels.mask_packing import pack_mask

# Column sums of the bundled model: the top 5, 10 and 20 % of the columns hold 33, 48 and 66 % of a
# block's mass, as in a lognormal of deviation 1.22 = hypot(1, 0.7).
SHARED_DEVIATION, OWN_DEVIATION = 1.0, 0.7
# Groups of neighbouring rows look at similar columns.
NEIGHBOURS = 8

Lists = tuple[int, int, int]  # B, H and G: a list for each block


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


def index_lists(lists: Lists, columns: int, count: int, *, device: torch.device) -> torch.Tensor:
    """Uniformly drawn distinct columns, ascending: int32 ``[B, H, G, count]``."""
    generator = torch.Generator(device).manual_seed(1)
    drawn = torch.empty(*lists, count, dtype=torch.int32, device=device)
    for of_head in drawn.flatten(0, 1):
        scores = torch.rand(len(of_head), columns, generator=generator, device=device)
        of_head[:] = scores.topk(count, dim=-1, sorted=False).indices.sort(-1).values
    return drawn


def column_sums(
    lists: Lists, columns: int, *, block_size: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Heavy-tailed sums ``[B, H, G, M]``: lognormal, with a part that neighbouring blocks share.

    A block's sums add up to about its rows, as attention weights do.
    """
    generator = torch.Generator(device).manual_seed(0)
    sums = torch.empty(*lists, columns, dtype=dtype, device=device)
    log_mean = math.log(block_size / columns) - (SHARED_DEVIATION**2 + OWN_DEVIATION**2) / 2
    for of_head in sums.flatten(0, 1):
        for part in of_head.split(NEIGHBOURS):
            shared = torch.randn(columns, generator=generator, device=device) * SHARED_DEVIATION
            own = torch.randn(part.shape, generator=generator, device=device) * OWN_DEVIATION
            part.copy_((own + shared + log_mean).exp_())
    return sums


def packed_masks(
    lists: Lists, columns: int, density: float, *, device: torch.device
) -> tuple[torch.Tensor, int]:
    """Packed bits uint8 ``[B, H, G, ceil(M / 8)]`` of random columns, and the largest count."""
    generator = torch.Generator(device).manual_seed(3)
    packed = torch.empty(*lists, -(-columns // 8), dtype=torch.uint8, device=device)
    largest = 0
    for of_head in packed.flatten(0, 1):
        mask = torch.rand(len(of_head), columns, generator=generator, device=device) < density
        largest = max(largest, int(mask.sum(-1).max()))
        of_head[:] = pack_mask(mask, backend="reference")
    return packed, largest

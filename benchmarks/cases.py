"""The named cases, shapes of real models, and random tensors of theirs.

Tensors have the models' layout and a realistic spread, and are made on the device head by head.
Generators are explicit: the same seed gives the same tensors on one device, and the global random
state is left alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from chipsparse.kernels.mask_packing import pack_mask

# Column sums of the bundled model: the top 5, 10 and 20 % of the columns hold 33, 48 and 66 % of a
# block's mass, as in a lognormal of deviation 1.22 = hypot(1, 0.7).
SHARED_DEVIATION, OWN_DEVIATION = 1.0, 0.7
# Groups of neighbouring rows look at similar columns.
NEIGHBOURS = 8

Lists = tuple[int, int, int]  # B, H and G: a list for each block


@dataclass(frozen=True)
class Case:
    """One layer of a model at one video or image size.

    Attributes:
        name: how ``--case`` and the records call it.
        batch: B.
        heads: H.
        tokens: N, both the rows and the columns of attention.
        head_dim: D.
        channels: C, width of the hidden states.
        mlp_width: F, neurons of the MLP.
        density: share of the columns that a query block of sparse attention keeps.
        mlp_tokens: rows of the MLP per sample; None for all tokens.
        mlp_density: share of the neurons that a token block of the sparse MLP recomputes.
    """

    name: str
    batch: int
    heads: int
    tokens: int
    head_dim: int
    channels: int
    mlp_width: int
    density: float
    mlp_tokens: int | None = None
    mlp_density: float = 0.3

    @property
    def mlp_rows(self) -> int:
        """Rows of the MLP in one sample."""
        return self.tokens if self.mlp_tokens is None else self.mlp_tokens

    def scaled(self, *, tokens: int | None = None, heads: int | None = None) -> Case:
        """The case with fewer or more tokens and heads; its name tells where they changed."""
        tokens = self.tokens if tokens is None else tokens
        heads = self.heads if heads is None else heads
        if (tokens, heads) == (self.tokens, self.heads):
            return self
        name = f"{self.name.split()[0]} N{tokens} H{heads}"
        mlp_tokens = None if self.mlp_tokens is None else min(self.mlp_tokens, tokens)
        return replace(self, name=name, tokens=tokens, heads=heads, mlp_tokens=mlp_tokens)


CASES = {
    case.name: case
    for case in (
        # 720x1280, 129 frames: 118,800 video tokens and 256 of text
        Case("hunyuan_720p", 1, 24, 119_056, 128, 3072, 12_288, 0.07),
        Case("hunyuan_32k", 1, 24, 32_256, 128, 3072, 12_288, 0.07),
        # 720x1280, 81 frames
        Case("wan14b_720p", 1, 40, 75_600, 128, 5120, 13_824, 0.10, mlp_tokens=32_768),
        # 480x832, 81 frames
        Case("wan1b_480p", 1, 12, 32_760, 128, 1536, 8960, 0.10),
        # FLUX.1-dev: 3,840 image tokens and 512 of text
        Case("flux_1280x768", 1, 24, 4352, 128, 3072, 12_288, 0.175, 4096, 0.29),
        # the image tokens alone, as in the double blocks
        Case("flux_image", 1, 24, 3840, 128, 3072, 12_288, 0.175, mlp_density=0.29),
        Case("d64_video", 2, 30, 17_776, 64, 1920, 7680, 0.10),
        # tails everywhere: no length is a multiple of a tile
        Case("odd", 2, 3, 1337, 128, 384, 1112, 0.25, mlp_tokens=333),
        Case("odd_d64", 2, 3, 1337, 64, 192, 1112, 0.25, mlp_tokens=333),
    )
}


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

"""The named cases, shapes of real models, their random tensors, and the places of checks.

Tensors have the models' layout and a realistic spread, and are made on the device. Generators are
explicit: the same seed gives the same tensors on one device, and the global random state is left
alone.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch

from chipsparse.kernels.checks import block_count
from chipsparse.kernels.mask_packing import pack_mask

# Column sums of the bundled model: the top 5, 10 and 20 % of the columns hold 33, 48 and 66 % of a
# block's mass, as in a lognormal of this deviation.
DEVIATION = 1.22
# Largest ||actual - expected|| / ||expected|| of an output, per dtype of the inputs.
OUTPUT_LIMIT = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}

Lists = tuple[int, int, int]  # B, H and G: a list for each block


@dataclass(frozen=True)
class Case:
    """One layer of a model at one video or image size."""

    name: str
    batch: int  # B
    heads: int  # H
    tokens: int  # N, both the rows and the columns of attention
    head_dim: int  # D
    channels: int  # C, width of the hidden states
    mlp_width: int  # F, neurons of the MLP
    density: float  # share of the columns that a query block keeps
    mlp_tokens: int | None = None  # rows of the MLP per sample; None for all tokens
    mlp_density: float = 0.3  # share of the neurons that a token block recomputes

    @property
    def mlp_rows(self) -> int:
        """Rows of the MLP per sample; without a number of its own, all tokens."""
        return min(self.tokens, self.mlp_tokens or self.tokens)

    def scaled(self, *, tokens: int, heads: int) -> Case:
        """The case with fewer or more tokens and heads; its name tells where they changed."""
        if (tokens, heads) == (self.tokens, self.heads):
            return self
        name = f"{self.name.split()[0]} N{tokens} H{heads}"
        return replace(self, name=name, tokens=tokens, heads=heads)


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
    case: Case,
    *,
    device: torch.device,
    dtype: torch.dtype,
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
    lists: Lists,
    columns: int,
    *,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Heavy-tailed sums ``[B, H, G, M]``: a block's add up to about its rows, as weights do."""
    generator = torch.Generator(device).manual_seed(0)
    sums = torch.empty(*lists, columns, dtype=dtype, device=device)
    log_mean = math.log(block_size / columns) - DEVIATION**2 / 2
    return sums.log_normal_(log_mean, DEVIATION, generator=generator)


def packed_masks(
    lists: Lists,
    columns: int,
    density: float,
    *,
    device: torch.device,
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


class WrongResultError(Exception):
    """A result is too far from the reference for its time to mean anything."""


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``||actual - expected|| / ||expected||`` in float32."""
    difference = actual.float() - expected.float()
    return (difference.norm() / expected.float().norm()).item()


def require(what: str, error: float, limit: float, where: object) -> float:
    """Returns the error; raises `WrongResultError` where it is NaN or above the limit."""
    if not error <= limit:
        raise WrongResultError(f"{what} {error:.2e} exceeds {limit:.0e} at {where}; not timed")
    return error


def check_finite(output: torch.Tensor) -> None:
    """Raises `WrongResultError` where the whole output has a NaN or an infinity."""
    if not bool(output.isfinite().all()):
        raise WrongResultError("the output is not finite everywhere; not timed")


@dataclass(frozen=True)
class Sample:
    """One query block of one head, as indices that keep every dimension."""

    head: tuple[slice, slice]  # in `[B, H, ...]`
    rows: tuple[slice, slice, slice]  # in `[B, H, N, ...]`
    block: tuple[slice, slice, slice]  # in `[B, H, G, ...]`

    def __str__(self) -> str:
        batch, head, block = (index.start for index in self.block)
        return f"batch {batch}, head {head}, block {block}"


def samples(batch: int, heads: int, tokens: int, block_size: int) -> list[Sample]:
    """The first block of the first head, the last one of the last, three between.

    A whole reference would take minutes at the large cases. These blocks, with the ragged one among
    them, find a wrong tile, stride or tail.
    """
    blocks = block_count(tokens, block_size)
    picked = [0, *random.Random(0).choices(range(blocks), k=3), blocks - 1]
    drawn = []
    for i, block in enumerate(picked):
        b, h = (i * (count - 1) // (len(picked) - 1) for count in (batch, heads))
        head = slice(b, b + 1), slice(h, h + 1)
        rows = slice(block * block_size, min(tokens, (block + 1) * block_size))
        drawn.append(Sample(head, (*head, rows), (*head, slice(block, block + 1))))
    return drawn

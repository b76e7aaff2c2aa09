"""Checks of a kernel's result against the fp32 reference, on sampled query blocks of the same case.

A whole reference would take minutes at the large cases. Five blocks, spread over the heads, with
the first and the last (ragged) one among them, find a wrong tile, stride or tail.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from chipsparse.kernels.checks import block_count

# Largest ||actual - expected|| / ||expected|| of a block's output, per dtype of the inputs.
OUTPUT_LIMIT = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
# Largest difference of a log-sum-exp.
LSE_LIMIT = 2e-3
# Largest relative error of column sums, which half precision inputs give in half precision.
SUMS_LIMIT = 2e-2
# A selection may be approximate: the share by which its counts may be off, and that it may miss.
COUNT_LIMIT, MISSED_LIMIT = 0.01, 0.02

Errors = dict[str, float]


class WrongResultError(Exception):
    """A result is too far from the reference for its time to mean anything."""


@dataclass(frozen=True)
class Sample:
    """One query block of one head, as slices that keep every dimension."""

    batch: slice
    head: slice
    block: slice
    rows: slice

    @property
    def head_of(self) -> tuple[slice, slice]:
        """Index of the head in ``[B, H, ...]``."""
        return self.batch, self.head

    @property
    def rows_of(self) -> tuple[slice, slice, slice]:
        """Index of the block's rows in ``[B, H, N, ...]``."""
        return self.batch, self.head, self.rows

    @property
    def block_of(self) -> tuple[slice, slice, slice]:
        """Index of the block in ``[B, H, G, ...]``."""
        return self.batch, self.head, self.block

    def __str__(self) -> str:
        return f"batch {self.batch.start}, head {self.head.start}, block {self.block.start}"


def samples(batch: int, heads: int, tokens: int, block_size: int) -> Iterator[Sample]:
    """The first block of the first head, the last one of the last, three between."""
    blocks = block_count(tokens, block_size)
    picked = [0, *random.Random(0).choices(range(blocks), k=3), blocks - 1]
    for i, block in enumerate(picked):
        b, h = (i * (count - 1) // (len(picked) - 1) for count in (batch, heads))
        rows = slice(block * block_size, min(tokens, (block + 1) * block_size))
        yield Sample(slice(b, b + 1), slice(h, h + 1), slice(block, block + 1), rows)


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


def check_attention(
    result: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], sample: Sample
) -> Errors:
    """Checks output, log-sum-exp and, where there are any, column sums of a block.

    Args:
        result: of all blocks and heads.
        expected: of the sample alone.

    Raises:
        WrongResultError: one of them is beyond its limit.
    """
    output, lse = (tensor[sample.rows_of] for tensor in result[:2])
    limit, lse_error = OUTPUT_LIMIT[output.dtype], (lse.float() - expected[1]).abs().max().item()
    error = relative_error(output, expected[0])
    errors = {
        "rel_error": require("relative error", error, limit, sample),
        "lse_error": require("lse error", lse_error, LSE_LIMIT, sample),
    }
    return errors | check_sums(result[2:], expected[2:], sample)


def check_sums(
    result: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], sample: Sample
) -> Errors:
    """Checks column sums ``[B, H, G, M]``, where the operation gives some."""
    if not expected:
        return {}
    error = relative_error(result[0][sample.block_of], expected[0])
    return {"sums_error": require("sums error", error, SUMS_LIMIT, sample)}


def check_selection(
    mask: torch.Tensor, column_sums: torch.Tensor, keep_count: int, where: object
) -> Errors:
    """Checks how many columns a row keeps, and how many of the largest are among them.

    Sums in half precision have many ties: any column as large as the smallest that an exact top-k
    keeps is as good as it. ``rel_error`` is the missed share, one minus the recall.

    Raises:
        WrongResultError: one of them is beyond its limit.
    """
    threshold = column_sums.topk(keep_count, dim=-1).values[..., -1:]
    kept = (mask & (column_sums >= threshold)).sum().item()
    missed = max(0.0, 1 - kept / keep_count)
    off = abs(mask.sum().item() - keep_count)
    # One column more or less is rounding, whatever share it is.
    count_error = 0.0 if off <= 1 else off / keep_count
    return {
        "rel_error": require("missed share", missed, MISSED_LIMIT, where),
        "count_error": require("count error", count_error, COUNT_LIMIT, where),
    }


def check_neurons(neurons: torch.Tensor, expected: torch.Tensor, where: object) -> Errors:
    """Checks a block's list of neurons; ``rel_error`` is the share of the exact list it misses.

    Raises:
        WrongResultError: it misses too many, or does not ascend.
    """
    if not bool((neurons.diff() > 0).all()):
        raise WrongResultError(f"the neurons do not ascend at {where}; not timed")
    missed = 1 - torch.isin(expected, neurons).float().mean().item()
    return {"rel_error": require("missed share", missed, MISSED_LIMIT, where)}

"""The attention operations as the benchmark runs them: calls, checks, baselines, useful work.

Each function here describes one operation on one case as `Work`. Sums of all heads may not fit in
memory, so a work consists of parts, consecutive heads each, whose times add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import random_inputs
from benchmarks.case_tensors import CaseTensors
from benchmarks.sampled_checks import (
    SUMS_LIMIT,
    Errors,
    Sample,
    check_attention,
    check_finite,
    check_selection,
    relative_error,
    require,
    samples,
    worst,
)
from chipsparse.kernels.checks import block_count, ranges
from chipsparse.kernels.column_selection import column_selection
from chipsparse.kernels.column_sparse_attention import column_sparse_attention
from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention_column_sums import dense_attention_column_sums
from chipsparse.kernels.dispatch import Operation
from chipsparse.kernels.mask_packing import packed_to_indices, unpack_mask

DELTA_RULES = ("none", "merge", "difference")


@dataclass(frozen=True)
class Settings:
    """What the command line sets for a work.

    Attributes:
        block_size: R, query or token rows per block.
        density: in place of the case's own; None keeps that.
        delta_rule: of `column_sparse_attention`, one of `DELTA_RULES`.
        transient_bytes: bound of the column sums held at a time; one head is the least.
    """

    block_size: int = 128
    density: float | None = None
    delta_rule: str = "none"
    transient_bytes: int = 8 << 30


@dataclass(frozen=True)
class TimedCall:
    """One call of a work.

    Attributes:
        call: runs the operation with the named backend.
        check: errors of its result; raises `WrongResultError` where they are too large.
        baseline: what the call replaces, where that is not dense attention.
    """

    call: Callable[[str], Any]
    check: Callable[[Any], Errors]
    baseline: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Work:
    """One operation on one case.

    Attributes:
        operation: has the backends.
        inputs: what they accept or not, as `Operation.choose` takes it.
        parts: makes the parts, one at a time.
        baseline: ``dense`` for dense attention, the name of what the parts bring, or None.
        fields: what its records say of it besides the measurement.
        flops: useful ones, or None.
        moved_bytes: inputs read and results written once, where that bounds the time, or None.
    """

    operation: Operation[..., Any]
    inputs: tuple[Any, ...]
    parts: Callable[[], Iterator[TimedCall]]
    baseline: str | None
    fields: dict[str, Any]
    flops: int | None = None
    moved_bytes: int | None = None


def kept_columns(tensors: CaseTensors, settings: Settings) -> int:
    """How many columns a block keeps."""
    case = tensors.case
    keep = case.density if settings.density is None else settings.density
    return min(case.tokens, max(1, round(keep * case.tokens)))


def attention_flops(tensors: CaseTensors, columns_per_row: int) -> int:
    """Two products of two operations each, per head, row, kept column and channel."""
    case = tensors.case
    return 4 * case.batch * case.heads * case.head_dim * case.tokens * columns_per_row


def dense(tensors: CaseTensors, settings: Settings) -> Work:
    """`dense_attention`."""
    case = tensors.case
    inputs = (tensors.query, tensors.key, tensors.value)

    def check(result: tuple[torch.Tensor, torch.Tensor]) -> Errors:
        output, lse = result
        check_finite(output)
        return worst(
            [
                check_attention(
                    output[sample.rows_of],
                    lse[sample.rows_of],
                    *dense_attention(*_in_float32(tensors, sample), backend="reference"),
                    sample,
                )
                for sample in samples(case.batch, case.heads, case.tokens, settings.block_size)
            ]
        )

    def parts() -> Iterator[TimedCall]:
        yield TimedCall(lambda name: dense_attention(*inputs, backend=name), check)

    return Work(
        dense_attention,
        inputs,
        parts,
        baseline="dense",
        fields={"density": 1.0},
        flops=attention_flops(tensors, case.tokens),
    )


def column_sums(tensors: CaseTensors, settings: Settings) -> Work:
    """`dense_attention_column_sums`, with the LSE of a dense run."""
    case, rows = tensors.case, settings.block_size
    inputs = (tensors.query, tensors.key, tensors.value)
    op = dense_attention_column_sums

    def part(first: int, last: int) -> TimedCall:
        heads = slice(first, last)
        arguments = [tensor[:, heads] for tensor in (*inputs, tensors.lse)]

        def check(result: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Errors:
            output, lse, sums = result
            check_finite(output)
            errors = []
            for sample in samples(case.batch, last - first, case.tokens, rows):
                sample_of_all = sample.in_heads_from(first)
                expected, expected_lse, expected_sums = op(
                    *_in_float32(tensors, sample_of_all),
                    tensors.lse[sample_of_all.rows_of],
                    block_size_q=rows,
                    backend="reference",
                )
                error = check_attention(
                    output[sample.rows_of],
                    lse[sample.rows_of],
                    expected,
                    expected_lse,
                    sample_of_all,
                )
                sums_error = relative_error(sums[sample.block_of], expected_sums)
                error["sums_error"] = require("sums error", sums_error, SUMS_LIMIT, sample_of_all)
                errors.append(error)
            return worst(errors)

        return TimedCall(lambda name: op(*arguments, block_size_q=rows, backend=name), check)

    def parts() -> Iterator[TimedCall]:
        for first, last in _head_ranges(tensors, settings):
            yield part(first, last)

    return Work(
        dense_attention_column_sums,
        (*inputs, rows),
        parts,
        baseline="dense",
        fields={"density": 1.0, "block_size": rows},
        flops=attention_flops(tensors, case.tokens),
    )


def sparse(tensors: CaseTensors, settings: Settings) -> Work:
    """`column_sparse_attention` over random lists of equal length."""
    case, rows = tensors.case, settings.block_size
    blocks, count = block_count(case.tokens, rows), kept_columns(tensors, settings)
    inputs = (tensors.query, tensors.key, tensors.value)
    op = column_sparse_attention
    indices = random_inputs.index_lists(
        case.batch, case.heads, blocks, case.tokens, count, device=tensors.device
    )
    counts = torch.full(indices.shape[:3], count, dtype=torch.int32, device=tensors.device)
    rule, cache = _delta_cache(tensors, settings.delta_rule)

    def check(result: tuple[torch.Tensor, torch.Tensor]) -> Errors:
        output, lse = result
        check_finite(output)
        errors = []
        for sample in samples(case.batch, case.heads, case.tokens, rows):
            expected, expected_lse = op(
                *_in_float32(tensors, sample),
                indices[sample.block_of],
                counts[sample.block_of],
                block_size_q=rows,
                delta_rule=rule,
                **{name: tensor[sample.rows_of] for name, tensor in cache.items()},
                backend="reference",
            )
            errors.append(
                check_attention(
                    output[sample.rows_of], lse[sample.rows_of], expected, expected_lse, sample
                )
            )
        return worst(errors)

    def call(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return op(
            *inputs, indices, counts, block_size_q=rows, delta_rule=rule, **cache, backend=name
        )

    def parts() -> Iterator[TimedCall]:
        yield TimedCall(call, check)

    return Work(
        column_sparse_attention,
        (*inputs, rows),
        parts,
        baseline="dense",
        fields={
            "density": count / case.tokens,
            "ideal": case.tokens / count,
            "block_size": rows,
            "delta_rule": settings.delta_rule,
        },
        flops=attention_flops(tensors, count),
    )


def selection(tensors: CaseTensors, settings: Settings) -> Work:
    """`column_selection` from heavy-tailed sums, against `torch.topk` head by head."""
    case, rows = tensors.case, settings.block_size
    blocks, count = block_count(case.tokens, rows), kept_columns(tensors, settings)

    def sums_of(heads: int, seed: int) -> torch.Tensor:
        return random_inputs.column_sums(
            case.batch,
            heads,
            blocks,
            case.tokens,
            block_size=rows,
            device=tensors.device,
            dtype=tensors.dtype,
            seed=seed,
        )

    def part(first: int, last: int) -> TimedCall:
        sums = sums_of(last - first, seed=first)

        def check(packed: torch.Tensor) -> Errors:
            errors = []
            for sample in samples(case.batch, last - first, case.tokens, rows):
                mask = unpack_mask(packed[sample.block_of], case.tokens, backend="reference")
                where = sample.in_heads_from(first)
                errors.append(check_selection(mask, sums[sample.block_of], count, where))
            return worst(errors)

        def topk() -> None:
            for head_sums in sums.flatten(0, 1):
                head_sums.topk(count, dim=-1, sorted=False)

        return TimedCall(
            lambda name: column_selection(sums, keep_count=count, backend=name),
            check,
            topk,
        )

    def parts() -> Iterator[TimedCall]:
        for first, last in _head_ranges(tensors, settings):
            yield part(first, last)

    packed_bytes = -(-case.tokens // 8)
    row_bytes = case.tokens * tensors.dtype.itemsize + packed_bytes
    return Work(
        column_selection,
        (sums_of(1, seed=0),),
        parts,
        baseline="torch.topk",
        fields={"density": count / case.tokens, "block_size": rows},
        moved_bytes=case.batch * case.heads * blocks * row_bytes,
    )


def indices(tensors: CaseTensors, settings: Settings) -> Work:
    """`packed_to_indices` with the capacity given; nothing in a library does the same."""
    case, rows = tensors.case, settings.block_size
    blocks = block_count(case.tokens, rows)
    keep = kept_columns(tensors, settings) / case.tokens
    packed, capacity = random_inputs.packed_masks(
        case.batch, case.heads, blocks, case.tokens, keep, device=tensors.device
    )

    def call(packed: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return packed_to_indices(packed, case.tokens, capacity=capacity, backend=name)

    def check_sample(found: torch.Tensor, found_counts: torch.Tensor, sample: Sample) -> Errors:
        expected, expected_counts = call(packed[sample.block_of], "reference")
        count = int(expected_counts)
        counts_off = abs(int(found_counts[sample.block_of]) - count)
        list_, right = found[sample.block_of].flatten(), expected.flatten()
        # Entries past the count only have to be columns.
        wrong = (list_[:count] != right[:count]).sum() + (
            (list_[count:] < 0) | (list_[count:] >= case.tokens)
        ).sum()
        share = (counts_off + wrong.item()) / max(1, count)
        return {"rel_error": require("share of wrong indices", share, 0, sample)}

    def check(result: tuple[torch.Tensor, torch.Tensor]) -> Errors:
        return worst(
            [
                check_sample(*result, sample)
                for sample in samples(case.batch, case.heads, case.tokens, rows)
            ]
        )

    def parts() -> Iterator[TimedCall]:
        yield TimedCall(lambda name: call(packed, name), check)

    listed = case.batch * case.heads * blocks * (capacity + 1)
    return Work(
        packed_to_indices,
        (packed,),
        parts,
        baseline=None,
        fields={"density": keep, "block_size": rows, "capacity": capacity},
        moved_bytes=packed.nbytes + 4 * listed,
    )


OPS: dict[str, Callable[[CaseTensors, Settings], Work]] = {
    "dense_attention": dense,
    "dense_attention_column_sums": column_sums,
    "column_selection": selection,
    "mask_packing": indices,
    "column_sparse_attention": sparse,
}


def _in_float32(
    tensors: CaseTensors, sample: Sample
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A sample's query rows, and the keys and values of its head."""
    query = tensors.query[sample.rows_of]
    key, value = tensors.key[sample.head_of], tensors.value[sample.head_of]
    return query.float(), key.float(), value.float()


def _delta_cache(tensors: CaseTensors, delta_rule: str) -> tuple[Any, dict[str, Any]]:
    """The rule as the operation takes it, and random tensors of what a refresh records for it."""
    if delta_rule == "none":
        return None, {}
    generator = random_inputs.generator_on(tensors.device, seed=4)
    residual = torch.empty_like(tensors.query).normal_(generator=generator)
    if delta_rule == "difference":
        return delta_rule, {"residual": residual}
    mass = torch.rand(tensors.lse.shape, generator=generator, device=tensors.device)
    return delta_rule, {
        "residual": residual,
        "lse_dense": tensors.lse,
        "kept_mass": mass * 0.6 + 0.3,
    }


def _head_ranges(tensors: CaseTensors, settings: Settings) -> Iterator[tuple[int, int]]:
    """Consecutive heads whose column sums stay within the limit.

    Sums are in the dtype of the inputs.
    """
    case = tensors.case
    row_bytes = case.tokens * tensors.dtype.itemsize
    head_bytes = case.batch * block_count(case.tokens, settings.block_size) * row_bytes
    return ranges(case.heads, head_bytes, settings.transient_bytes)

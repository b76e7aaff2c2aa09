"""The attention operations as the benchmark runs them: calls, checks, baselines, useful work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import random_inputs
from benchmarks.case_tensors import CaseTensors
from benchmarks.kernel_work import Settings, TimedCall, Work, kept
from benchmarks.sampled_checks import (
    SUMS_LIMIT,
    Errors,
    Sample,
    check_attention,
    check_selection,
    relative_error,
    require,
    samples,
)
from chipsparse.kernels.checks import block_count, ranges
from chipsparse.kernels.column_selection import column_selection
from chipsparse.kernels.column_sparse_attention import column_sparse_attention
from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention_column_sums import dense_attention_column_sums
from chipsparse.kernels.mask_packing import packed_to_indices, unpack_mask

DELTA_RULES = ("none", "merge", "difference")

Tensors = tuple[torch.Tensor, ...]


def dense(tensors: CaseTensors, settings: Settings) -> Work:
    """`dense_attention`."""
    inputs = tensors.qkv

    def compare(result: Tensors, sample: Sample) -> Errors:
        expected = dense_attention(*in_float32(tensors, sample), backend="reference")
        return check_attention([each[sample.rows_of] for each in result], expected, sample)

    return Work(
        dense_attention,
        inputs,
        whole(tensors, settings, lambda name: dense_attention(*inputs, backend=name), compare),
        baseline="dense",
        fields={"density": 1.0},
        flops=flops_of(tensors, tensors.case.tokens),
    )


def column_sums(tensors: CaseTensors, settings: Settings) -> Work:
    """`dense_attention_column_sums`, with the log-sum-exp of a dense run."""
    rows = settings.block_size
    inputs = tensors.qkv
    op = dense_attention_column_sums

    def part(first: int, last: int) -> TimedCall:
        query, key, value, lse = (each[:, first:last] for each in (*inputs, tensors.lse))

        def call(name: str) -> Tensors:
            return op(query, key, value, lse, block_size_q=rows, backend=name)

        def compare(result: Tensors, sample: Sample) -> Errors:
            of_all = sample.in_heads_from(first)
            expected = op(
                *in_float32(tensors, of_all),
                tensors.lse[of_all.rows_of],
                block_size_q=rows,
                backend="reference",
            )
            error = check_attention([each[sample.rows_of] for each in result[:2]], expected, of_all)
            sums_error = relative_error(result[2][sample.block_of], expected[2])
            return error | {"sums_error": require("sums error", sums_error, SUMS_LIMIT, of_all)}

        return TimedCall(call, compare, samples_of(tensors, rows, last - first))

    return Work(
        op,
        (*inputs, rows),
        by_heads(tensors, settings, part),
        baseline="dense",
        fields={"density": 1.0, "block_size": rows},
        flops=flops_of(tensors, tensors.case.tokens),
    )


def sparse(tensors: CaseTensors, settings: Settings) -> Work:
    """`column_sparse_attention` over random lists of equal length."""
    case, rows = tensors.case, settings.block_size
    count = kept(settings, case.density, case.tokens)
    inputs = tensors.qkv
    indices = random_inputs.index_lists(
        *(case.batch, case.heads, block_count(case.tokens, rows), case.tokens, count),
        device=tensors.device,
    )
    counts = torch.full(indices.shape[:3], count, dtype=torch.int32, device=tensors.device)
    rule, cache = _delta_cache(tensors, settings.delta_rule)

    def call(name: str) -> Tensors:
        return column_sparse_attention(
            *inputs, indices, counts, block_size_q=rows, delta_rule=rule, **cache, backend=name
        )

    def compare(result: Tensors, sample: Sample) -> Errors:
        expected = column_sparse_attention(
            *in_float32(tensors, sample),
            indices[sample.block_of],
            counts[sample.block_of],
            block_size_q=rows,
            delta_rule=rule,
            **{name: tensor[sample.rows_of] for name, tensor in cache.items()},
            backend="reference",
        )
        return check_attention([each[sample.rows_of] for each in result], expected, sample)

    return Work(
        column_sparse_attention,
        (*inputs, rows),
        whole(tensors, settings, call, compare),
        baseline="dense",
        fields={
            "density": count / case.tokens,
            "ideal": case.tokens / count,
            "block_size": rows,
            "delta_rule": settings.delta_rule,
        },
        flops=flops_of(tensors, count),
    )


def selection(tensors: CaseTensors, settings: Settings) -> Work:
    """`column_selection` from heavy-tailed sums, against `torch.topk` head by head."""
    case, rows = tensors.case, settings.block_size
    blocks = block_count(case.tokens, rows)
    count = kept(settings, case.density, case.tokens)

    def sums_of(heads: int, seed: int) -> torch.Tensor:
        return random_inputs.column_sums(
            *(case.batch, heads, blocks, case.tokens),
            block_size=rows,
            device=tensors.device,
            dtype=tensors.dtype,
            seed=seed,
        )

    def part(first: int, last: int) -> TimedCall:
        sums = sums_of(last - first, seed=first)

        def compare(packed: torch.Tensor, sample: Sample) -> Errors:
            mask = unpack_mask(packed[sample.block_of], case.tokens, backend="reference")
            of_all = sample.in_heads_from(first)
            return check_selection(mask, sums[sample.block_of], count, of_all)

        def topk() -> None:
            for head_sums in sums.flatten(0, 1):
                head_sums.topk(count, dim=-1, sorted=False)

        return TimedCall(
            lambda name: column_selection(sums, keep_count=count, backend=name),
            compare,
            samples_of(tensors, rows, last - first),
            topk,
        )

    row_bytes = case.tokens * tensors.dtype.itemsize + -(-case.tokens // 8)
    return Work(
        column_selection,
        (sums_of(1, seed=0),),
        by_heads(tensors, settings, part),
        baseline="torch.topk",
        fields={"density": count / case.tokens, "block_size": rows},
        moved_bytes=case.batch * case.heads * blocks * row_bytes,
    )


def indices(tensors: CaseTensors, settings: Settings) -> Work:
    """`packed_to_indices` with the capacity given; nothing in a library does the same."""
    case, rows = tensors.case, settings.block_size
    blocks = block_count(case.tokens, rows)
    keep = kept(settings, case.density, case.tokens) / case.tokens
    packed, capacity = random_inputs.packed_masks(
        case.batch, case.heads, blocks, case.tokens, keep, device=tensors.device
    )

    def call(packed: torch.Tensor, name: str) -> Tensors:
        return packed_to_indices(packed, case.tokens, capacity=capacity, backend=name)

    def compare(result: Tensors, sample: Sample) -> Errors:
        expected, expected_counts = call(packed[sample.block_of], "reference")
        count = int(expected_counts)
        found, found_counts = (each[sample.block_of].flatten() for each in result)
        # Entries past the count only have to be columns.
        wrong = (found[:count] != expected.flatten()[:count]).sum()
        wrong += ((found[count:] < 0) | (found[count:] >= case.tokens)).sum()
        share = (abs(int(found_counts) - count) + wrong.item()) / max(1, count)
        return {"rel_error": require("share of wrong indices", share, 0, sample)}

    listed = case.batch * case.heads * blocks * (capacity + 1)
    return Work(
        packed_to_indices,
        (packed,),
        whole(tensors, settings, lambda name: call(packed, name), compare),
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


def flops_of(tensors: CaseTensors, columns_per_row: int) -> int:
    """Two products of two operations each, per head, row, kept column and channel."""
    case = tensors.case
    return 4 * case.batch * case.heads * case.head_dim * case.tokens * columns_per_row


def samples_of(tensors: CaseTensors, rows: int, heads: int) -> list[Sample]:
    """Where the result of so many heads is compared."""
    return list(samples(tensors.case.batch, heads, tensors.case.tokens, rows))


def whole(
    tensors: CaseTensors,
    settings: Settings,
    call: Callable[[str], Any],
    compare: Callable[[Any, Sample], Errors],
) -> Callable[[], Iterator[TimedCall]]:
    """One part with all heads."""
    places = samples_of(tensors, settings.block_size, tensors.case.heads)
    return lambda: iter([TimedCall(call, compare, places)])


def by_heads(
    tensors: CaseTensors, settings: Settings, part: Callable[[int, int], TimedCall]
) -> Callable[[], Iterator[TimedCall]]:
    """Parts of consecutive heads whose column sums, in the dtype of the inputs, stay in bounds."""
    case = tensors.case
    row_bytes = case.tokens * tensors.dtype.itemsize
    head_bytes = case.batch * block_count(case.tokens, settings.block_size) * row_bytes
    bounds = list(ranges(case.heads, head_bytes, settings.transient_bytes))
    return lambda: (part(first, last) for first, last in bounds)


def in_float32(
    tensors: CaseTensors, sample: Sample
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A sample's query rows, and the keys and values of its head."""
    query, key, value = tensors.qkv
    rows, head = sample.rows_of, sample.head_of
    return query[rows].float(), key[head].float(), value[head].float()


def _delta_cache(tensors: CaseTensors, delta_rule: str) -> tuple[Any, dict[str, Any]]:
    """The rule as the operation takes it, and random tensors of what a refresh records for it."""
    if delta_rule == "none":
        return None, {}
    generator = torch.Generator(tensors.device).manual_seed(4)
    cache = {"residual": torch.empty_like(tensors.qkv[0]).normal_(generator=generator)}
    if delta_rule == "merge":
        mass = torch.rand(tensors.lse.shape, generator=generator, device=tensors.device)
        cache |= {"lse_dense": tensors.lse, "kept_mass": mass * 0.6 + 0.3}
    return delta_rule, cache

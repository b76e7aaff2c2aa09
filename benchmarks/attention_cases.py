"""Cases of the attention operations, in 16 and in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks import cases
from benchmarks.kernel_cases import Inputs, Kernel, Settings, kernel
from benchmarks.kernel_checks import (
    LSE_LIMIT,
    Errors,
    Sample,
    check_attention,
    check_selection,
    check_sums,
    relative_error,
    require,
)
from chipsparse.kernels.checks import block_count
from chipsparse.kernels.column_selection import column_selection
from chipsparse.kernels.column_sparse_attention import column_sparse_attention
from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention_column_sums import dense_attention_column_sums
from chipsparse.kernels.fp8_dense_attention import fp8_dense_attention
from chipsparse.kernels.fp8_quantization import Fp8Attention, fp8_quantization
from chipsparse.kernels.mask_packing import packed_to_indices, unpack_mask

# Attention in 8 bits: largest error against float64, and of a kernel against attention of what was
# rounded. The values are random, so the output is a mean of what cancels, and errors are large
# beside it: it falls with the root of the columns, and what tensor cores cut off from their sums
# does not. On an H200 that came to 2.3e-4 times this root.
OUTPUT_LIMIT = 5e-2
CUT_OFF_LIMIT = 3e-4
LSE_ROUNDED_LIMIT = 1e-2  # root mean square, against float64

Tensors = tuple[torch.Tensor, ...]


@kernel("dense_attention")
def dense(inputs: Inputs, settings: Settings) -> Kernel:
    """`dense_attention`."""
    return Kernel(
        dense_attention,
        lambda name: dense_attention(*inputs.qkv, backend=name),
        _against(lambda sample: dense_attention(*inputs.of(sample), backend="reference")),
        inputs.samples(settings.block_size),
        {"density": 1.0},
        flops=inputs.flops(inputs.case.tokens),
    )


def _against(reference: Callable[[Sample], Tensors]) -> Callable[[Tensors, Sample], Errors]:
    """The check of attention against its reference on a sample."""
    return lambda result, sample: check_attention(result, reference(sample), sample)


@kernel("dense_attention_column_sums")
def column_sums(inputs: Inputs, settings: Settings) -> Kernel:
    """`dense_attention_column_sums`, with the log-sum-exp of a dense run."""
    rows, lse = settings.block_size, inputs.lse

    def run(qkv: Tensors, lse: Any, name: str) -> Tensors:
        query, key, value = qkv
        return dense_attention_column_sums(query, key, value, lse, block_size_q=rows, backend=name)

    return Kernel(
        dense_attention_column_sums,
        lambda name: run(inputs.qkv, lse, name),
        _against(lambda sample: run(inputs.of(sample), lse[sample.rows_of], "reference")),
        inputs.samples(rows),
        {"density": 1.0, "block_size": rows},
        flops=inputs.flops(inputs.case.tokens),
    )


@kernel("column_sparse_attention")
def sparse(inputs: Inputs, settings: Settings) -> Kernel:
    """`column_sparse_attention` over random lists of equal length."""
    case, rows = inputs.case, settings.block_size
    count = settings.kept(case.density, case.tokens)
    lists = case.batch, case.heads, block_count(case.tokens, rows)
    indices = cases.index_lists(lists, case.tokens, count, device=inputs.device)
    counts = torch.full(lists, count, dtype=torch.int32, device=inputs.device)
    cache = _delta_cache(inputs, settings.delta_rule)
    rule: Any = None if settings.delta_rule == "none" else settings.delta_rule

    def run(qkv: Tensors, lists: Tensors, cache: dict[str, Any], name: str) -> Tensors:
        options = {"block_size_q": rows, "delta_rule": rule, "backend": name, **cache}
        return column_sparse_attention(*qkv, *lists, **options)

    def reference(sample: Sample) -> Tensors:
        lists = indices[sample.block_of], counts[sample.block_of]
        part = {name: tensor[sample.rows_of] for name, tensor in cache.items()}
        return run(inputs.of(sample), lists, part, "reference")

    return Kernel(
        column_sparse_attention,
        lambda name: run(inputs.qkv, (indices, counts), cache, name),
        _against(reference),
        inputs.samples(rows),
        {
            **{"density": count / case.tokens, "ideal": case.tokens / count},
            **{"block_size": rows, "delta_rule": settings.delta_rule},
        },
        flops=inputs.flops(count),
    )


def _delta_cache(inputs: Inputs, delta_rule: str) -> dict[str, Any]:
    """Random tensors of what a refresh records for a rule."""
    if delta_rule == "none":
        return {}
    generator = torch.Generator(inputs.device).manual_seed(4)
    cache = {"residual": torch.empty_like(inputs.qkv[0]).normal_(generator=generator)}
    if delta_rule == "merge":
        mass = torch.rand(inputs.lse.shape, generator=generator, device=inputs.device)
        cache |= {"lse_dense": inputs.lse, "kept_mass": mass * 0.6 + 0.3}
    return cache


@kernel("column_selection")
def selection(inputs: Inputs, settings: Settings) -> Kernel:
    """`column_selection` from heavy-tailed sums, against `torch.topk` head by head."""
    case, rows = inputs.case, settings.block_size
    blocks, count = block_count(case.tokens, rows), settings.kept(case.density, case.tokens)
    lists, form = (case.batch, case.heads, blocks), {"device": inputs.device}
    sums = cases.column_sums(lists, case.tokens, block_size=rows, dtype=inputs.dtype, **form)

    def check(packed: torch.Tensor, sample: Sample) -> Errors:
        mask = unpack_mask(packed[sample.block_of], case.tokens, backend="reference")
        return check_selection(mask, sums[sample.block_of], count, sample)

    def topk() -> None:
        for head_sums in sums.flatten(0, 1):
            head_sums.topk(count, dim=-1, sorted=False)

    return Kernel(
        column_selection,
        lambda name: column_selection(sums, keep_count=count, backend=name),
        check,
        inputs.samples(rows),
        {"density": count / case.tokens, "block_size": rows},
        "torch.topk",
        topk,
    )


@kernel("mask_packing")
def indices(inputs: Inputs, settings: Settings) -> Kernel:
    """`packed_to_indices` with the capacity given; nothing in a library does the same."""
    case, rows = inputs.case, settings.block_size
    blocks = block_count(case.tokens, rows)
    keep = settings.kept(case.density, case.tokens) / case.tokens
    lists = case.batch, case.heads, blocks
    packed, capacity = cases.packed_masks(lists, case.tokens, keep, device=inputs.device)

    def run(packed: torch.Tensor, name: str) -> Tensors:
        return packed_to_indices(packed, case.tokens, capacity=capacity, backend=name)

    def check(result: Tensors, sample: Sample) -> Errors:
        expected, expected_counts = run(packed[sample.block_of], "reference")
        count = int(expected_counts)
        listed, counts = (tensor[sample.block_of].flatten() for tensor in result)
        # Entries past the count only have to be columns.
        wrong = (listed[:count] != expected.flatten()[:count]).sum()
        wrong += ((listed[count:] < 0) | (listed[count:] >= case.tokens)).sum()
        share = (abs(int(counts) - count) + wrong.item()) / max(1, count)
        return {"rel_error": require("share of wrong indices", share, 0, sample)}

    return Kernel(
        packed_to_indices,
        lambda name: run(packed, name),
        check,
        inputs.samples(rows),
        {"density": keep, "block_size": rows, "capacity": capacity},
        baseline=None,
    )


@kernel("fp8_dense_attention")
def fp8_dense(inputs: Inputs, settings: Settings) -> Kernel:
    """`fp8_dense_attention`; what rounds to 8 bits is part of the time."""
    return _fp8(inputs, settings, {"density": 1.0}, {})


@kernel("fp8_dense_attention_column_sums")
def fp8_column_sums(inputs: Inputs, settings: Settings) -> Kernel:
    """The same with column sums, weighed with the log-sum-exp of a 16-bit run."""
    fields = {"density": 1.0, "block_size": settings.block_size}
    return _fp8(inputs, settings, fields, {"lse_previous": inputs.lse})


def _fp8(
    inputs: Inputs, settings: Settings, fields: dict[str, Any], lse: dict[str, torch.Tensor]
) -> Kernel:
    rows: dict[str, Any] = {"block_size_q": settings.block_size} if lse else {}
    rounded = fp8_quantization(*inputs.qkv, rotate=True)
    limit = math.hypot(OUTPUT_LIMIT, CUT_OFF_LIMIT * inputs.case.tokens**0.5)

    def run(rounded: Fp8Attention, lse: dict[str, Any], name: str) -> Tensors:
        result: Any = fp8_dense_attention(rounded, **lse, **rows, backend=name)
        return tuple(tensor for tensor in result if tensor is not None)

    def check(result: Tensors, sample: Sample) -> Errors:
        """Against attention in float64, and attention of what is in 8 bits in float32."""
        exact, exact_lse = dense_attention(
            *(tensor.double() for tensor in inputs.of(sample)), backend="reference"
        )
        part = {name: tensor[sample.rows_of] for name, tensor in lse.items()}
        same = run(_part(rounded, sample), part, "reference")
        output, output_lse = (tensor[sample.rows_of] for tensor in result[:2])
        error, kernel_error = relative_error(output, exact), relative_error(output, same[0])
        lse_error = (output_lse - same[1]).abs().max().item()
        rounding = (output_lse - exact_lse).pow(2).mean().sqrt().item()
        require("lse error by rounding", rounding, LSE_ROUNDED_LIMIT, sample)
        return {
            "rel_error": require("relative error", error, limit, sample),
            "kernel_error": require("error of the kernel", kernel_error, limit, sample),
            "lse_error": require("lse error", lse_error, LSE_LIMIT, sample),
            **check_sums(result[2:], same[2:], sample),
        }

    return Kernel(
        fp8_dense_attention,
        lambda name: run(fp8_quantization(*inputs.qkv, rotate=True), lse, name),
        check,
        inputs.samples(settings.block_size),
        fields,
        flops=inputs.flops(inputs.case.tokens),
    )


def _part(rounded: Fp8Attention, sample: Sample) -> Fp8Attention:
    """A query block, and the keys and values of its head."""
    tensors = {name: part for name, part in vars(rounded).items() if torch.is_tensor(part)}
    heads = {name: part[sample.head_of] for name, part in tensors.items()}
    rows = {name: heads[name][:, :, sample.rows] for name in ("query", "row_factor", "row_shift")}
    changed: dict[str, Any] = heads | rows
    return replace(rounded, **changed)

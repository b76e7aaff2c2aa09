"""Attention in 8 bits as the benchmark runs it; what rounds to them is part of every time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.attention_ops import by_heads, flops_of, in_float32, samples_of, whole
from benchmarks.case_tensors import CaseTensors
from benchmarks.kernel_work import Settings, TimedCall, Work
from benchmarks.sampled_checks import (
    LSE_LIMIT,
    SUMS_LIMIT,
    Errors,
    Sample,
    relative_error,
    require,
)
from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.fp8_dense_attention import fp8_dense_attention
from chipsparse.kernels.fp8_quantization import Fp8Attention, fp8_quantization

# Largest error against float64, and of a kernel against attention of what was rounded. The values
# are random, so the output is a mean of what cancels, and errors are large beside it: it falls with
# the root of the columns, and what tensor cores cut off from their sums does not. On an H200 that
# came to 2.3e-4 times this root.
OUTPUT_LIMIT = 5e-2
CUT_OFF_LIMIT = 3e-4
LSE_ROUNDED_LIMIT = 1e-2  # root mean square, against float64
# Elements of a channel read and written, in bytes, by what makes 8 bits of 16-bit tensors.
QUANTIZED_BYTES = 13

Tensors = tuple[torch.Tensor, ...]


def quantization(tensors: CaseTensors, settings: Settings) -> Work:
    """`fp8_quantization`, rotated as the layers use it."""
    inputs = tensors.qkv

    def call(name: str) -> Tensors:
        found = fp8_quantization(*inputs, rotate=True, backend=name)
        return found.row_factor, found.row_shift, found.value_scale, found.value_mean

    def compare(result: Tensors, sample: Sample) -> Errors:
        query, key, _ = in_float32(tensors, sample)
        scale = query.shape[-1] ** -0.5
        shift = (query @ key.mean(2, keepdim=True).mT).squeeze(-1) * scale
        error = relative_error(result[1][sample.rows_of], shift)
        return {"rel_error": require("error of the shift", error, 1e-3, sample)}

    case = tensors.case
    return Work(
        fp8_quantization,
        inputs,
        whole(tensors, settings, call, compare),
        baseline="dense",
        fields={"density": 1.0},
        moved_bytes=QUANTIZED_BYTES * case.batch * case.heads * case.tokens * case.head_dim,
    )


def dense(tensors: CaseTensors, settings: Settings) -> Work:
    """`fp8_dense_attention`."""
    inputs = tensors.qkv
    rounded = _rounded(*inputs)

    def call(name: str) -> Tensors:
        return fp8_dense_attention(_rounded(*inputs), backend=name)[:2]

    def compare(result: Tensors, sample: Sample) -> Errors:
        found = [each[sample.rows_of] for each in result]
        return _check(found, tensors, rounded, sample, sample)

    return Work(
        fp8_dense_attention,
        (tensors.qkv[0], tensors.dtype, settings.block_size),
        whole(tensors, settings, call, compare),
        baseline="dense",
        fields={"density": 1.0},
        flops=flops_of(tensors, tensors.case.tokens),
    )


def column_sums(tensors: CaseTensors, settings: Settings) -> Work:
    """`fp8_dense_attention` with column sums, weighed with the log-sum-exp of a 16-bit run."""
    rows = settings.block_size

    def part(first: int, last: int) -> TimedCall:
        inputs = [each[:, first:last] for each in tensors.qkv]
        lse = tensors.lse[:, first:last]
        rounded = _rounded(*inputs)

        def call(name: str) -> Tensors:
            options: dict[str, Any] = {"lse_previous": lse, "block_size_q": rows, "backend": name}
            output, found_lse, sums = fp8_dense_attention(_rounded(*inputs), **options)
            assert sums is not None
            return output, found_lse, sums

        def compare(result: Tensors, sample: Sample) -> Errors:
            found = [each[sample.rows_of] for each in result[:2]]
            errors = _check(found, tensors, rounded, sample, sample.in_heads_from(first))
            _, _, sums = fp8_dense_attention(
                _part(rounded, sample),
                lse_previous=lse[sample.rows_of],
                block_size_q=rows,
                backend="reference",
            )
            assert sums is not None
            error = relative_error(result[2][sample.block_of], sums)
            return errors | {"sums_error": require("sums error", error, SUMS_LIMIT, sample)}

        return TimedCall(call, compare, samples_of(tensors, rows, last - first))

    return Work(
        fp8_dense_attention,
        (tensors.qkv[0], tensors.dtype, rows),
        by_heads(tensors, settings, part),
        baseline="dense",
        fields={"density": 1.0, "block_size": rows},
        flops=flops_of(tensors, tensors.case.tokens),
    )


OPS: dict[str, Callable[[CaseTensors, Settings], Work]] = {
    "fp8_quantization": quantization,
    "fp8_dense_attention": dense,
    "fp8_dense_attention_column_sums": column_sums,
}
# What ``--op fp8_attention`` runs: these, and the 16-bit kernels that they are to be faster than.
GROUP = (*OPS, "dense_attention_column_sums")


def _rounded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Fp8Attention:
    return fp8_quantization(query, key, value, rotate=True)


def _part(rounded: Fp8Attention, sample: Sample) -> Fp8Attention:
    """A query block, and the keys and values of its head."""
    heads = {name: part[sample.head_of] for name, part in _tensors(rounded).items()}
    rows = {name: heads[name][:, :, sample.rows] for name in ("query", "row_factor", "row_shift")}
    changed: dict[str, Any] = heads | rows
    return replace(rounded, **changed)


def _tensors(rounded: Fp8Attention) -> dict[str, torch.Tensor]:
    return {name: part for name, part in vars(rounded).items() if torch.is_tensor(part)}


def _check(
    found: list[torch.Tensor],
    tensors: CaseTensors,
    rounded: Fp8Attention,
    sample: Sample,
    of_all: Sample,
) -> Errors:
    """Checks a block against attention in float64, and of what is in 8 bits in float32.

    ``sample`` is of the heads that were rounded, ``of_all`` the same of all heads.
    """
    exact, exact_lse = dense_attention(
        *(each.double() for each in in_float32(tensors, of_all)), backend="reference"
    )
    same, lse, _ = fp8_dense_attention(_part(rounded, sample), backend="reference")
    error, kernel_error = relative_error(found[0], exact), relative_error(found[0], same)
    lse_error = (found[1] - lse).abs().max().item()
    rounding = (found[1] - exact_lse).pow(2).mean().sqrt().item()
    require("lse error by rounding", rounding, LSE_ROUNDED_LIMIT, of_all)
    cut_off = CUT_OFF_LIMIT * tensors.case.tokens**0.5
    limit = math.hypot(OUTPUT_LIMIT, cut_off)
    require("error of the kernel", kernel_error, limit, of_all)
    return {
        "rel_error": require("relative error", error, limit, of_all),
        "kernel_error": kernel_error,
        "lse_error": require("lse error", lse_error, LSE_LIMIT, of_all),
    }

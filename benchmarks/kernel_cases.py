"""The registry of kernel cases: what each operation runs at a shape, its check and its baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import cases
from benchmarks.cases import (
    OUTPUT_LIMIT,
    Case,
    Sample,
    WrongResultError,
    relative_error,
    require,
    samples,
)
from chipsparse.experiments.timing import Timing, time_call
from chipsparse.kernels.calls import Activation
from chipsparse.kernels.checks import block_count
from chipsparse.kernels.column_selection import column_selection
from chipsparse.kernels.column_sparse_attention import column_sparse_attention
from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention_column_sums import dense_attention_column_sums
from chipsparse.kernels.dispatch import Operation
from chipsparse.kernels.fp8_dense_attention import fp8_dense_attention
from chipsparse.kernels.fp8_quantization import fp8_quantization
from chipsparse.kernels.mask_packing import packed_to_indices, unpack_mask
from chipsparse.kernels.neuron_selection import mean_preactivations, neuron_selection
from chipsparse.kernels.sparse_mlp_down import sparse_mlp_down
from chipsparse.kernels.sparse_mlp_up import dense_activation, sparse_mlp_up
from chipsparse.sparse.layers.attention import MEAN_WEIGHT, block_means

Tensors = tuple[torch.Tensor, ...]
Errors = dict[str, float]
CUDA_LIBRARIES = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
DENSE = "dense"  # the baseline of attention: the fastest library kernel
LSE_LIMIT = 2e-3  # largest difference of a log-sum-exp
SUMS_LIMIT = 2e-2  # of column sums, which half precision inputs give in half precision
# A selection may be approximate: the share by which its counts may be off, and that it may miss.
COUNT_LIMIT = 0.01
MISSED_LIMIT = 0.02
# The same limits of attention in 8 bits. The values are random, so the output is a mean of what
# cancels, and errors are large beside it: it falls with the root of the columns, and what tensor
# cores cut off from their sums does not. On an H200 that came to 2.3e-4 times this root.
FP8_LIMIT = 5e-2
CUT_OFF_LIMIT = 3e-4
FP8_LSE_LIMIT = 5e-2
FP8_SUMS_LIMIT = 5e-2
ACTIVATION: Activation = "gelu-tanh"
# How far the tokens of an MLP have moved since its caches were written, in their own deviation.
DRIFT = 0.3


@dataclass(frozen=True)
class Kernel:
    """One operation at one shape."""

    operation: Operation[..., Any]
    call: Callable[[str], Any]  # runs the operation with the named backend
    # Errors of a result at a sample; raises `WrongResultError` where too large.
    check: Callable[[Any, Any], Errors]
    samples: Sequence[Any]  # where the result is compared
    fields: dict[str, Any]  # of its records besides the measurement
    baseline: str | None = DENSE  # what it replaces; `DENSE` is measured once for a case
    replaces: Callable[[], Any] | None = None  # call of any other baseline
    flops: int | None = None  # useful ones


@dataclass(frozen=True)
class Settings:
    """The settings of the command line."""

    block_size: int = 128  # R, query rows per block
    density: float | None = None  # in place of the case's own
    delta_rule: str = "none"  # none, difference or means

    def kept(self, of_case: float, count: int) -> int:
        """The number of kept columns or neurons: one at least."""
        share = of_case if self.density is None else self.density
        return min(count, max(1, round(share * count)))


class Inputs:
    """A case on a device: query, key and value, and the dense baseline, each made once."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        self.case = case
        self.device = device
        self.dtype = dtype

    @cached_property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value ``[B, H, N, D]``."""
        return cases.query_key_value(self.case, device=self.device, dtype=self.dtype)

    @cached_property
    def lse(self) -> torch.Tensor:
        """Log-sum-exp of all columns, ``[B, H, N]`` float32."""
        return dense_attention(*self.qkv)[1]

    def of(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A sample's query rows, and the keys and values of its head, in float32."""
        query, key, value = self.qkv
        return query[sample.rows].float(), key[sample.head].float(), value[sample.head].float()

    def lists(self, block_size: int) -> tuple[int, int, int]:
        """B, H and G."""
        return self.case.batch, self.case.heads, block_count(self.case.tokens, block_size)

    def samples(self, block_size: int) -> list[Sample]:
        """The blocks of all heads where results are compared."""
        return samples(self.case.batch, self.case.heads, self.case.tokens, block_size)

    @cached_property
    def dense(self) -> tuple[str, Timing]:
        """Name and time of the fastest dense attention of the libraries here, without a mask."""

        def attention() -> torch.Tensor:
            return F.scaled_dot_product_attention(*self.qkv)

        if self.device.type != "cuda":
            return "sdpa", time_call(attention, self.device)
        times: dict[str, Timing] = {}
        for name, library in CUDA_LIBRARIES.items():
            with sdpa_kernel(library):
                try:
                    times[name] = time_call(attention, self.device)
                except RuntimeError as error:
                    print(f"{name} attention: {str(error).splitlines()[0]}")
        if not times:
            raise RuntimeError("no library has dense attention for this case")
        return min(times.items(), key=lambda item: item[1].latency_ms)


def attention(
    inputs: Inputs,
    settings: Settings,
    operation: Operation[..., Any],
    run: Callable[[Tensors, dict[str, torch.Tensor], str], Tensors],
    tensors: dict[str, torch.Tensor],
    fields: dict[str, Any],
    *,
    columns: int,
    limits: tuple[float, float, float] | None = None,
    call: Callable[[str], Any] | None = None,
) -> Kernel:
    """The case of an operation of attention, which computes so many columns of each row.

    ``run`` is the operation of query, key and value, with further tensors ``[B, H, N, ...]`` or
    ``[B, H, G, ...]`` and a backend; ``call`` is the timed call where it is another. Results are
    the output and, if any, the log-sum-exp and column sums, each with its limit.
    """
    case = inputs.case
    most, most_lse, most_sums = limits or (OUTPUT_LIMIT[inputs.dtype], LSE_LIMIT, SUMS_LIMIT)

    def check(result: Tensors, sample: Sample) -> Errors:
        part = {
            name: tensor[sample.rows if tensor.shape[2] == case.tokens else sample.block]
            for name, tensor in tensors.items()
        }
        output, *others = run(inputs.of(sample), part, "reference")
        error = relative_error(result[0][sample.rows], output)
        errors = {"rel_error": require("relative error", error, most, sample)}
        if others:
            error = (result[1][sample.rows].float() - others[0]).abs().max().item()
            errors["lse_error"] = require("lse error", error, most_lse, sample)
        if others[1:]:
            error = relative_error(result[2][sample.block], others[1])
            errors["sums_error"] = require("sums error", error, most_sums, sample)
        return errors

    # Two products of two operations each, per head, row, computed column and channel.
    flops = 4 * case.batch * case.heads * case.head_dim * case.tokens * columns
    return Kernel(
        operation,
        call or (lambda name: run(inputs.qkv, tensors, name)),
        check,
        inputs.samples(settings.block_size),
        fields,
        flops=flops,
    )


def check_selection(
    mask: torch.Tensor,
    column_sums: torch.Tensor,
    keep_count: int,
    where: object,
) -> Errors:
    """Checks how many columns a row keeps, and how many of the largest are among them.

    Sums in half precision have many ties: any column as large as the smallest that an exact top-k
    keeps is as good as it. ``rel_error`` is the missed share, one minus the recall.
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


def dense(
    inputs: Inputs,
    settings: Settings,
    *,
    with_sums: bool = False,
    in_fp8: bool = False,
) -> Kernel:
    """`dense_attention` or `dense_attention_column_sums`, the latter with lse of a dense run.

    In 8 bits `fp8_dense_attention`; rounding is part of the time.
    """
    rows = settings.block_size
    tokens = inputs.case.tokens
    fields = {"density": 1.0, **({"block_size": rows} if with_sums else {})}
    tensors = {"lse": inputs.lse} if with_sums else {}

    def run(qkv: Tensors, tensors: dict[str, torch.Tensor], name: str) -> Tensors:
        query, key, value = qkv
        if not with_sums:
            return dense_attention(query, key, value, backend=name)
        options: dict[str, Any] = {"block_size_q": rows, "backend": name}
        return dense_attention_column_sums(query, key, value, tensors["lse"], **options)

    if not in_fp8:
        operation = dense_attention_column_sums if with_sums else dense_attention
        return attention(inputs, settings, operation, run, tensors, fields, columns=tokens)

    def call(name: str) -> Tensors:
        rounded = fp8_quantization(*inputs.qkv, rotate=True)
        options: dict[str, Any] = {"block_size_q": rows} if with_sums else {}
        result = fp8_dense_attention(
            rounded,
            lse_previous=tensors.get("lse"),
            **options,
            backend=name,
        )
        return tuple(tensor for tensor in result if tensor is not None)

    limit = math.hypot(FP8_LIMIT, CUT_OFF_LIMIT * tokens**0.5)
    return attention(
        inputs,
        settings,
        fp8_dense_attention,
        run,
        tensors,
        fields,
        columns=tokens,
        limits=(limit, FP8_LSE_LIMIT, FP8_SUMS_LIMIT),
        call=call,
    )


def sparse(inputs: Inputs, settings: Settings) -> Kernel:
    """`column_sparse_attention` over random lists of equal length."""
    case = inputs.case
    rows = settings.block_size
    rule = settings.delta_rule
    count = settings.kept(case.density, case.tokens)
    lists = inputs.lists(rows)
    indices = cases.index_lists(lists, case.tokens, count, device=inputs.device)
    counts = torch.full(lists, count, dtype=torch.int32, device=inputs.device)
    tensors = {"indices": indices, "counts": counts}
    if rule != "none":
        generator = torch.Generator(inputs.device).manual_seed(4)
        tensors["residual"] = torch.empty_like(inputs.qkv[0]).normal_(generator=generator)

    def run(qkv: Tensors, tensors: dict[str, torch.Tensor], name: str) -> Tensors:
        recorded = {**tensors}
        lists = recorded.pop("indices"), recorded.pop("counts")
        options: dict[str, Any] = {"block_size_q": rows, "backend": name, **recorded}
        query, key, value = qkv
        if rule == "means":  # which every sparse step makes anew
            options |= {"mean_key": block_means(key), "mean_value": block_means(value)}
            options["mean_weight"] = MEAN_WEIGHT
        return (column_sparse_attention(query, key, value, *lists, **options),)

    fields = {
        "density": count / case.tokens,
        "ideal": case.tokens / count,
        "block_size": rows,
        "delta_rule": rule,
    }
    return attention(inputs, settings, column_sparse_attention, run, tensors, fields, columns=count)


def selection(inputs: Inputs, settings: Settings) -> Kernel:
    """`column_selection` from heavy-tailed sums, against `torch.topk` head by head."""
    case = inputs.case
    rows = settings.block_size
    count = settings.kept(case.density, case.tokens)
    form = {"device": inputs.device}
    sums = cases.column_sums(
        inputs.lists(rows),
        case.tokens,
        block_size=rows,
        dtype=inputs.dtype,
        **form,
    )

    def check(packed: torch.Tensor, sample: Sample) -> Errors:
        mask = unpack_mask(packed[sample.block], case.tokens, backend="reference")
        return check_selection(mask, sums[sample.block], count, sample)

    def topk() -> None:
        for head_sums in sums.flatten(0, 1):
            head_sums.topk(count, dim=-1, sorted=False)

    return Kernel(
        column_selection,
        lambda name: column_selection(sums, keep_count=count, backend=name),
        check,
        inputs.samples(rows),
        {"density": count / case.tokens, "block_size": rows},
        baseline="torch.topk",
        replaces=topk,
    )


def unpacking(inputs: Inputs, settings: Settings) -> Kernel:
    """`packed_to_indices` with the capacity given; nothing in a library does the same."""
    case = inputs.case
    rows = settings.block_size
    keep = settings.kept(case.density, case.tokens) / case.tokens
    lists = inputs.lists(rows)
    packed, capacity = cases.packed_masks(lists, case.tokens, keep, device=inputs.device)

    def run(packed: torch.Tensor, name: str) -> Tensors:
        return packed_to_indices(packed, case.tokens, capacity=capacity, backend=name)

    def check(result: Tensors, sample: Sample) -> Errors:
        expected, expected_counts = run(packed[sample.block], "reference")
        count = int(expected_counts)
        listed, counts = (tensor[sample.block].flatten() for tensor in result)
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


@dataclass(frozen=True)
class Layer:
    """An MLP between two steps: its tokens now, its weights, and the caches of the step before.

    Shapes: hidden ``[B, N, C]``, up ``[F, C]``, down ``[C, F]`` with contiguous channels, mean
    ``[B, G, F]``, activation ``[B, N, F]``, output ``[B, N, C]``, neurons int32 ``[B, G, K]``. Each
    operation changes a cache in place; later calls on the same tensors cost the same.
    """

    hidden: torch.Tensor
    up: torch.Tensor
    up_bias: torch.Tensor
    down: torch.Tensor
    mean: torch.Tensor
    activation: torch.Tensor
    output: torch.Tensor
    neurons: torch.Tensor
    block_size: int

    def select(self, backend: str) -> torch.Tensor:
        """The neurons to recompute, int32 ``[B, G, K]``."""
        weights = (self.hidden, self.up, self.up_bias, self.mean)
        count = self.neurons.shape[2]
        return neuron_selection(
            *weights,
            keep_count=count,
            block_size=self.block_size,
            backend=backend,
        )

    def change(self, neurons: torch.Tensor, backend: str) -> torch.Tensor:
        """The change of the listed neurons, ``[B, N, K]``."""
        options: dict[str, Any] = {"block_size": self.block_size, "backend": backend}
        weights = self.hidden, self.up, self.up_bias, neurons, self.activation
        return sparse_mlp_up(*weights, activation=ACTIVATION, **options)

    def sum(self, delta: torch.Tensor, neurons: torch.Tensor, backend: str) -> torch.Tensor:
        """The layer's output with the change added, ``[B, N, C]``."""
        options: dict[str, Any] = {"block_size": self.block_size, "backend": backend}
        return sparse_mlp_down(delta, self.down, neurons, self.output, **options)

    def step(self, backend: str) -> torch.Tensor:
        """All three; a backend that has no selection takes Triton's."""
        neurons = self.select("reference" if backend == "reference" else "triton")
        return self.sum(self.change(neurons, backend), neurons, backend)

    def dense_up(self) -> torch.Tensor:
        """The activations of all neurons ``[B, N, F]``, as a dense layer computes them."""
        return F.gelu(F.linear(self.hidden, self.up, self.up_bias), approximate="tanh")

    def topk(self) -> torch.Tensor:
        """The choice of neurons by PyTorch: block means, linear, difference and topk."""
        rows = self.block_size
        whole = self.hidden.shape[1] // rows * rows  # so that one mean makes all blocks
        tokens = self.hidden[:, :whole].unflatten(1, (-1, rows)).mean(2)
        means = F.linear(tokens, self.up, self.up_bias)
        change = (means - self.mean[:, : means.shape[1]]).abs()
        return change.topk(self.neurons.shape[2], dim=-1).indices

    def part(self, sample: Sample) -> Layer:
        """A token block alone, with caches of its own."""
        (b, _, r) = sample.rows
        (_, _, g) = sample.block
        return replace(
            self,
            hidden=self.hidden[b, r],
            mean=self.mean[b, g].clone(),
            activation=self.activation[b, r].clone(),
            output=self.output[b, r].clone(),
            neurons=self.neurons[b, g],
        )


def make_layer(inputs: Inputs, settings: Settings) -> Layer:
    """Normal tokens and weights, with caches of tokens that have moved since."""
    case = inputs.case
    rows = case.mlp_rows
    width = case.mlp_width
    channels = case.channels
    generator = torch.Generator(inputs.device).manual_seed(4)
    block_size = settings.block_size

    def normal(*shape: int, deviation: float = 1.0) -> torch.Tensor:
        options: dict[str, Any] = {"device": inputs.device, "dtype": inputs.dtype}
        return torch.randn(shape, generator=generator, **options).mul_(deviation)

    hidden = normal(case.batch, rows, channels)
    up = normal(width, channels, deviation=channels**-0.5)
    up_bias = normal(width, deviation=0.1)
    down = normal(width, channels, deviation=width**-0.5).t()
    # A block moves as a whole, and each of its tokens on its own.
    moved = normal(case.batch, block_count(rows, block_size), channels, deviation=DRIFT)
    moved = moved.repeat_interleave(block_size, 1)[:, :rows]
    before = hidden + moved + normal(case.batch, rows, channels, deviation=DRIFT)
    mean = mean_preactivations(before, up, up_bias, block_size=block_size)
    activation = dense_activation(before, up, up_bias, activation=ACTIVATION, block_size=block_size)
    blocks = mean.shape[1]
    count = settings.kept(case.mlp_density, width)
    empty = torch.empty(case.batch, blocks, count, dtype=torch.int32, device=inputs.device)
    output = F.linear(activation, down)
    layer = Layer(hidden, up, up_bias, down, mean, activation, output, empty, block_size)
    return replace(layer, neurons=replace(layer, mean=mean.clone()).select("reference"))


def mlp(operation: str, inputs: Inputs, settings: Settings) -> Kernel:
    """The case of one operation of the sparse MLP, or of all together, against what it replaces."""
    layer = make_layer(inputs, settings)
    case = inputs.case
    rows = inputs.case.mlp_rows
    count = layer.neurons.shape[2]
    down = layer.down.contiguous()
    full = layer.activation.clone()
    # The second product is of a change that the same backend computed once.
    delta_by = cache(partial(layer.change, layer.neurons))
    # With its caches before anything is changed.
    parts = [(place, layer.part(place)) for place in samples(case.batch, 1, rows, layer.block_size)]

    def check_neurons(neurons: torch.Tensor, at: tuple[Sample, Layer]) -> Errors:
        """The list ascends; ``rel_error`` is the share of the exact list that it misses."""
        sample, part = at
        listed = neurons[sample.block[0], sample.block[2]].flatten()
        if not bool((listed.diff() > 0).all()):
            raise WrongResultError(f"the neurons do not ascend at {sample}; not timed")
        expected = part.select("reference").flatten()
        missed = 1 - torch.isin(expected, listed).float().mean().item()
        return {"rel_error": require("missed share", missed, MISSED_LIMIT, sample)}

    def check_rows(at: Sample, *pairs: tuple[torch.Tensor, torch.Tensor]) -> Errors:
        """The largest relative error of whole tensors, each beside its block."""
        error = max(relative_error(whole[at.rows[0], at.rows[2]], block) for whole, block in pairs)
        limit = OUTPUT_LIMIT[inputs.dtype]
        return {"rel_error": require("relative error", error, limit, at)}

    def check_change(delta: torch.Tensor, at: tuple[Sample, Layer]) -> Errors:
        sample, part = at
        expected = part.change(part.neurons, "reference")
        return check_rows(sample, (delta, expected), (layer.activation, part.activation))

    def check_sum(output: torch.Tensor, at: tuple[Sample, Layer]) -> Errors:
        sample, part = at
        part.sum(part.change(part.neurons, "reference"), part.neurons, "reference")
        return check_rows(sample, (output, part.output))

    # Operation, call, check, baseline, what it does, and sparse products.
    known: dict[str, tuple[Any, ...]] = {
        "neuron_selection": (
            neuron_selection,
            layer.select,
            check_neurons,
            "mean, linear, topk",
            layer.topk,
            0,
        ),
        "sparse_mlp_up": (
            sparse_mlp_up,
            partial(layer.change, layer.neurons),
            check_change,
            "linear and GELU",
            layer.dense_up,
            1,
        ),
        "sparse_mlp_down": (
            sparse_mlp_down,
            lambda by: layer.sum(delta_by(by), layer.neurons, by),
            check_sum,
            "linear",
            lambda: F.linear(full, down),
            1,
        ),
        "sparse_mlp": (
            sparse_mlp_up,
            layer.step,
            check_sum,
            "two linears and GELU",
            lambda: F.linear(layer.dense_up(), down),
            2,
        ),
    }
    called, call, check, name, replaces, products = known[operation]
    tokens = case.batch * rows
    fields = {
        "block_size": layer.block_size,
        "mlp_tokens": tokens,
        "channels": case.channels,
        "mlp_width": case.mlp_width,
        "density": count / case.mlp_width,
        "ideal": case.mlp_width / count,
    }
    flops = 2 * products * tokens * case.channels * count or None
    return Kernel(called, call, check, parts, fields, name, replaces, flops)


KERNELS: dict[str, Callable[[Inputs, Settings], Kernel]] = {
    "dense_attention": dense,
    "dense_attention_column_sums": partial(dense, with_sums=True),
    "column_sparse_attention": sparse,
    "column_selection": selection,
    "mask_packing": unpacking,
    "fp8_dense_attention": partial(dense, in_fp8=True),
    "fp8_dense_attention_column_sums": partial(dense, with_sums=True, in_fp8=True),
    "neuron_selection": partial(mlp, "neuron_selection"),
    "sparse_mlp_up": partial(mlp, "sparse_mlp_up"),
    "sparse_mlp_down": partial(mlp, "sparse_mlp_down"),
    "sparse_mlp": partial(mlp, "sparse_mlp"),
}

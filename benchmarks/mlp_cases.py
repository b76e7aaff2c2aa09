"""Cases of the sparse MLP: its three operations, alone and together, in 16 and in 8 bits.

The baseline of ``sparse_mlp`` is the layer that it replaces: two linears and the activation. Each
operation changes a cache in place; later calls on the same tensors cost the same.

A sparse step on weights in FP8 reads the weights first, which is part of its time. Its baseline
rounds the inputs of both linears by rows as torchao does, compiled on a GPU, and multiplies with
PyTorch's own product in FP8; on a CPU, where that wants whole tiles, it multiplies the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernel_cases import Inputs, Kernel, Settings, kernel
from benchmarks.kernel_checks import (
    OUTPUT_LIMIT,
    Errors,
    Sample,
    check_neurons,
    relative_error,
    require,
    samples,
)
from chipsparse.kernels.calls import Activation
from chipsparse.kernels.checks import block_count
from chipsparse.kernels.dispatch import Operation
from chipsparse.kernels.fp8_dequantization import fp8_dequantization
from chipsparse.kernels.fp8_quantization import FP8, LARGEST_FP8
from chipsparse.kernels.fp8_rows import fp8_rows
from chipsparse.kernels.neuron_selection import mean_preactivations, neuron_selection
from chipsparse.kernels.sparse_mlp_down import sparse_mlp_down
from chipsparse.kernels.sparse_mlp_up import dense_activation, sparse_mlp_up

ACTIVATION: Activation = "gelu-tanh"
# How far the tokens have moved since the caches were written, in their own deviation.
DRIFT = 0.3
ROUNDING_LIMIT = 4e-2  # of normal numbers in FP8: half of an eighth at most

Rounded = tuple[torch.Tensor, torch.Tensor]  # numbers in e4m3 and the scales of their rows


@dataclass(frozen=True)
class Layer:
    """An MLP between two steps: its tokens now, its weights, and the caches of the step before.

    Shapes: hidden ``[B, N, C]``, up ``[F, C]``, down ``[C, F]`` with contiguous channels, mean
    ``[B, G, F]``, activation ``[B, N, F]``, output ``[B, N, C]``, neurons int32 ``[B, G, K]``.
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
        options: dict[str, Any] = {"block_size": self.block_size, "backend": backend}
        count = self.neurons.shape[2]
        weights = self.hidden, self.up, self.up_bias, self.mean
        return neuron_selection(*weights, keep_count=count, **options)

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
        neurons = self.select(_or_triton(neuron_selection, backend))
        return self.sum(self.change(neurons, backend), neurons, backend)

    def dense_up(self) -> torch.Tensor:
        """The first linear and the activation."""
        return F.gelu(F.linear(self.hidden, self.up, self.up_bias), approximate="tanh")

    def part(self, sample: Sample) -> Layer:
        """A token block alone, with caches of its own."""
        b, r, g = sample.batch, sample.rows, sample.block
        return replace(
            self,
            hidden=self.hidden[b, r],
            mean=self.mean[b, g].clone(),
            activation=self.activation[b, r].clone(),
            output=self.output[b, r].clone(),
            neurons=self.neurons[b, g],
        )


def _or_triton(operation: Operation[..., Any], backend: str) -> str:
    return backend if backend in {each.name for each in operation.backends} else "triton"


def make_layer(inputs: Inputs, settings: Settings, *, in_fp8: bool = False) -> Layer:
    """Normal tokens and weights, with caches of tokens that have moved since.

    Args:
        inputs: has the case.
        settings: have the rows of a block.
        in_fp8: round the weights to what FP8 can say.
    """
    case, rows, width, channels = inputs.case, *_sizes(inputs)
    generator, block_size = torch.Generator(inputs.device).manual_seed(4), settings.block_size

    def normal(*shape: int, deviation: float = 1.0) -> torch.Tensor:
        options: dict[str, Any] = {"device": inputs.device, "dtype": inputs.dtype}
        return torch.randn(shape, generator=generator, **options).mul_(deviation)

    hidden = normal(case.batch, rows, channels)
    up, up_bias = normal(width, channels, deviation=channels**-0.5), normal(width, deviation=0.1)
    down = normal(width, channels, deviation=width**-0.5).t()
    if in_fp8:
        up = fp8_dequantization(*rounded_rows(up), dtype=up.dtype, backend="reference")
        parts = rounded_rows(down.contiguous())
        down = fp8_dequantization(*parts, dtype=up.dtype, turned=True, backend="reference")
    # A block moves as a whole, and each of its tokens on its own.
    moved = normal(case.batch, block_count(rows, block_size), channels, deviation=DRIFT)
    moved = moved.repeat_interleave(block_size, 1)[:, :rows]
    before = hidden + moved + normal(case.batch, rows, channels, deviation=DRIFT)
    mean = mean_preactivations(before, up, up_bias, block_size=block_size)
    activation = dense_activation(before, up, up_bias, activation=ACTIVATION, block_size=block_size)
    blocks, count = mean.shape[1], settings.kept(case.mlp_density, width)
    empty = torch.empty(case.batch, blocks, count, dtype=torch.int32, device=inputs.device)
    output = F.linear(activation, down)
    layer = Layer(hidden, up, up_bias, down, mean, activation, output, empty, block_size)
    return replace(layer, neurons=replace(layer, mean=mean.clone()).select("reference"))


def _sizes(inputs: Inputs) -> tuple[int, int, int]:
    """Rows of a sample, neurons and channels."""
    return inputs.case.mlp_rows, inputs.case.mlp_width, inputs.case.channels


def _mlp(
    inputs: Inputs,
    layer: Layer,
    operation: Operation[..., Any],
    call: Callable[[str], torch.Tensor],
    check: Callable[[torch.Tensor, Any], Errors],
    baseline: str,
    replaces: Callable[[], torch.Tensor],
    products: int,
) -> Kernel:
    """A case of the MLP; without sparse products it reads everything."""
    rows, width, channels = _sizes(inputs)
    tokens, count = inputs.case.batch * rows, layer.neurons.shape[2]
    fields: dict[str, Any] = {"block_size": layer.block_size, "mlp_tokens": tokens}
    fields |= {"channels": channels, "mlp_width": width}
    return Kernel(
        operation,
        call,
        check,
        _references(layer),
        fields | {"density": count / width, "ideal": width / count},
        baseline,
        replaces,
        flops=2 * products * tokens * channels * count or None,
        moved_bytes=None if products else (tokens + width) * channels * layer.hidden.itemsize,
    )


@dataclass(frozen=True)
class Expected:
    """What the references of all three operations make of a sampled token block."""

    sample: Sample
    neurons: torch.Tensor
    delta: torch.Tensor
    layer: Layer

    def error(self, *pairs: tuple[torch.Tensor, torch.Tensor]) -> Errors:
        """The largest relative error of whole tensors, each beside its block.

        Raises:
            WrongResultError: it is too large.
        """
        parts = [(actual[self.sample.batch, self.sample.rows], block) for actual, block in pairs]
        limit = OUTPUT_LIMIT[parts[0][0].dtype]
        error = max(relative_error(*part) for part in parts)
        return {"rel_error": require("relative error", error, limit, self.sample)}


def _references(layer: Layer) -> Sequence[Expected]:
    """The references of all three operations on sampled blocks, before anything is changed."""
    batch, rows, _ = layer.hidden.shape
    expected = []
    for sample in samples(batch, 1, rows, layer.block_size):
        part = layer.part(sample)
        delta = part.change(part.neurons, "reference")
        part.sum(delta, part.neurons, "reference")
        expected.append(Expected(sample, part.select("reference"), delta, part))
    return expected


@kernel("neuron_selection")
def selecting(inputs: Inputs, settings: Settings) -> Kernel:
    """The choice of neurons, against block means, linear, difference and topk of PyTorch."""
    layer = make_layer(inputs, settings)
    rows = layer.block_size
    whole = layer.hidden.shape[1] // rows * rows  # so that one mean makes all blocks

    def topk() -> torch.Tensor:
        tokens = layer.hidden[:, :whole].unflatten(1, (-1, rows)).mean(2)
        means = F.linear(tokens, layer.up, layer.up_bias)
        change = (means - layer.mean[:, : means.shape[1]]).abs()
        return change.topk(layer.neurons.shape[2], dim=-1).indices

    def check(neurons: torch.Tensor, expected: Expected) -> Errors:
        listed = neurons[expected.sample.batch, expected.sample.block].flatten()
        return check_neurons(listed, expected.neurons.flatten(), expected.sample)

    name = "mean, linear, topk"
    return _mlp(inputs, layer, neuron_selection, layer.select, check, name, topk, 0)


@kernel("sparse_mlp_up")
def first_product(inputs: Inputs, settings: Settings) -> Kernel:
    """The change of the listed neurons, and the cache that it is added to."""
    layer = make_layer(inputs, settings)
    call = partial(layer.change, layer.neurons)

    def check(delta: torch.Tensor, expected: Expected) -> Errors:
        cached = layer.activation, expected.layer.activation
        return expected.error((delta, expected.delta), cached)

    name = "linear and GELU"
    return _mlp(inputs, layer, sparse_mlp_up, call, check, name, layer.dense_up, 1)


@kernel("sparse_mlp_down")
def second_product(inputs: Inputs, settings: Settings) -> Kernel:
    """The output, which is the cache itself, of a change that the same backend computed once."""
    layer = make_layer(inputs, settings)
    delta_by = cache(partial(layer.change, layer.neurons))
    down, full = layer.down.contiguous(), layer.activation.clone()

    def check(output: torch.Tensor, expected: Expected) -> Errors:
        cached = layer.output, expected.layer.output
        return expected.error((output, expected.layer.output), cached)

    return _mlp(
        inputs,
        layer,
        sparse_mlp_down,
        lambda name: layer.sum(delta_by(name), layer.neurons, name),
        check,
        "linear",
        lambda: F.linear(full, down),
        1,
    )


@kernel("sparse_mlp")
def whole(inputs: Inputs, settings: Settings) -> Kernel:
    """All three operations."""
    layer = make_layer(inputs, settings)
    down = layer.down.contiguous()
    baseline = partial(_both_linears, layer, down)
    return _whole(inputs, layer, layer.step, "two linears and GELU", baseline)


def _both_linears(layer: Layer, down: torch.Tensor) -> torch.Tensor:
    return F.linear(layer.dense_up(), down)


def _whole(
    inputs: Inputs,
    layer: Layer,
    step: Callable[[str], torch.Tensor],
    baseline: str,
    replaces: Callable[[], torch.Tensor],
) -> Kernel:
    def check(output: torch.Tensor, expected: Expected) -> Errors:
        return expected.error((output, expected.layer.output))

    return _mlp(inputs, layer, sparse_mlp_up, step, check, baseline, replaces, 2)


@kernel("fp8_mlp")
def whole_in_fp8(inputs: Inputs, settings: Settings) -> Kernel:
    """All three on weights in FP8, which are read first, against linears in FP8."""
    layer = make_layer(inputs, settings, in_fp8=True)
    up, down = rounded_rows(layer.up), rounded_rows(layer.down.contiguous())

    def step(name: str) -> torch.Tensor:
        reader = _or_triton(fp8_dequantization, name)
        read = partial(fp8_dequantization, dtype=layer.hidden.dtype, backend=reader)
        return replace(layer, up=read(*up), down=read(*down, turned=True)).step(name)

    baseline = linears_in_fp8(layer, up, down)
    return _whole(inputs, layer, step, "two linears in FP8 and GELU", baseline)


def rounded_rows(rows: torch.Tensor) -> Rounded:
    """Rows ``[M, K]`` in e4m3, and float32 scales ``[M, 1]`` that give them back."""
    largest = rows.abs().amax(-1, keepdim=True).float()
    scale = largest.clamp(min=1e-12) / LARGEST_FP8
    return (rows.float() / scale).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8), scale


def linears_in_fp8(layer: Layer, up: Rounded, down: Rounded) -> Callable[[], torch.Tensor]:
    """Two linears and the activation, inputs rounded by rows."""
    round_rows: Any = rounded_rows
    if layer.hidden.is_cuda:
        round_rows = torch.compile(rounded_rows, dynamic=False)

    def linear(inputs: torch.Tensor, weight: Rounded, bias: torch.Tensor | None) -> torch.Tensor:
        (numbers, input_scale), (data, scale) = round_rows(inputs), weight
        if not inputs.is_cuda:
            wide = (numbers.float() * input_scale, data.float() * scale)
            return F.linear(*wide, None if bias is None else bias.float()).to(inputs.dtype)
        scales = {"scale_a": input_scale, "scale_b": scale.t()}
        options: Any = {"bias": bias, "out_dtype": inputs.dtype, "use_fast_accum": True, **scales}
        return torch._scaled_mm(numbers, data.t(), **options)

    def call() -> torch.Tensor:
        neurons = linear(layer.hidden.flatten(0, 1), up, layer.up_bias)
        output = linear(F.gelu(neurons, approximate="tanh"), down, None)
        return output.unflatten(0, layer.hidden.shape[:2])

    return call


@kernel("fp8_rows")
def rounding(inputs: Inputs, settings: Settings) -> Kernel:
    """`fp8_rows` of all neurons of a layer, against PyTorch's operations one by one."""
    del settings
    case, generator = inputs.case, torch.Generator(inputs.device).manual_seed(4)
    shape = case.batch * case.mlp_rows, case.mlp_width
    rows = torch.randn(shape, generator=generator, device=inputs.device, dtype=inputs.dtype)

    def call(name: str) -> Rounded:
        result = fp8_rows(rows, backend=name)
        return result.data.view(torch.uint8), result.scale

    def check(result: Rounded, row: int) -> Errors:
        numbers = result[0][row].view(FP8).float() * result[1][row]
        error = relative_error(numbers, rows[row].float())
        return {"rel_error": require("relative error", error, ROUNDING_LIMIT, row)}

    return Kernel(
        fp8_rows,
        call,
        check,
        (0, shape[0] // 2, shape[0] - 1),
        {"density": 1.0},
        "rounded by PyTorch",
        partial(rounded_rows, rows),
        moved_bytes=rows.numel() * (rows.element_size() + 1),
    )

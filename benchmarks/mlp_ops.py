"""The sparse MLP as the benchmark runs it: its three operations, alone and together.

The baseline of ``sparse_mlp`` is the layer that it replaces: two linears and the activation. Each
operation changes a cache in place, so every measurement makes tensors of its own; later calls on
them cost the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.case_tensors import CaseTensors
from benchmarks.kernel_work import Settings, TimedCall, Work, kept
from benchmarks.sampled_checks import (
    OUTPUT_LIMIT,
    Errors,
    Sample,
    check_neurons,
    relative_error,
    require,
    samples,
    worst,
)
from chipsparse.kernels.calls import Activation
from chipsparse.kernels.checks import block_count
from chipsparse.kernels.dispatch import Operation
from chipsparse.kernels.neuron_selection import mean_preactivations, neuron_selection
from chipsparse.kernels.sparse_mlp_down import sparse_mlp_down
from chipsparse.kernels.sparse_mlp_up import dense_activation, sparse_mlp_up

ACTIVATION: Activation = "gelu-tanh"
# How far the tokens have moved since the caches were written, in their own deviation.
DRIFT = 0.3


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


def make_layer(tensors: CaseTensors, settings: Settings) -> Layer:
    """Normal tokens and weights; caches of tokens that have moved since."""
    case, device, dtype = tensors.case, tensors.device, tensors.dtype
    generator, block_size = torch.Generator(device).manual_seed(4), settings.block_size

    def normal(*shape: int, deviation: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return values.mul_(deviation)

    rows, width, channels = case.mlp_rows, case.mlp_width, case.channels
    hidden = normal(case.batch, rows, channels)
    up, up_bias = normal(width, channels, deviation=channels**-0.5), normal(width, deviation=0.1)
    down = normal(width, channels, deviation=width**-0.5).t()
    blocks = block_count(rows, block_size)
    # A block moves as a whole, and each of its tokens on its own.
    moved = normal(case.batch, blocks, channels, deviation=DRIFT)
    moved = moved.repeat_interleave(block_size, 1)[:, :rows]
    before = hidden + moved + normal(case.batch, rows, channels, deviation=DRIFT)
    mean = mean_preactivations(before, up, up_bias, block_size=block_size)
    activation = dense_activation(before, up, up_bias, activation=ACTIVATION, block_size=block_size)
    neurons = neuron_selection(
        hidden,
        up,
        up_bias,
        mean.clone(),
        keep_count=kept(settings, case.mlp_density, width),
        block_size=block_size,
        backend="reference",
    )
    output = F.linear(activation, down)
    return Layer(hidden, up, up_bias, down, mean, activation, output, neurons, block_size)


def select(layer: Layer, backend: str) -> torch.Tensor:
    """The neurons to recompute, int32 ``[B, G, K]``."""
    return neuron_selection(
        layer.hidden,
        layer.up,
        layer.up_bias,
        layer.mean,
        keep_count=layer.neurons.shape[2],
        block_size=layer.block_size,
        backend=backend,
    )


def up(layer: Layer, neurons: torch.Tensor, backend: str) -> torch.Tensor:
    """The change of the listed neurons, ``[B, N, K]``."""
    return sparse_mlp_up(
        layer.hidden,
        layer.up,
        layer.up_bias,
        neurons,
        layer.activation,
        activation=ACTIVATION,
        block_size=layer.block_size,
        backend=backend,
    )


def down(layer: Layer, delta: torch.Tensor, neurons: torch.Tensor, backend: str) -> torch.Tensor:
    """The layer's output with the change added, ``[B, N, C]``."""
    return sparse_mlp_down(
        delta, layer.down, neurons, layer.output, block_size=layer.block_size, backend=backend
    )


@dataclass(frozen=True)
class Expected:
    """What the references of all three operations make of a sampled token block.

    Attributes:
        sample: where the block is.
        neurons: that they choose.
        delta: the change of the neurons that the layer lists.
        layer: the block alone, with its caches afterwards.
    """

    sample: Sample
    neurons: torch.Tensor
    delta: torch.Tensor
    layer: Layer

    def error_of(self, actual: torch.Tensor, expected: torch.Tensor) -> Errors:
        """The relative error of the block's rows of a tensor.

        Raises:
            WrongResultError: it is too large.
        """
        found = actual[self.sample.batch, self.sample.rows]
        error, limit = relative_error(found, expected), OUTPUT_LIMIT[found.dtype]
        return {"rel_error": require("relative error", error, limit, self.sample)}


def references(layer: Layer) -> list[Expected]:
    """The references of all three operations on sampled blocks."""
    batch, rows, _ = layer.hidden.shape
    found = []
    for sample in samples(batch, 1, rows, layer.block_size):
        b, r, g = sample.batch, sample.rows, sample.block
        part = replace(
            layer,
            hidden=layer.hidden[b, r],
            mean=layer.mean[b, g].clone(),
            activation=layer.activation[b, r].clone(),
            output=layer.output[b, r].clone(),
            neurons=layer.neurons[b, g],
        )
        delta = up(part, part.neurons, "reference")
        down(part, delta, part.neurons, "reference")
        found.append(Expected(sample, select(part, "reference"), delta, part))
    return found


# What an operation replaces: by PyTorch, for a layer.


def selecting_by_torch(layer: Layer) -> Callable[[], torch.Tensor]:
    """The choice of neurons: block means, linear, difference and topk."""
    count, rows = layer.neurons.shape[2], layer.block_size
    whole = layer.hidden.shape[1] // rows * rows  # so that one mean makes all blocks

    def call() -> torch.Tensor:
        tokens = layer.hidden[:, :whole].unflatten(1, (-1, rows)).mean(2)
        means = F.linear(tokens, layer.up, layer.up_bias)
        return (means - layer.mean[:, : means.shape[1]]).abs().topk(count, dim=-1).indices

    return call


def first_linear(layer: Layer) -> Callable[[], torch.Tensor]:
    """The first linear and the activation."""
    return lambda: F.gelu(F.linear(layer.hidden, layer.up, layer.up_bias), approximate="tanh")


def second_linear(layer: Layer) -> Callable[[], torch.Tensor]:
    """The second linear, on the whole activation."""
    stock, full = layer.down.contiguous(), layer.activation.contiguous()
    return lambda: F.linear(full, stock)


def whole_layer(layer: Layer) -> Callable[[], torch.Tensor]:
    """Two linears and the activation."""
    activation, stock = first_linear(layer), layer.down.contiguous()
    return lambda: F.linear(activation(), stock)


# Calls by the backend's name, for a layer.


def second_product(layer: Layer) -> Callable[[str], torch.Tensor]:
    """`sparse_mlp_down` alone, on the change that the same backend computed once."""
    delta_by = cache(partial(up, layer, layer.neurons))
    return lambda name: down(layer, delta_by(name), layer.neurons, name)


def all_three(layer: Layer) -> Callable[[str], torch.Tensor]:
    """Selection, up and down; a backend that has no selection takes Triton's."""
    selections = {backend.name for backend in neuron_selection.backends}

    def call(name: str) -> torch.Tensor:
        neurons = select(layer, name if name in selections else "triton")
        return down(layer, up(layer, neurons, name), neurons, name)

    return call


# Errors at a sample.


def compare_neurons(_: Layer, neurons: torch.Tensor, expected: Expected) -> Errors:
    sample = expected.sample
    found = neurons[sample.batch, sample.block].flatten()
    return check_neurons(found, expected.neurons.flatten(), sample)


def compare_change(layer: Layer, delta: torch.Tensor, expected: Expected) -> Errors:
    """Both the change and the cache that it was added to."""
    cached = expected.error_of(layer.activation, expected.layer.activation)
    return worst([expected.error_of(delta, expected.delta), cached])


def compare_output(layer: Layer, output: torch.Tensor, expected: Expected) -> Errors:
    """Both the output and the cache that it is the sum of."""
    cached = expected.error_of(layer.output, expected.layer.output)
    return worst([expected.error_of(output, expected.layer.output), cached])


@dataclass(frozen=True)
class MLPOperation:
    """An operation of the sparse MLP; called with tensors and settings, it makes the work.

    Attributes:
        operation: has the backends.
        inputs: what these accept or not, of the tokens, the weight and the rows of a block.
        call_on: the call, for a layer.
        compare: its errors at a sample.
        baseline: what it replaces, by name.
        baseline_on: the same, for a layer.
        products: sparse ones, of two operations per weight and token each; none reads everything.
        make: makes the layer.
    """

    operation: Operation[..., torch.Tensor]
    inputs: Callable[[torch.Tensor, torch.Tensor, int], tuple[Any, ...]]
    call_on: Callable[[Layer], Callable[[str], torch.Tensor]]
    compare: Callable[[Layer, torch.Tensor, Expected], Errors]
    baseline: str
    baseline_on: Callable[[Layer], Callable[[], torch.Tensor]]
    products: int
    make: Callable[[CaseTensors, Settings], Layer] = make_layer

    def __call__(self, tensors: CaseTensors, settings: Settings) -> Work:
        case = tensors.case
        rows, width = case.batch * case.mlp_rows, case.mlp_width
        count = kept(settings, case.mlp_density, width)

        def parts() -> Iterator[TimedCall]:
            layer = self.make(tensors, settings)
            compare, baseline = partial(self.compare, layer), self.baseline_on(layer)
            yield TimedCall(self.call_on(layer), compare, references(layer), baseline)

        hidden = torch.empty(
            case.batch, case.mlp_rows, case.channels, dtype=tensors.dtype, device=tensors.device
        )
        weight = hidden.new_empty(width, case.channels)
        return Work(
            self.operation,
            self.inputs(hidden, weight, settings.block_size),
            parts,
            baseline=self.baseline,
            fields={
                "block_size": settings.block_size,
                "mlp_tokens": rows,
                "channels": case.channels,
                "mlp_width": width,
                "density": count / width,
                "ideal": width / count,
            },
            flops=2 * self.products * rows * case.channels * count or None,
            moved_bytes=None if self.products else (rows + width) * case.channels * hidden.itemsize,
        )


WHOLE = MLPOperation(
    sparse_mlp_up,
    inputs=lambda hidden, weight, rows: (hidden, weight, None, None, rows),
    call_on=all_three,
    compare=lambda _, output, expected: expected.error_of(output, expected.layer.output),
    baseline="two linears and GELU",
    baseline_on=whole_layer,
    products=2,
)
OPS: dict[str, Callable[[CaseTensors, Settings], Work]] = {
    "neuron_selection": MLPOperation(
        neuron_selection,
        inputs=lambda hidden, weight, _: (hidden, weight),
        call_on=lambda layer: partial(select, layer),
        compare=compare_neurons,
        baseline="mean, linear, topk",
        baseline_on=selecting_by_torch,
        products=0,
    ),
    "sparse_mlp_up": replace(
        WHOLE,
        call_on=lambda layer: partial(up, layer, layer.neurons),
        compare=compare_change,
        baseline="linear and GELU",
        baseline_on=first_linear,
        products=1,
    ),
    "sparse_mlp_down": MLPOperation(
        sparse_mlp_down,
        inputs=lambda hidden, weight, rows: (hidden, weight.t(), rows),
        call_on=second_product,
        compare=compare_output,
        baseline="linear",
        baseline_on=second_linear,
        products=1,
    ),
    "sparse_mlp": WHOLE,
}

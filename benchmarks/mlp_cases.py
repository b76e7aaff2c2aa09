"""Cases of the sparse MLP: its three operations, alone and together.

The baseline of ``sparse_mlp`` is the layer that it replaces: two linears and the activation. Each
operation changes a cache in place; later calls on the same tensors cost the same.
"""

from __future__ import annotations

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
        neurons = self.select("reference" if backend == "reference" else "triton")
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


def make_layer(inputs: Inputs, settings: Settings) -> Layer:
    """Normal tokens and weights, with caches of tokens that have moved since."""
    case = inputs.case
    rows, width, channels = case.mlp_rows, case.mlp_width, case.channels
    generator, block_size = torch.Generator(inputs.device).manual_seed(4), settings.block_size

    def normal(*shape: int, deviation: float = 1.0) -> torch.Tensor:
        options: dict[str, Any] = {"device": inputs.device, "dtype": inputs.dtype}
        return torch.randn(shape, generator=generator, **options).mul_(deviation)

    hidden = normal(case.batch, rows, channels)
    up, up_bias = normal(width, channels, deviation=channels**-0.5), normal(width, deviation=0.1)
    down = normal(width, channels, deviation=width**-0.5).t()
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


def _references(layer: Layer) -> list[Expected]:
    """The references of all three operations on sampled blocks, before anything is changed."""
    batch, rows, _ = layer.hidden.shape
    expected = []
    for sample in samples(batch, 1, rows, layer.block_size):
        part = layer.part(sample)
        delta = part.change(part.neurons, "reference")
        part.sum(delta, part.neurons, "reference")
        expected.append(Expected(sample, part.select("reference"), delta, part))
    return expected


def _topk(layer: Layer) -> torch.Tensor:
    """The choice of neurons by PyTorch: block means, linear, difference and topk."""
    rows = layer.block_size
    whole = layer.hidden.shape[1] // rows * rows  # so that one mean makes all blocks
    tokens = layer.hidden[:, :whole].unflatten(1, (-1, rows)).mean(2)
    means = F.linear(tokens, layer.up, layer.up_bias)
    change = (means - layer.mean[:, : means.shape[1]]).abs()
    return change.topk(layer.neurons.shape[2], dim=-1).indices


def _mlp(operation: str, inputs: Inputs, settings: Settings) -> Kernel:
    """The case of one operation, or of all together, against what it replaces."""
    layer = make_layer(inputs, settings)
    case, rows, count = inputs.case, inputs.case.mlp_rows, layer.neurons.shape[2]
    down, full = layer.down.contiguous(), layer.activation.clone()
    # The second product is of a change that the same backend computed once.
    delta_by = cache(partial(layer.change, layer.neurons))

    def check_list(neurons: torch.Tensor, expected: Expected) -> Errors:
        listed = neurons[expected.sample.batch, expected.sample.block].flatten()
        return check_neurons(listed, expected.neurons.flatten(), expected.sample)

    def check_change(delta: torch.Tensor, expected: Expected) -> Errors:
        cached = layer.activation, expected.layer.activation
        return expected.error((delta, expected.delta), cached)

    def check_sum(output: torch.Tensor, expected: Expected) -> Errors:
        return expected.error((output, expected.layer.output))

    # Operation, call, check, baseline, what it does, and sparse products.
    known: dict[str, tuple[Any, ...]] = {
        "neuron_selection": (
            *(neuron_selection, layer.select, check_list),
            *("mean, linear, topk", partial(_topk, layer), 0),
        ),
        "sparse_mlp_up": (
            *(sparse_mlp_up, partial(layer.change, layer.neurons), check_change),
            *("linear and GELU", layer.dense_up, 1),
        ),
        "sparse_mlp_down": (
            *(sparse_mlp_down, lambda by: layer.sum(delta_by(by), layer.neurons, by), check_sum),
            *("linear", lambda: F.linear(full, down), 1),
        ),
        "sparse_mlp": (
            *(sparse_mlp_up, layer.step, check_sum),
            *("two linears and GELU", lambda: F.linear(layer.dense_up(), down), 2),
        ),
    }
    called, call, check, name, replaces, products = known[operation]
    tokens = case.batch * rows
    return Kernel(
        called,
        call,
        check,
        _references(layer),
        {
            **{"block_size": layer.block_size, "mlp_tokens": tokens, "channels": case.channels},
            **{"mlp_width": case.mlp_width, "density": count / case.mlp_width},
            "ideal": case.mlp_width / count,
        },
        name,
        replaces,
        flops=2 * products * tokens * case.channels * count or None,
    )


for _name in ("neuron_selection", "sparse_mlp_up", "sparse_mlp_down", "sparse_mlp"):
    kernel(_name)(partial(_mlp, _name))

"""The sparse MLP as the benchmark runs it: its three operations, alone and together.

The baseline of ``sparse_mlp`` is the layer that it replaces: two linears and the activation. Each
operation changes a cache in place, so every measurement makes tensors of its own; later calls on
them cost the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.attention_ops import Settings, TimedCall, Work
from benchmarks.case_tensors import CaseTensors
from benchmarks.random_inputs import generator_on
from benchmarks.sampled_checks import (
    OUTPUT_LIMIT,
    Errors,
    check_finite,
    check_neurons,
    relative_error,
    require,
    samples,
    worst,
)
from chipsparse.kernels.checks import block_count
from chipsparse.kernels.dispatch import Operation
from chipsparse.kernels.neuron_selection import mean_preactivations, neuron_selection
from chipsparse.kernels.sparse_mlp_down import sparse_mlp_down
from chipsparse.kernels.sparse_mlp_up import dense_activation, sparse_mlp_up

ACTIVATION = "gelu-tanh"
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


def rows_of(tensors: CaseTensors) -> int:
    """Rows of the MLP in one sample."""
    case = tensors.case
    return case.tokens if case.mlp_tokens is None else case.mlp_tokens


def kept_neurons(tensors: CaseTensors, settings: Settings) -> int:
    """How many neurons a token block recomputes."""
    case = tensors.case
    keep = settings.density
    keep = case.mlp_density if keep is None else keep
    return min(case.mlp_width, max(1, round(keep * case.mlp_width)))


def make_layer(tensors: CaseTensors, settings: Settings, *, seed: int = 4) -> Layer:
    """Normal tokens and weights; caches of tokens that have moved since."""
    case, device, dtype = tensors.case, tensors.device, tensors.dtype
    generator = generator_on(device, seed)

    def normal(*shape: int, deviation: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return values.mul_(deviation)

    rows, width, channels = rows_of(tensors), case.mlp_width, case.channels
    hidden = normal(case.batch, rows, channels)
    up, up_bias = normal(width, channels, deviation=channels**-0.5), normal(width, deviation=0.1)
    down = normal(width, channels, deviation=width**-0.5).t()
    blocks = block_count(rows, settings.block_size)
    # A block moves as a whole, and each of its tokens on its own.
    moved = normal(case.batch, blocks, channels, deviation=DRIFT)
    moved = moved.repeat_interleave(settings.block_size, 1)[:, :rows]
    before = hidden + moved + normal(case.batch, rows, channels, deviation=DRIFT)
    of_block = {"block_size": settings.block_size}
    mean = mean_preactivations(before, up, up_bias, **of_block)
    activation = dense_activation(before, up, up_bias, activation=ACTIVATION, **of_block)
    neurons = neuron_selection(
        hidden,
        up,
        up_bias,
        mean.clone(),
        keep_count=kept_neurons(tensors, settings),
        backend="reference",
        **of_block,
    )
    output = F.linear(activation, down)
    return Layer(hidden, up, up_bias, down, mean, activation, output, neurons, settings.block_size)


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
class Before:
    """A sampled token block as it was before the operation, and what the reference makes of it."""

    where: object
    rows: slice
    batch: slice
    neurons: torch.Tensor
    delta: torch.Tensor
    activation: torch.Tensor
    output: torch.Tensor


def references(layer: Layer) -> list[Before]:
    """The references of all three operations on sampled blocks."""
    batch, rows, _ = layer.hidden.shape
    found = []
    for sample in samples(batch, 1, rows, layer.block_size):
        b, r, g = sample.batch, sample.rows, sample.block
        part = Layer(
            layer.hidden[b, r],
            layer.up,
            layer.up_bias,
            layer.down,
            layer.mean[b, g].clone(),
            layer.activation[b, r].clone(),
            layer.output[b, r].clone(),
            layer.neurons[b, g],
            layer.block_size,
        )
        delta = up(part, part.neurons, "reference")
        down(part, delta, part.neurons, "reference")
        chosen = select(part, "reference")
        found.append(Before(sample, r, b, chosen, delta, part.activation, part.output))
    return found


def close(actual: torch.Tensor, expected: torch.Tensor, where: object) -> Errors:
    """The relative error; raises `WrongResultError` where it is too large."""
    error = relative_error(actual, expected)
    return {"rel_error": require("relative error", error, OUTPUT_LIMIT[actual.dtype], where)}


def selection_work(tensors: CaseTensors, settings: Settings) -> Work:
    """`neuron_selection` against the same by PyTorch: block means, linear, difference and topk."""
    case = tensors.case

    def parts() -> Iterator[TimedCall]:
        layer = make_layer(tensors, settings)
        expected = references(layer)
        count, rows = layer.neurons.shape[2], layer.block_size
        whole = layer.hidden.shape[1] // rows * rows  # so that one mean makes all blocks

        def library() -> torch.Tensor:
            tokens = layer.hidden[:, :whole].unflatten(1, (-1, rows)).mean(2)
            means = F.linear(tokens, layer.up, layer.up_bias)
            return (means - layer.mean[:, : means.shape[1]]).abs().topk(count, dim=-1).indices

        def check(neurons: torch.Tensor) -> Errors:
            return worst(
                [
                    check_neurons(
                        neurons[e.batch, e.rows.start // layer.block_size, :].flatten(),
                        e.neurons.flatten(),
                        e.where,
                    )
                    for e in expected
                ]
            )

        yield TimedCall(lambda name: select(layer, name), check, library)

    rows = case.batch * rows_of(tensors)
    element = torch.finfo(tensors.dtype).bits // 8
    return _work(
        tensors,
        settings,
        neuron_selection,
        parts,
        baseline="mean, linear, topk",
        moved_bytes=(rows + case.mlp_width) * case.channels * element,
    )


def top_work(tensors: CaseTensors, settings: Settings) -> Work:
    """The last launch of `neuron_selection` against `torch.topk`, both on ready scores."""

    def parts() -> Iterator[TimedCall]:
        layer = make_layer(tensors, settings)
        means, count = layer.mean, layer.neurons.shape[2]
        scores = (means - means.roll(1, 1)).abs()
        cache = means.clone()

        def run(name: str) -> torch.Tensor:
            if name == "reference":
                return scores.topk(count, dim=-1).indices.sort(dim=-1).values
            from chipsparse.kernels.neuron_selection.triton_kernel import highest_changes

            return highest_changes(scores, means, cache, count)

        def check(neurons: torch.Tensor) -> Errors:
            expected = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
            pairs = zip(neurons.flatten(0, 1), expected.flatten(0, 1), strict=True)
            return worst([check_neurons(*pair, f"list {i}") for i, pair in enumerate(pairs)])

        yield TimedCall(run, check, lambda: scores.topk(count, dim=-1))

    return _work(tensors, settings, neuron_selection, parts, baseline="torch.topk on ready scores")


def up_work(tensors: CaseTensors, settings: Settings) -> Work:
    """`sparse_mlp_up` against the first linear and the activation."""

    def parts() -> Iterator[TimedCall]:
        layer = make_layer(tensors, settings)
        expected = references(layer)

        def check(delta: torch.Tensor) -> Errors:
            check_finite(delta)
            return worst(
                [
                    each
                    for e in expected
                    for each in (
                        close(delta[e.batch, e.rows], e.delta, e.where),
                        close(layer.activation[e.batch, e.rows], e.activation, e.where),
                    )
                ]
            )

        def dense() -> torch.Tensor:
            return F.gelu(F.linear(layer.hidden, layer.up, layer.up_bias), approximate="tanh")

        yield TimedCall(lambda name: up(layer, layer.neurons, name), check, dense)

    return _work(tensors, settings, sparse_mlp_up, parts, baseline="linear and GELU", products=1)


def down_work(tensors: CaseTensors, settings: Settings) -> Work:
    """`sparse_mlp_down` against the second linear."""

    def parts() -> Iterator[TimedCall]:
        layer = make_layer(tensors, settings)
        expected = references(layer)
        stock = layer.down.contiguous()
        full = layer.activation.contiguous()
        deltas: dict[str, torch.Tensor] = {}

        def run(name: str) -> torch.Tensor:
            if name not in deltas:
                deltas[name] = up(layer, layer.neurons, name)
            return down(layer, deltas[name], layer.neurons, name)

        def check(output: torch.Tensor) -> Errors:
            check_finite(output)
            return worst(
                [
                    each
                    for e in expected
                    for each in (
                        close(output[e.batch, e.rows], e.output, e.where),
                        close(layer.output[e.batch, e.rows], e.output, e.where),
                    )
                ]
            )

        yield TimedCall(run, check, lambda: F.linear(full, stock))

    return _work(tensors, settings, sparse_mlp_down, parts, baseline="linear", products=1)


def mlp_work(tensors: CaseTensors, settings: Settings) -> Work:
    """Selection, up and down together against two linears and the activation."""
    selections = {backend.name for backend in neuron_selection.backends}

    def parts() -> Iterator[TimedCall]:
        layer = make_layer(tensors, settings)
        expected = references(layer)
        stock = layer.down.contiguous()

        def run(name: str) -> torch.Tensor:
            neurons = select(layer, name if name in selections else "triton")
            return down(layer, up(layer, neurons, name), neurons, name)

        def check(output: torch.Tensor) -> Errors:
            check_finite(output)
            return worst([close(output[e.batch, e.rows], e.output, e.where) for e in expected])

        def dense() -> torch.Tensor:
            hidden = F.linear(layer.hidden, layer.up, layer.up_bias)
            return F.linear(F.gelu(hidden, approximate="tanh"), stock)

        yield TimedCall(run, check, dense)

    return _work(
        tensors,
        settings,
        sparse_mlp_up,
        parts,
        baseline="two linears and GELU",
        products=2,
    )


def _work(
    tensors: CaseTensors,
    settings: Settings,
    operation: Operation[..., torch.Tensor],
    parts: Callable[[], Iterator[TimedCall]],
    *,
    baseline: str,
    products: int = 0,
    moved_bytes: int | None = None,
) -> Work:
    """What the works have in common; each product takes two operations per weight and token."""
    case = tensors.case
    rows, kept = rows_of(tensors), kept_neurons(tensors, settings)
    hidden = torch.empty(
        case.batch, rows, case.channels, dtype=tensors.dtype, device=tensors.device
    )
    weight = hidden.new_empty(case.mlp_width, case.channels)
    inputs: tuple = (hidden, weight, None, None, settings.block_size)
    if operation is sparse_mlp_down:
        inputs = (hidden, weight.t(), settings.block_size)
    elif operation is neuron_selection:
        inputs = (hidden, weight)
    fraction = kept / case.mlp_width
    return Work(
        operation,
        inputs,
        parts,
        baseline=baseline,
        fields={
            "block_size": settings.block_size,
            "mlp_tokens": case.batch * rows,
            "channels": case.channels,
            "mlp_width": case.mlp_width,
            "density": fraction,
            "ideal": 1 / fraction,
        },
        flops=2 * products * case.batch * rows * case.channels * kept or None,
        moved_bytes=moved_bytes,
    )


OPS: dict[str, Callable[[CaseTensors, Settings], Work]] = {
    "neuron_selection": selection_work,
    "neuron_top_k": top_work,
    "sparse_mlp_up": up_work,
    "sparse_mlp_down": down_work,
    "sparse_mlp": mlp_work,
}

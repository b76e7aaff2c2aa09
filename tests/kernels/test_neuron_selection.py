import math

import pytest
import torch

from chipsparse.kernels.neuron_selection import (
    NeuronSelection,
    mean_preactivations,
    neuron_selection,
)
from tests.kernels import formulas


def tolerance_of(dtype, backend):
    """A kernel's means have 16 bits for bf16, one bit less each half under the interpreter."""
    if dtype == torch.bfloat16 and backend != "reference":
        return 4e-5
    return 1e-12 if dtype == torch.float64 else 1e-5


def means_of(hidden, weight, bias, block_size, gate=None, activation=None):
    """Means of the pre-activations themselves, in float64; of a gated MLP, their product."""

    def linear(weight, bias):
        before = hidden.double() @ weight.double().T
        if bias is not None:
            before = before + bias.double()
        return torch.stack([part.mean(1) for part in before.split(block_size, dim=1)], dim=1)

    if gate is None:
        return linear(weight, bias)
    return formulas.activation_of(linear(*gate), activation) * linear(weight, bias)


@formulas.backend_names(neuron_selection)
@pytest.mark.parametrize("dtype", [*formulas.DTYPES, torch.float64])
@pytest.mark.parametrize("rows", [1, 7, 128, 131, 1337])
@pytest.mark.parametrize("with_bias", [False, True])
def test_mean_preactivations(backend, with_bias, rows, dtype, device):
    hidden, weight, bias, _ = formulas.mlp_inputs(2, rows, 24, 50, dtype=dtype, device=device)
    bias = bias if with_bias else None
    means = mean_preactivations(hidden, weight, bias, backend=backend)
    assert means.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = means_of(hidden, weight, bias, 128)
    formulas.assert_close(means, expected, tolerance_of(dtype, backend))


@formulas.backend_names(neuron_selection)
@pytest.mark.parametrize("dtype", formulas.DTYPES)
@pytest.mark.parametrize(("block_size", "channels", "neurons"), [(3, 200, 300), (13, 72, 8)])
def test_means_of_many_blocks(backend, block_size, channels, neurons, dtype, device, monkeypatch):
    """More blocks, channels and neurons than a tile or launch; views of larger tensors."""
    shape = (2, 220, channels + 8, neurons + 1)
    hidden, weight, bias, _ = formulas.mlp_inputs(*shape, dtype=dtype, device=device)
    hidden = hidden[..., 8:]
    weight = weight[1:, 8:]
    bias = bias[1:]
    if backend == "triton":
        kernels = "chipsparse.kernels.neuron_selection.triton_kernel"
        monkeypatch.setattr(f"{kernels}.MOST_BLOCKS", 7)
    means = mean_preactivations(hidden, weight, bias, block_size=block_size, backend=backend)
    expected = means_of(hidden, weight, bias, block_size)
    formulas.assert_close(means, expected, tolerance_of(dtype, backend))


SELECTIONS = [
    *((keep_count, size, None) for keep_count in (1, 17, 50, 99) for size in (64, 128)),
    *((17, 128, activation) for activation in ("gelu-tanh", "gelu", "silu")),
]


@formulas.backend_names(neuron_selection)
@pytest.mark.parametrize("dtype", formulas.DTYPES)
@pytest.mark.parametrize(("keep_count", "block_size", "activation"), SELECTIONS)
def test_keeps_neurons_that_moved_most(backend, keep_count, block_size, activation, dtype, device):
    """The highest scores are chosen, ascending, and their means alone are stored."""
    hidden, weight, bias, _ = formulas.mlp_inputs(2, 333, 24, 50, dtype=dtype, device=device)
    options = {"keep_count": keep_count, "block_size": block_size, "backend": backend}
    gate = None
    if activation is not None:
        gate = formulas.gate_inputs(24, 50, dtype=dtype, device=device)
        options |= {"gate_weight": gate[0], "gate_bias": gate[1], "activation": activation}
    old = torch.randn(2, formulas.blocks_of(333, block_size), 50, device=device)
    cache = old.clone()
    found = neuron_selection(hidden, weight, bias, cache, **options)
    means = means_of(hidden, weight, bias, block_size, gate, activation)
    scores = (means - old.double()).abs()
    assert (found.dtype, found.shape) == (torch.int32, (*old.shape[:2], min(keep_count, 50)))
    chosen = torch.zeros_like(old, dtype=torch.bool).scatter_(-1, found.long(), True)
    assert (found.diff(dim=-1) > 0).all()
    lowest_chosen = scores.masked_fill(~chosen, torch.inf).amin(-1)
    highest_other = scores.masked_fill(chosen, -torch.inf).amax(-1)
    tolerance = tolerance_of(dtype, backend)
    assert (lowest_chosen >= highest_other - tolerance).all()
    # Chosen entries have the new mean, all others are bit for bit the old one.
    formulas.assert_close(cache[chosen], means[chosen], tolerance)
    assert torch.equal(cache[~chosen], old[~chosen])


def test_scores_are_of_means_as_the_cache_stores_them():
    """A neuron whose stored mean would not change is not recomputed before one whose mean would."""
    hidden = torch.ones(1, 4, 1, dtype=torch.float64)
    # The first mean differs from the cached one by less than float32 can tell, by nothing the last.
    weight = torch.tensor([[1e8 + 3.0], [1.5], [2.0]], dtype=torch.float64)
    means = torch.tensor([1e8, 0.5, 2.0]).expand(1, 1, 3).clone()
    found = neuron_selection(hidden, weight, None, means, keep_count=1, block_size=4)
    assert found.tolist() == [[[1]]]
    assert means.tolist() == [[[1e8, 1.5, 2.0]]]


@formulas.backend_names(neuron_selection)
@pytest.mark.parametrize("dtype", formulas.DTYPES)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize(
    ("neurons", "keep_count"),
    [(1024, 1), (1024, 300), (1024, 1023), (1024, 1024), (9000, 4000)],
)
def test_scores_of_any_size(backend, neurons, keep_count, scale, dtype, device):
    """Exact: the scores are known to the last bit, as the means are zero.

    Of 9,000 neurons the Triton kernel makes three parts.
    """
    _, weight, _, _ = formulas.mlp_inputs(1, 1, 8, neurons, dtype=dtype, device=device)
    hidden = torch.zeros(1, 9, 8, dtype=dtype, device=device)
    # Few values, so that many are equal; then all different ones.
    for spread in (20, 1 << 20):
        old = torch.randint(-spread, spread, (1, 3, neurons), device=device) * scale / spread
        expected = old.abs().argsort(dim=-1, descending=True, stable=True)[..., :keep_count]
        cache = old.clone()
        options = {"keep_count": keep_count, "block_size": 3, "backend": backend}
        found = neuron_selection(hidden, weight, None, cache, **options)
        assert torch.equal(found.long(), expected.sort(-1).values)
        assert torch.equal(cache, old.scatter(-1, expected, 0.0))


@formulas.backend_names(neuron_selection)
@pytest.mark.parametrize("dtype", formulas.DTYPES)
def test_ties_nan_and_repeats(backend, dtype, device):
    hidden, weight, bias, _ = formulas.mlp_inputs(1, 20, 24, 50, dtype=dtype, device=device)
    exact = mean_preactivations(hidden, weight, bias, backend=backend)

    def choose(cache, keep_count):
        options = {"keep_count": keep_count, "backend": backend}
        return neuron_selection(hidden, weight, bias, cache, **options).tolist()

    assert choose(exact.clone(), 5) == [[[0, 1, 2, 3, 4]]]
    moved = exact.clone()
    moved[0, 0, 31] += 1
    moved[0, 0, 40] = torch.nan
    assert choose(moved.clone(), 1) == [[[40]]]
    assert choose(moved.clone(), 3) == [[[0, 31, 40]]]
    unchanged = moved.clone()
    assert choose(unchanged, 0) == [[[]]]
    assert torch.equal(unchanged[0, 0, :40], moved[0, 0, :40])
    cache = moved.clone()
    choose(cache, 2)
    assert torch.equal(cache, exact)
    assert choose(cache, 2) == [[[0, 1]]]
    worst = exact.clone()
    worst[0, 0, 7:] = torch.inf
    worst[0, 0, 9] = torch.nan
    worst[0, 0, 48] = -torch.nan
    assert choose(worst.clone(), 1) == [[[9]]]
    assert choose(worst.clone(), 4) == [[[7, 8, 9, 48]]]
    assert choose(torch.full_like(exact, torch.nan), 3) == [[[0, 1, 2]]]


def test_more_blocks_than_the_second_axis_of_a_grid_has(monkeypatch):
    """A block may be one token."""
    kernels = pytest.importorskip("chipsparse.kernels.neuron_selection.triton_kernel")
    grids = []

    def launch_of(_, grid, *numbers, **constants):
        return lambda *tensors: grids.append(grid)

    monkeypatch.setattr(kernels, "Launch", launch_of)
    hidden = torch.zeros(2, 70_000, 8).half()
    weight = torch.zeros(16, 8).half()
    cache = torch.zeros(2, 70_000, 16)
    call = NeuronSelection(hidden, weight, None, cache, keep_count=5, block_size=1)
    kernels.neuron_selection(call)
    assert max(size for grid in grids for size in grid[1:]) <= 65_535
    assert [math.prod(grid) for grid in grids[:2]] == [2 * 65_535, 2 * 4_465]
    assert grids[3] == (70_000, 1, 2)

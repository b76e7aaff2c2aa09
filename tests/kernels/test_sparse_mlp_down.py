import pytest
import torch
import torch.nn.functional as F

from chipsparse.kernels.sparse_mlp_down import BACKENDS, sparse_mlp_down
from chipsparse.kernels.sparse_mlp_up import sparse_mlp_up
from tests.kernels.formulas import (
    DTYPES,
    TOLERANCE,
    assert_close,
    backend_names,
    groups_of,
    mlp_inputs,
    random_neurons,
    skip_unless_it_runs,
)


def added(delta, weight, neurons, counts, group_rows):
    """``delta @ weight[:, S].T``, neuron by neuron, in float64."""
    result = torch.zeros(*delta.shape[:2], weight.shape[0], dtype=torch.float64)
    for b in range(delta.shape[0]):
        for g in range(neurons.shape[1]):
            rows = slice(g * group_rows, (g + 1) * group_rows)
            count = neurons.shape[2] if counts is None else int(counts[b, g])
            for place, neuron in enumerate(neurons[b, g, :count].tolist()):
                change = delta[b, rows, place].double().cpu()
                result[b, rows] += torch.outer(change, weight[:, neuron].double().cpu())
    return result


@backend_names(BACKENDS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("rows", [1, 7, 131, 333])
def test_matches_the_layer_neuron_by_neuron(backend, rows, dtype, device):
    _, _, _, weight = mlp_inputs(2, rows, 24, 50, dtype=dtype, device=device)
    delta = torch.randn(2, rows, 17, device=device).to(dtype)
    skip_unless_it_runs(BACKENDS, backend, delta, weight)
    neurons = random_neurons(2, groups_of(rows, 128), 17, 50, device=device)
    old = torch.randn(2, rows, 24, device=device).to(dtype)
    cache = old.clone()
    result = sparse_mlp_down(delta, weight, neurons, cache, backend=backend)
    assert result is cache
    expected = old.double().cpu() + added(delta, weight, neurons, None, 128)
    assert_close(cache, expected, TOLERANCE[dtype])


@backend_names(BACKENDS)
@pytest.mark.parametrize("group_rows", [1, 13, 64, 500])
def test_counts_and_group_sizes(backend, group_rows, device):
    _, _, _, weight = mlp_inputs(2, 70, 24, 50, dtype=torch.float32, device=device)
    delta = torch.randn(2, 70, 9, device=device)
    skip_unless_it_runs(BACKENDS, backend, delta, weight)
    groups = groups_of(70, group_rows)
    neurons = random_neurons(2, groups, 9, 50, device=device)
    counts = torch.arange(2 * groups, device=device).view(2, groups).int() % 10
    old = torch.randn(2, 70, 24, device=device)
    cache, before = old.clone(), delta.clone()
    sparse_mlp_down(
        delta, weight, neurons, cache, counts=counts, group_rows=group_rows, backend=backend
    )
    expected = old.double().cpu() + added(delta, weight, neurons, counts, group_rows)
    assert_close(cache, expected, 1e-5)
    assert torch.equal(delta, before)
    empty_rows = slice(0, min(group_rows, 70))  # the first group's count is 0
    assert torch.equal(cache[0, empty_rows], old[0, empty_rows])


@backend_names(BACKENDS)
def test_no_neurons_change_nothing(backend, device):
    cache = torch.randn(1, 131, 24, device=device)
    before = cache.clone()
    delta = torch.zeros(1, 131, 0, device=device)
    weight = torch.randn(24, 50, device=device)
    skip_unless_it_runs(BACKENDS, backend, delta, weight)
    neurons = torch.zeros(1, 2, 0, dtype=torch.int32, device=device)
    sparse_mlp_down(delta, weight, neurons, cache, backend=backend)
    assert torch.equal(cache, before)


def test_up_then_down_on_all_neurons_is_the_dense_layer(device):
    hidden, up, bias, down = mlp_inputs(2, 333, 24, 50, dtype=torch.float32, device=device)
    earlier = hidden + torch.randn_like(hidden)
    activation = F.gelu(F.linear(earlier, up, bias), approximate="tanh")
    output = F.linear(activation, down)
    everything = torch.arange(50, dtype=torch.int32, device=device).expand(2, 3, 50)
    delta = sparse_mlp_up(hidden, up, bias, everything, activation, activation="gelu-tanh")
    sparse_mlp_down(delta, down, everything, output)
    expected = F.linear(F.gelu(F.linear(hidden, up, bias), approximate="tanh"), down)
    assert_close(output, expected, 1e-5)


def test_mistakes_are_named():
    good = {
        "delta": torch.zeros(1, 200, 20),
        "weight": torch.zeros(24, 50),
        "neuron_indices": torch.zeros(1, 2, 20, dtype=torch.int32),
        "output_cache": torch.zeros(1, 200, 24),
    }
    for change, message in [
        ({"delta": torch.zeros(200, 20)}, r"delta must be \[B, N, K\], got \[200, 20\]"),
        ({"weight": torch.zeros(24)}, r"weight must be \[C, F\], got \[24\]"),
        ({"weight": torch.zeros(24, 50).half()}, "weight must be torch.float32"),
        ({"delta": torch.zeros(1, 200, 21)}, r"neuron_indices must be \[1, 2, 21\]"),
        ({"output_cache": torch.zeros(1, 200, 25)}, r"output_cache must be \[1, 200, 24\]"),
        ({"output_cache": torch.zeros(1, 200, 24).int()}, "got torch.int32"),
        ({"counts": torch.zeros(1, 3, dtype=torch.int32)}, r"counts must be \[1, 2\]"),
        ({"group_rows": -1}, "group_rows must be at least 1, got -1"),
        ({"backend": "fast"}, "unknown backend 'fast'"),
    ]:
        with pytest.raises(ValueError, match=message):
            sparse_mlp_down(**{**good, **change})

import pytest
import torch

from chipsparse.kernels.sparse_mlp_up import BACKENDS, sparse_mlp_up
from tests.kernels.formulas import (
    DTYPES,
    TOLERANCE,
    assert_close,
    backend_names,
    groups_of,
    mlp_inputs,
    neuron_activation,
    random_neurons,
    skip_unless_it_runs,
)

ACTIVATIONS = ["gelu-tanh", "gelu", "silu"]


def check(hidden, weight, bias, neurons, counts, old, cache, delta, activation, group_rows):
    """Every listed entry has its new value and change, every other is bit for bit the old one."""
    tolerance = TOLERANCE[hidden.dtype]
    untouched = torch.ones_like(cache, dtype=torch.bool)
    for b in range(hidden.shape[0]):
        for g in range(neurons.shape[1]):
            rows = slice(g * group_rows, min((g + 1) * group_rows, hidden.shape[1]))
            count = neurons.shape[2] if counts is None else int(counts[b, g])
            for place, neuron in enumerate(neurons[b, g, :count].tolist()):
                new = neuron_activation(hidden[b, rows], weight, bias, neuron, activation)
                assert_close(cache[b, rows, neuron], new, tolerance)
                change = cache[b, rows, neuron].double() - old[b, rows, neuron].double()
                assert_close(delta[b, rows, place], change, tolerance)
                untouched[b, rows, neuron] = False
            assert (delta[b, rows, count:] == 0).all()
    assert torch.equal(cache[untouched], old[untouched])


@backend_names(BACKENDS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("rows", [1, 7, 131, 333])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_matches_the_layer_neuron_by_neuron(backend, rows, dtype, activation, device):
    hidden, weight, bias, _ = mlp_inputs(2, rows, 24, 50, dtype=dtype, device=device)
    skip_unless_it_runs(BACKENDS, backend, hidden, weight)
    neurons = random_neurons(2, groups_of(rows, 128), 17, 50, device=device)
    old = torch.randn(2, rows, 50, device=device).to(dtype)
    cache = old.clone()
    delta = sparse_mlp_up(
        hidden, weight, bias, neurons, cache, activation=activation, backend=backend
    )
    assert delta.dtype == dtype
    assert delta.shape == (2, rows, 17)
    check(hidden, weight, bias, neurons, None, old, cache, delta, activation, 128)


@backend_names(BACKENDS)
@pytest.mark.parametrize("group_rows", [1, 13, 64, 500])
@pytest.mark.parametrize("with_bias", [False, True])
def test_counts_and_group_sizes(backend, group_rows, with_bias, device):
    hidden, weight, bias, _ = mlp_inputs(2, 70, 24, 50, dtype=torch.float32, device=device)
    skip_unless_it_runs(BACKENDS, backend, hidden, weight)
    groups = groups_of(70, group_rows)
    neurons = random_neurons(2, groups, 9, 50, device=device)
    counts = torch.arange(2 * groups, device=device).view(2, groups).int() % 10
    # The usual filler past the count is neuron 0, whether or not the list has it.
    past = torch.arange(9, device=device) >= counts[..., None]
    neurons = neurons.masked_fill(past, 0)
    neurons[0, -1, 0] = 0
    old = torch.randn(2, 70, 50, device=device)
    cache = old.clone()
    used_bias = bias if with_bias else None
    delta = sparse_mlp_up(
        hidden,
        weight,
        used_bias,
        neurons,
        cache,
        counts=counts,
        activation="gelu",
        group_rows=group_rows,
        backend=backend,
    )
    check(hidden, weight, used_bias, neurons, counts, old, cache, delta, "gelu", group_rows)


@backend_names(BACKENDS)
def test_all_neurons_and_none(backend, device):
    hidden, weight, bias, _ = mlp_inputs(1, 131, 24, 50, dtype=torch.float32, device=device)
    skip_unless_it_runs(BACKENDS, backend, hidden, weight)
    old = torch.randn(1, 131, 50, device=device)
    cache = old.clone()
    everything = torch.arange(50, dtype=torch.int32, device=device).expand(1, 2, 50)
    delta = sparse_mlp_up(
        hidden, weight, bias, everything, cache, activation="silu", backend=backend
    )
    check(hidden, weight, bias, everything, None, old, cache, delta, "silu", 128)
    before = cache.clone()
    nothing = everything[..., :0]
    delta = sparse_mlp_up(hidden, weight, bias, nothing, cache, activation="silu", backend=backend)
    assert delta.shape == (1, 131, 0)
    assert torch.equal(cache, before)


@backend_names(BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_changes_add_up_to_the_cache_without_drift(backend, dtype, device):
    """Repeating a step changes nothing more, bit for bit, also in half precision."""
    hidden, weight, bias, _ = mlp_inputs(1, 200, 24, 50, dtype=dtype, device=device)
    skip_unless_it_runs(BACKENDS, backend, hidden, weight)
    neurons = random_neurons(1, 2, 20, 50, device=device)
    cache = torch.randn(1, 200, 50, device=device).to(dtype)
    arguments = (hidden, weight, bias, neurons, cache)
    first = sparse_mlp_up(*arguments, activation="gelu-tanh", backend=backend)
    once = cache.clone()
    second = sparse_mlp_up(*arguments, activation="gelu-tanh", backend=backend)
    assert (first != 0).any()
    assert (second == 0).all()
    assert torch.equal(cache, once)


def test_mistakes_are_named():
    hidden, weight, bias, _ = mlp_inputs(1, 200, 24, 50, dtype=torch.float32, device="cpu")
    neurons = random_neurons(1, 2, 20, 50, device="cpu")
    good = {
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "neuron_indices": neurons,
        "activation_cache": torch.zeros(1, 200, 50),
        "activation": "gelu",
    }
    for change, message in [
        ({"activation": "relu"}, "got 'relu'"),
        ({"hidden": hidden[0]}, r"hidden must be \[B, N, C\], got \[200, 24\]"),
        ({"weight": weight.T}, r"weight must be \[24, 24\], got \[24, 50\]"),
        ({"weight": weight.half()}, "weight must be torch.float32, got torch.float16"),
        ({"bias": bias[:3]}, r"bias must be \[50\], got \[3\]"),
        ({"neuron_indices": neurons.long()}, "neuron_indices must be torch.int32, got torch.int64"),
        ({"group_rows": 64}, r"neuron_indices must be \[1, 4, 20\], got \[1, 2, 20\]"),
        ({"activation_cache": torch.zeros(1, 200, 51)}, r"activation_cache must be \[1, 200, 50\]"),
        ({"counts": torch.zeros(1, 3, dtype=torch.int32)}, r"counts must be \[1, 2\]"),
        ({"backend": "fast"}, "unknown backend 'fast'"),
    ]:
        with pytest.raises(ValueError, match=message):
            sparse_mlp_up(**{**good, **change})

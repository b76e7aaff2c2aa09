import pytest
import torch

from chipsparse.kernels.neuron_selection import (
    BACKENDS,
    group_means,
    mean_preactivations,
    neuron_selection,
)
from tests.kernels.formulas import (
    DTYPES,
    assert_close,
    backend_names,
    groups_of,
    mlp_inputs,
    skip_unless_it_runs,
)


def means_of(hidden, weight, bias, group_rows):
    """Means of the pre-activations themselves, in float64."""
    before = hidden.double() @ weight.double().T
    if bias is not None:
        before = before + bias.double()
    return torch.stack([part.mean(1) for part in before.split(group_rows, dim=1)], dim=1)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("rows", [1, 7, 128, 131, 1337])
@pytest.mark.parametrize("with_bias", [False, True])
def test_mean_preactivations(rows, dtype, with_bias, device):
    hidden, weight, bias, _ = mlp_inputs(2, rows, 24, 50, dtype=dtype, device=device)
    bias = bias if with_bias else None
    means = mean_preactivations(hidden, weight, bias)
    assert means.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert_close(means, means_of(hidden, weight, bias, 128), tolerance)


@pytest.mark.parametrize("group_rows", [1, 13, 64, 500])
def test_group_means(group_rows, device):
    hidden = torch.randn(2, 70, 24, device=device)
    means = group_means(hidden, group_rows=group_rows)
    expected = [part.double().mean(1) for part in hidden.split(group_rows, dim=1)]
    assert_close(means, torch.stack(expected, dim=1), 1e-6)


def test_group_means_of_half_precision_do_not_overflow():
    hidden = torch.full((1, 300, 2), 6e4, dtype=torch.float16)
    assert group_means(hidden).tolist() == [[[60000.0] * 2] * 3]


@backend_names(BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_rows", [64, 128])
@pytest.mark.parametrize("keep_count", [1, 17, 50, 99])
def test_keeps_the_neurons_that_moved_most(backend, keep_count, group_rows, dtype, device):
    hidden, weight, bias, _ = mlp_inputs(2, 333, 24, 50, dtype=dtype, device=device)
    skip_unless_it_runs(BACKENDS, backend, hidden, weight)
    groups = groups_of(333, group_rows)
    old = torch.randn(2, groups, 50, device=device)
    cache = old.clone()
    neurons = neuron_selection(
        hidden,
        weight,
        bias,
        cache,
        keep_count=keep_count,
        group_rows=group_rows,
        backend=backend,
    )
    means = means_of(hidden, weight, bias, group_rows)
    scores = (means - old.double()).abs()
    assert neurons.dtype == torch.int32
    assert neurons.shape == (2, groups, min(keep_count, 50))
    chosen = torch.zeros_like(old, dtype=torch.bool).scatter_(-1, neurons.long(), True)
    assert (neurons.diff(dim=-1) > 0).all()
    lowest_chosen = scores.masked_fill(~chosen, torch.inf).amin(-1)
    highest_other = scores.masked_fill(chosen, -torch.inf).amax(-1)
    assert (lowest_chosen >= highest_other - 1e-5).all()
    # Chosen entries have the new mean, all others are bit for bit the old one.
    assert_close(cache[chosen], means[chosen], 1e-5)
    assert torch.equal(cache[~chosen], old[~chosen])


@backend_names(BACKENDS)
def test_ties_nan_and_repeats(backend, device):
    hidden, weight, bias, _ = mlp_inputs(1, 20, 24, 50, dtype=torch.float32, device=device)
    skip_unless_it_runs(BACKENDS, backend, hidden, weight)
    exact = mean_preactivations(hidden, weight, bias)

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


def test_mistakes_are_named():
    hidden, weight, bias, _ = mlp_inputs(1, 200, 24, 50, dtype=torch.float32, device="cpu")
    good = {
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "mean_cache": torch.zeros(1, 2, 50),
        "keep_count": 5,
    }
    for change, message in [
        ({"keep_count": -1}, "keep_count must not be negative, got -1"),
        ({"hidden": hidden[:, :0]}, r"hidden must be \[B, N, C\], got \[1, 0, 24\]"),
        ({"weight": weight.T}, r"weight must be \[24, 24\], got \[24, 50\]"),
        ({"bias": bias[:3]}, r"bias must be \[50\], got \[3\]"),
        ({"mean_cache": torch.zeros(1, 3, 50)}, r"mean_cache must be \[1, 2, 50\]"),
        ({"mean_cache": torch.zeros(1, 2, 50).half()}, "got torch.float16"),
        ({"group_rows": 0}, "group_rows must be at least 1, got 0"),
        ({"backend": "fast"}, "unknown backend 'fast'"),
    ]:
        with pytest.raises(ValueError, match=message):
            neuron_selection(**{**good, **change})

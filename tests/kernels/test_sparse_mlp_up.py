import pytest
import torch

from chipsparse.kernels.fp8_quantization import FP8
from chipsparse.kernels.fp8_rows import fp8_rows
from chipsparse.kernels.sparse_mlp_up import FP8_HEADROOM, dense_activation, sparse_mlp_up
from chipsparse.kernels.token_layout import is_token_contiguous
from tests.kernels.formulas import (
    DTYPES,
    TOLERANCE,
    activation_of,
    assert_close,
    assert_rounded,
    backend_names,
    blocks_of,
    gate_inputs,
    mlp_inputs,
    neuron_activation,
    padding_of,
    random_neurons,
    token_contiguous,
    without_padding,
)

ACTIVATIONS = ["gelu-tanh", "gelu", "silu"]
HALVES = [torch.bfloat16, torch.float16]


def random_cache(batch, rows, neurons, *, dtype, device, seed=2):
    generator = torch.Generator().manual_seed(seed)
    cache = torch.randn(batch, rows, neurons, generator=generator)
    return token_contiguous(cache.to(device, dtype))


def check(
    hidden, weight, bias, neurons, old, cache, delta, gate, *, counts, activation, block_size
):
    """Every listed entry has its new value and change, every other is bit for bit the old one."""
    tolerance = TOLERANCE[hidden.dtype]
    untouched = torch.ones_like(cache, dtype=torch.bool)
    for b in range(hidden.shape[0]):
        for g in range(neurons.shape[1]):
            rows = slice(g * block_size, min((g + 1) * block_size, hidden.shape[1]))
            count = neurons.shape[2] if counts is None else int(counts[b, g])
            listed = neurons[b, g, :count].tolist()
            new = [
                neuron_activation(hidden[b, rows], weight, bias, neuron, activation, gate)
                for neuron in listed
            ]
            if listed:
                assert_close(cache[b, rows][:, listed], torch.stack(new, 1), tolerance)
            change = cache[b, rows][:, listed].double() - old[b, rows][:, listed].double()
            assert_rounded(delta[b, rows, :count], change)
            untouched[b, rows, listed] = False
            assert (delta[b, rows, count:] == 0).all()
    assert torch.equal(cache[untouched], old[untouched])


def run_and_check(backend, hidden, weight, bias, neurons, cache, *, gate=None, **options):
    old = cache.clone()
    options = {"activation": "gelu-tanh", "block_size": 128, "counts": None, **options}
    gate_weight, gate_bias = gate or (None, None)
    gates = {"gate_weight": gate_weight, "gate_bias": gate_bias}
    given = (hidden, weight, bias, neurons)
    delta = sparse_mlp_up(*given, cache, **gates, **options, backend=backend)
    assert delta.dtype == hidden.dtype
    assert delta.shape == (*hidden.shape[:2], neurons.shape[2])
    assert is_token_contiguous(delta) == is_token_contiguous(cache)
    check(*given, old, cache, delta, gate, **options)


@backend_names(sparse_mlp_up)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("rows", [1, 7, 131, 333])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_matches_the_layer_neuron_by_neuron(backend, rows, dtype, activation, device):
    hidden, weight, bias, _ = mlp_inputs(2, rows, 24, 50, dtype=dtype, device=device)
    cache = random_cache(2, rows, 50, dtype=dtype, device=device)
    neurons = random_neurons(2, blocks_of(rows, 128), 17, 50, device=device)
    run_and_check(backend, hidden, weight, bias, neurons, cache, activation=activation)


@backend_names(sparse_mlp_up)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_gated(backend, with_bias, activation, dtype, device):
    hidden, weight, bias, _ = mlp_inputs(2, 131, 24, 50, dtype=dtype, device=device)
    gate_weight, gate_bias = gate_inputs(24, 50, dtype=dtype, device=device)
    cache = random_cache(2, 131, 50, dtype=dtype, device=device)
    neurons = random_neurons(2, 2, 17, 50, device=device)
    gate = (gate_weight, gate_bias if with_bias else None)
    bias = bias if with_bias else None
    run_and_check(backend, hidden, weight, bias, neurons, cache, activation=activation, gate=gate)


@backend_names(sparse_mlp_up)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 13, 64, 128, 500])
@pytest.mark.parametrize("gated", [False, True])
def test_counts_and_block_sizes(backend, gated, block_size, dtype, device):
    hidden, weight, bias, _ = mlp_inputs(2, 70, 24, 50, dtype=dtype, device=device)
    cache = random_cache(2, 70, 50, dtype=dtype, device=device)
    gate = gate_inputs(24, 50, dtype=dtype, device=device) if gated else None
    blocks = blocks_of(70, block_size)
    neurons = random_neurons(2, blocks, 9, 50, device=device)
    counts = torch.arange(2 * blocks, device=device).view(2, blocks).int() % 10
    # The usual filler past the count is neuron 0, whether or not the list has it.
    past = torch.arange(9, device=device) >= counts[..., None]
    neurons = neurons.masked_fill(past, 0)
    neurons[0, -1, 0] = 0
    options = {"counts": counts, "activation": "gelu", "block_size": block_size, "gate": gate}
    run_and_check(backend, hidden, weight, None if gated else bias, neurons, cache, **options)


def fp8_cache(batch, rows, neurons, *, device, seed=2):
    """Activations in e4m3, and the scales of their tokens, of which one is small."""
    old = random_cache(batch, rows, neurons, dtype=torch.float32, device=device, seed=seed)
    old[:, rows // 2] *= 1e-3
    return fp8_rows(old, headroom=FP8_HEADROOM, turned=True, backend="reference")


def units_of(cache):
    return cache.view(torch.uint8).mT.contiguous().view(FP8).double().mT


@backend_names(sparse_mlp_up)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 7, 131, 333])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("block_size", [64, 128])
def test_a_cache_in_fp8(backend, block_size, gated, rows, dtype, device):
    """New activations in units of their token's scale; their change is that of what is stored."""
    hidden, weight, bias, _ = mlp_inputs(2, rows, 24, 50, dtype=dtype, device=device)
    gate = gate_inputs(24, 50, dtype=dtype, device=device) if gated else None
    cache, scale = fp8_cache(2, rows, 50, device=device)
    gate_weight, gate_bias = gate or (None, None)
    blocks = blocks_of(rows, block_size)
    neurons = random_neurons(2, blocks, 17, 50, device=device)
    counts = torch.arange(2 * blocks, device=device).view(2, blocks).int() % 7 + 11
    old, before = units_of(cache), cache.clone()
    options = {"cache_scale": scale, "counts": counts, "activation": "silu"}
    options |= {"gate_weight": gate_weight, "gate_bias": gate_bias, "block_size": block_size}
    delta = sparse_mlp_up(hidden, weight, bias, neurons, cache, **options, backend=backend)
    assert is_token_contiguous(delta)
    new, scale = units_of(cache), scale.double()
    untouched = torch.ones_like(old, dtype=torch.bool)
    for b in range(2):
        for g in range(blocks):
            tokens = slice(g * block_size, min((g + 1) * block_size, rows))
            count = int(counts[b, g])
            listed = neurons[b, g, :count].tolist()
            exact = [
                neuron_activation(hidden[b, tokens], weight, bias, neuron, "silu", gate)
                for neuron in listed
            ]
            exact = torch.stack(exact, 1) / scale[b, tokens]
            found = new[b, tokens][:, listed]
            # Half of the distance of two numbers of e4m3, and what float32 rounds before.
            room = exact.abs().clamp(2.0**-6, 448) / 16 + 1e-5 * (
                exact.abs() + 1 / scale[b, tokens]
            )
            assert ((found - exact.clamp(-448, 448)).abs() <= room).all()
            change = (found - old[b, tokens][:, listed]) * scale[b, tokens]
            assert_rounded(delta[b, tokens, :count], change)
            untouched[b, tokens, listed] = False
            assert (delta[b, tokens, count:] == 0).all()
    assert torch.equal(cache.view(torch.uint8)[untouched], before.view(torch.uint8)[untouched])


@backend_names(sparse_mlp_up)
def test_what_a_cache_in_fp8_cannot_hold(backend, device):
    """Large activations saturate; such as are not finite come out, and spoil no others."""
    hidden = torch.ones(1, 24, 16, dtype=torch.bfloat16, device=device)
    hidden[0, 1], hidden[0, 2, 3], hidden[0, 3, 3] = 100, torch.nan, torch.inf
    weight = torch.ones(8, 16, dtype=torch.bfloat16, device=device)
    cache, scale = fp8_rows(
        torch.ones(1, 24, 8, device=device), headroom=16, turned=True, backend="reference"
    )
    scale[0, 4] = torch.nan  # its activations were not finite at the refresh
    neurons = torch.arange(4, dtype=torch.int32, device=device).view(1, 1, 4)

    def change():
        return sparse_mlp_up(
            hidden, weight, None, neurons, cache, cache_scale=scale, activation="silu",
            backend=backend,
        ).float()  # fmt: skip

    first = change()
    one, most = 28 * float(scale[0, 0]), 448 * float(scale[0, 0])
    torch.testing.assert_close(first[0, 1], torch.full_like(first[0, 1], most - one))
    assert not first[0, 2:5].isfinite().any()
    assert first[0, 5:].isfinite().all()
    second = change()  # of the same tokens
    assert (second[0, [0, 1, *range(5, 24)]] == 0).all()
    assert not second[0, 2:5].isfinite().any()


@backend_names(sparse_mlp_up)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [8, 72, 160])
def test_more_neurons_than_a_tile_and_odd_channels(backend, channels, dtype, device):
    """Several tiles of neurons and of channels, some of them partial or past the count."""
    hidden, weight, bias, _ = mlp_inputs(1, 300, channels, 350, dtype=dtype, device=device)
    cache = random_cache(1, 300, 350, dtype=dtype, device=device)
    neurons = random_neurons(1, 3, 333, 350, device=device)
    counts = torch.tensor([[333, 256, 3]], dtype=torch.int32, device=device)
    run_and_check(backend, hidden, weight, bias, neurons, cache, counts=counts)


@backend_names(sparse_mlp_up)
def test_views_of_larger_tensors(backend, device):
    """Channels, neurons and tokens cut out of larger tensors; what is around them stays."""
    hidden, weight, bias, _ = mlp_inputs(2, 140, 48, 70, dtype=torch.bfloat16, device=device)
    hidden, weight, bias = hidden[:, 4:137, 8:32], weight[16:66, 16:40], bias[16:66]
    whole = random_cache(2, 160, 60, dtype=torch.bfloat16, device=device)
    before = whole.clone()
    cache = whole[:, 16:149, 5:55]
    neurons = random_neurons(2, 2, 17, 50, device=device)
    run_and_check(backend, hidden, weight, bias, neurons, cache)
    cache.copy_(before[:, 16:149, 5:55])
    assert torch.equal(whole, before)


@backend_names(sparse_mlp_up)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 7, 131, 136, 333])
@pytest.mark.parametrize("gated", [False, True])
def test_what_pads_the_tokens_is_not_seen(backend, gated, rows, cache_dtype, device):
    """The same bits whatever stands there, and with a cache that has no padding."""
    hidden, weight, bias, _ = mlp_inputs(2, rows, 24, 50, dtype=torch.bfloat16, device=device)
    gate_weight = gate_inputs(24, 50, dtype=torch.bfloat16, device=device)[0] if gated else None
    old = random_cache(2, rows, 50, dtype=cache_dtype, device=device)
    neurons = random_neurons(2, blocks_of(rows, 128), 17, 50, device=device)

    def change(cache):
        options = {"activation": "gelu", "gate_weight": gate_weight, "backend": backend}
        return sparse_mlp_up(hidden, weight, bias, neurons, cache, **options)

    expected = token_contiguous(old)
    delta = change(expected)
    assert delta.isfinite().all()
    for value in (0.0, torch.inf):  # at first it is NaN
        cache = token_contiguous(old)
        padding_of(cache).fill_(value)
        assert torch.equal(change(cache), delta)
        assert torch.equal(cache, expected)
    if rows % 8:
        for cache, whole in without_padding(old):
            assert torch.equal(change(cache), delta)
            assert torch.equal(cache, expected)
            cache.fill_(7.0)
            assert (whole == 7.0).all()


@backend_names(sparse_mlp_up)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_changes_add_up_to_the_cache_without_drift(backend, gated, dtype, device):
    """Repeating a step changes nothing more, bit for bit, also in half precision."""
    hidden, weight, bias, _ = mlp_inputs(1, 200, 24, 50, dtype=dtype, device=device)
    cache = random_cache(1, 200, 50, dtype=dtype, device=device)
    gate_weight = gate_inputs(24, 50, dtype=dtype, device=device)[0] if gated else None
    neurons = random_neurons(1, 2, 20, 50, device=device)
    arguments = (hidden, weight, bias, neurons, cache)
    options = {"activation": "gelu-tanh", "gate_weight": gate_weight, "backend": backend}
    first = sparse_mlp_up(*arguments, **options)
    once = cache.clone()
    second = sparse_mlp_up(*arguments, **options)
    assert (first != 0).any()
    assert (second == 0).all()
    assert torch.equal(cache, once)


@backend_names(sparse_mlp_up)
def test_poisoned_entries_stay_and_recover(backend, device):
    """NaN in the cache shows in the change of the listed entries alone, and once."""
    hidden, weight, bias, _ = mlp_inputs(1, 131, 24, 50, dtype=torch.bfloat16, device=device)
    cache = token_contiguous(torch.full((1, 131, 50), torch.nan, device=device).bfloat16())
    neurons = random_neurons(1, 2, 20, 50, device=device)
    arguments = (hidden, weight, bias, neurons, cache)
    assert sparse_mlp_up(*arguments, activation="gelu", backend=backend).isnan().all()
    assert int((~cache.isnan()).sum()) == 131 * 20
    assert (sparse_mlp_up(*arguments, activation="gelu", backend=backend) == 0).all()


# dense_activation


@backend_names(sparse_mlp_up)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_dense_activation(backend, gated, activation, dtype, device):
    hidden, weight, bias, _ = mlp_inputs(2, 133, 24, 50, dtype=dtype, device=device)
    gate_weight, gate_bias = gate_inputs(24, 50, dtype=dtype, device=device)
    gate = {"gate_weight": gate_weight, "gate_bias": gate_bias} if gated else {}
    found = dense_activation(hidden, weight, bias, activation=activation, **gate, backend=backend)
    up = hidden.double() @ weight.double().mT + bias.double()
    expected = activation_of(up, activation)
    if gated:
        before = hidden.double() @ gate_weight.double().mT + gate_bias.double()
        expected = activation_of(before, activation) * up
    assert found.dtype == dtype
    # A kernel's product is rounded before the bias is added to it, and each factor of a gate.
    assert_close(found, expected, TOLERANCE[dtype])
    assert is_token_contiguous(found) == (backend != "reference")
    assert backend != "reference" or found.is_contiguous()
    assert not found.requires_grad


@pytest.mark.parametrize("activation", ["gelu-tanh", "gelu", "silu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_activation_where_nothing_sparse_follows(activation, bias, dtype, device):
    generator = torch.Generator().manual_seed(0)
    wide, weight, offset = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in [(2, 70, 48), (96, 32), (96,)]
    )
    hidden, offset = wide[..., 16:], offset if bias else None  # as a joined tensor has it
    with torch.no_grad():
        found = dense_activation(hidden, weight, offset, activation=activation, backend="library")
    exact = torch.nn.functional.linear(
        hidden.double(), weight.double(), None if offset is None else offset.double()
    )
    exact = {
        "gelu-tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "gelu": torch.nn.functional.gelu,
        "silu": torch.nn.functional.silu,
    }[activation](exact)
    assert found.is_contiguous()
    assert found.dtype == dtype
    assert_close(found, exact, TOLERANCE[dtype])

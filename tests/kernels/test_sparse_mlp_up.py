import pytest
import torch

from chipsparse.kernels.fp8_quantization import FP8
from chipsparse.kernels.fp8_rows import fp8_rows
from chipsparse.kernels.sparse_mlp_up import FP8_HEADROOM, dense_activation, sparse_mlp_up
from chipsparse.kernels.token_layout import is_token_contiguous
from tests.kernels import formulas

ACTIVATIONS = ["gelu-tanh", "gelu", "silu"]
either_gate = pytest.mark.parametrize("gated", [False, True])
any_dtype = pytest.mark.parametrize("dtype", formulas.DTYPES)


def layer_of(batch, rows, channels, neurons, *, dtype, device, gated=False, biased=True):
    """The tokens and weights of a layer, by the names of the operations' arguments."""
    options = {"dtype": dtype, "device": device}
    hidden, weight, bias, _ = formulas.mlp_inputs(batch, rows, channels, neurons, **options)
    layer = {"hidden": hidden, "weight": weight, "bias": bias if biased else None}
    if gated:
        gate_weight, gate_bias = formulas.gate_inputs(channels, neurons, **options)
        layer |= {"gate_weight": gate_weight, "gate_bias": gate_bias if biased else None}
    return layer


def random_cache(batch, rows, neurons, *, dtype, device):
    generator = torch.Generator().manual_seed(2)
    cache = torch.randn(batch, rows, neurons, generator=generator)
    return formulas.token_contiguous(cache.to(device, dtype))


def listed_activations(layer, neurons, *, activation, block_size=128):
    """The batch, rows and listed neurons of every block, and their activations in float64."""
    hidden = layer["hidden"]
    gate = (layer["gate_weight"], layer["gate_bias"]) if "gate_weight" in layer else None
    for b in range(hidden.shape[0]):
        for g in range(neurons.shape[1]):
            rows = slice(g * block_size, min((g + 1) * block_size, hidden.shape[1]))
            listed = neurons[b, g].tolist()
            exact = hidden.new_zeros(rows.stop - rows.start, len(listed), dtype=torch.float64)
            for place, neuron in enumerate(listed):
                exact[:, place] = formulas.neuron_activation(
                    hidden[b, rows],
                    layer["weight"],
                    layer["bias"],
                    neuron,
                    activation,
                    gate,
                )
            yield b, rows, listed, exact


def run_and_check(backend, layer, neurons, cache, **options):
    """Every listed entry has its new value and change, every other is bit for bit the old one."""
    hidden = layer["hidden"]
    old = cache.clone()
    options = {"activation": "gelu-tanh", **options}
    arguments = {**layer, "neuron_indices": neurons, "activation_cache": cache}
    delta = sparse_mlp_up(**arguments, **options, backend=backend)
    assert (delta.dtype, delta.shape) == (hidden.dtype, (*hidden.shape[:2], neurons.shape[2]))
    assert is_token_contiguous(delta) == is_token_contiguous(cache)
    untouched = torch.ones_like(cache, dtype=torch.bool)
    for b, rows, listed, exact in listed_activations(layer, neurons, **options):
        new = cache[b, rows][:, listed]
        before = old[b, rows][:, listed]
        formulas.assert_close(new, exact, formulas.TOLERANCE[hidden.dtype])
        formulas.assert_rounded(delta[b, rows], new.double() - before.double())
        untouched[b, rows, listed] = False
    assert torch.equal(cache[untouched], old[untouched])


@formulas.backend_names(sparse_mlp_up)
@pytest.mark.parametrize("dtype", [*formulas.DTYPES, torch.float64])
@pytest.mark.parametrize("rows", [1, 7, 131, 333])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("gated", "biased"), [(False, True), (True, True), (True, False)])
def test_matches_a_layer_neuron_by_neuron(backend, gated, biased, activation, rows, dtype, device):
    layer = layer_of(2, rows, 24, 50, dtype=dtype, device=device, gated=gated, biased=biased)
    cache = random_cache(2, rows, 50, dtype=dtype, device=device)
    neurons = formulas.random_neurons(2, formulas.blocks_of(rows, 128), 17, 50, device=device)
    run_and_check(backend, layer, neurons, cache, activation=activation)


@formulas.backend_names(sparse_mlp_up)
@any_dtype
@pytest.mark.parametrize("block_size", [1, 13, 64, 128, 500])
@either_gate
def test_block_sizes(backend, gated, block_size, dtype, device):
    layer = layer_of(2, 70, 24, 50, dtype=dtype, device=device, gated=gated, biased=gated)
    cache = random_cache(2, 70, 50, dtype=dtype, device=device)
    neurons = formulas.random_neurons(2, formulas.blocks_of(70, block_size), 9, 50, device=device)
    run_and_check(backend, layer, neurons, cache, block_size=block_size)


@formulas.backend_names(sparse_mlp_up)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 7, 131, 333])
@either_gate
@pytest.mark.parametrize("block_size", [64, 128])
def test_a_cache_in_fp8(backend, block_size, gated, rows, dtype, device):
    """New activations in units of their token's scale; their change is that of what is stored."""
    layer = layer_of(2, rows, 24, 50, dtype=dtype, device=device, gated=gated)
    old = random_cache(2, rows, 50, dtype=torch.float32, device=device)
    old[:, rows // 2] *= 1e-3
    cache, scale = fp8_rows(old, headroom=FP8_HEADROOM, turned=True, backend="reference")
    blocks = formulas.blocks_of(rows, block_size)
    neurons = formulas.random_neurons(2, blocks, 17, 50, device=device)
    old = units_of(cache)
    before = cache.clone()
    options = {"activation": "silu", "block_size": block_size}
    arguments = {"neuron_indices": neurons, "activation_cache": cache, "cache_scale": scale}
    delta = sparse_mlp_up(**layer, **arguments, **options, backend=backend)
    assert is_token_contiguous(delta)
    new = units_of(cache)
    scale = scale.double()
    untouched = torch.ones_like(old, dtype=torch.bool)
    for b, tokens, listed, activations in listed_activations(layer, neurons, **options):
        exact = activations / scale[b, tokens]
        found = new[b, tokens][:, listed]
        # Half of the distance of two numbers of e4m3, and what float32 rounds before.
        bound = exact.abs().clamp(2.0**-6, 448) / 16
        bound += 1e-5 * (exact.abs() + 1 / scale[b, tokens])
        assert ((found - exact.clamp(-448, 448)).abs() <= bound).all()
        change = (found - old[b, tokens][:, listed]) * scale[b, tokens]
        formulas.assert_rounded(delta[b, tokens], change)
        untouched[b, tokens, listed] = False
    assert torch.equal(cache.view(torch.uint8)[untouched], before.view(torch.uint8)[untouched])


def units_of(cache):
    return cache.view(torch.uint8).mT.contiguous().view(FP8).double().mT


@formulas.backend_names(sparse_mlp_up)
def test_what_a_cache_in_fp8_cannot_hold(backend, device):
    """Large activations saturate; such as are not finite come out, and spoil no others."""
    hidden = torch.ones(1, 24, 16, dtype=torch.bfloat16, device=device)
    hidden[0, 1] = 100
    hidden[0, 2, 3] = torch.nan
    hidden[0, 3, 3] = torch.inf
    weight = torch.ones(8, 16, dtype=torch.bfloat16, device=device)
    ones = torch.ones(1, 24, 8, device=device)
    cache, scale = fp8_rows(ones, headroom=16, turned=True, backend="reference")
    scale[0, 4] = torch.nan  # its activations were not finite at the refresh
    neurons = torch.arange(4, dtype=torch.int32, device=device).view(1, 1, 4)
    options = {"cache_scale": scale, "activation": "silu", "backend": backend}
    arguments = hidden, weight, None, neurons, cache
    first, second = (sparse_mlp_up(*arguments, **options).float() for _ in range(2))
    one = 28 * float(scale[0, 0])
    most = 448 * float(scale[0, 0])
    torch.testing.assert_close(first[0, 1], torch.full_like(first[0, 1], most - one))
    assert not first[0, 2:5].isfinite().any()
    assert first[0, 5:].isfinite().all()
    assert (second[0, [0, 1, *range(5, 24)]] == 0).all()
    assert not second[0, 2:5].isfinite().any()


@formulas.backend_names(sparse_mlp_up)
@any_dtype
@pytest.mark.parametrize(("channels", "capacity"), [(8, 333), (72, 256), (160, 3)])
def test_more_neurons_than_a_tile_and_odd_channels(backend, channels, capacity, dtype, device):
    """Several tiles of neurons and of channels, some of them partial."""
    layer = layer_of(1, 300, channels, 350, dtype=dtype, device=device)
    cache = random_cache(1, 300, 350, dtype=dtype, device=device)
    neurons = formulas.random_neurons(1, 3, capacity, 350, device=device)
    run_and_check(backend, layer, neurons, cache)


@formulas.backend_names(sparse_mlp_up)
def test_views_of_larger_tensors(backend, device):
    """Channels, neurons and tokens cut out of larger tensors; what is around them stays."""
    options = {"dtype": torch.bfloat16, "device": device}
    hidden, weight, bias, _ = formulas.mlp_inputs(2, 140, 48, 70, **options)
    layer = {"hidden": hidden[:, 4:137, 8:32], "weight": weight[16:66, 16:40], "bias": bias[16:66]}
    whole = random_cache(2, 160, 60, **options)
    before = whole.clone()
    cache = whole[:, 16:149, 5:55]
    run_and_check(backend, layer, formulas.random_neurons(2, 2, 17, 50, device=device), cache)
    cache.copy_(before[:, 16:149, 5:55])
    assert torch.equal(whole, before)


@formulas.backend_names(sparse_mlp_up)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 7, 131, 136, 333])
@either_gate
def test_what_pads_the_tokens_is_not_seen(backend, gated, rows, cache_dtype, device):
    """The same bits whatever stands there, and with a cache that has no padding."""
    layer = layer_of(2, rows, 24, 50, dtype=torch.bfloat16, device=device, gated=gated)
    old = random_cache(2, rows, 50, dtype=cache_dtype, device=device)
    neurons = formulas.random_neurons(2, formulas.blocks_of(rows, 128), 17, 50, device=device)

    def change(cache):
        options = {"neuron_indices": neurons, "activation": "gelu", "backend": backend}
        return sparse_mlp_up(**layer, activation_cache=cache, **options)

    expected = formulas.token_contiguous(old)
    delta = change(expected)
    assert delta.isfinite().all()
    for value in (0.0, torch.inf):  # at first it is NaN
        cache = formulas.token_contiguous(old)
        formulas.padding_of(cache).fill_(value)
        assert torch.equal(change(cache), delta)
        assert torch.equal(cache, expected)
    if rows % 8:
        for cache, whole in formulas.without_padding(old):
            assert torch.equal(change(cache), delta)
            assert torch.equal(cache, expected)
            cache.fill_(7.0)
            assert (whole == 7.0).all()


@formulas.backend_names(sparse_mlp_up)
@any_dtype
@either_gate
def test_repeated_steps_change_nothing_and_poison_leaves_once(backend, gated, dtype, device):
    """Bit for bit, also in half precision; NaN in the cache shows in listed entries alone."""
    layer = layer_of(1, 131, 24, 50, dtype=dtype, device=device, gated=gated)
    neurons = formulas.random_neurons(1, 2, 20, 50, device=device)
    old = random_cache(1, 131, 50, dtype=dtype, device=device)
    for cache in (old, formulas.token_contiguous(torch.full_like(old, torch.nan))):
        poisoned = bool(cache.isnan().all())
        arguments = {**layer, "neuron_indices": neurons, "activation_cache": cache}
        first = sparse_mlp_up(**arguments, activation="gelu-tanh", backend=backend)
        once = cache.clone()
        assert first.isnan().all() if poisoned else (first != 0).any()
        assert int(cache.isnan().sum()) == (131 * 30 if poisoned else 0)
        assert (sparse_mlp_up(**arguments, activation="gelu-tanh", backend=backend) == 0).all()
        torch.testing.assert_close(cache, once, rtol=0, atol=0, equal_nan=True)


@formulas.backend_names(dense_activation)
@pytest.mark.parametrize("dtype", [*formulas.DTYPES, torch.float64])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("gated", "biased"), [(False, True), (False, False), (True, True)])
def test_dense_activation(backend, gated, biased, activation, dtype, device):
    layer = layer_of(2, 133, 40, 50, dtype=dtype, device=device, gated=gated, biased=biased)
    for name in layer.keys() - {"bias", "gate_bias"}:  # as a joined tensor has them
        layer[name] = layer[name][..., 16:]
    weights = [(layer["weight"], layer["bias"])]
    if gated:
        weights.append((layer["gate_weight"], layer["gate_bias"]))
    with torch.no_grad():
        found = dense_activation(**layer, activation=activation, backend=backend)
    products = [
        layer["hidden"].double() @ weight.double().mT + (0 if bias is None else bias.double())
        for weight, bias in weights
    ]
    expected = formulas.activation_of(products[-1], activation)
    if gated:
        expected = expected * products[0]
    assert found.dtype == dtype
    # A kernel's product is rounded before the bias is added to it, and each factor of a gate.
    formulas.assert_close(found, expected, formulas.TOLERANCE[dtype])
    of_kernel = backend in ("gluon", "triton")
    assert is_token_contiguous(found) if of_kernel else found.is_contiguous()

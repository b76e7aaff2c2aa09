import pytest
import torch

from chipsparse.kernels.sparse_mlp_down import sparse_mlp_down
from chipsparse.kernels.sparse_mlp_up import sparse_mlp_up
from tests.kernels import formulas


def added(delta, weight, neurons, block_size):
    """``delta @ weight[:, S].T``, neuron by neuron, in float64."""
    result = torch.zeros(*delta.shape[:2], weight.shape[0], dtype=torch.float64)
    for b in range(delta.shape[0]):
        for g in range(neurons.shape[1]):
            rows = slice(g * block_size, (g + 1) * block_size)
            for place, neuron in enumerate(neurons[b, g].tolist()):
                change = delta[b, rows, place].double().cpu()
                result[b, rows] += torch.outer(change, weight[:, neuron].double().cpu())
    return result


def down_inputs(batch, rows, capacity, channels, neurons, *, dtype, device):
    """Token-contiguous delta, weight with contiguous channels, and the cached output."""
    generator = torch.Generator().manual_seed(0)
    delta = torch.randn(batch, rows, capacity, generator=generator).to(device, dtype)
    weight = torch.randn(neurons, channels, generator=generator) * neurons**-0.5
    cache = torch.randn(batch, rows, channels, generator=generator).to(device, dtype)
    return formulas.token_contiguous(delta), weight.to(device, dtype).T, cache


def run_and_check(backend, delta, weight, neurons, old, cache_dtype=None, **options):
    """The cache holds the old output and the products; the result is what it holds."""
    cache = old.to(cache_dtype or old.dtype, copy=True)
    before = delta.clone()
    result = sparse_mlp_down(delta, weight, neurons, cache, **options, backend=backend)
    expected = old.double().cpu() + added(delta, weight, neurons, options.get("block_size", 128))
    formulas.assert_close(cache, expected, 1e-5 if cache_dtype else formulas.TOLERANCE[delta.dtype])
    assert torch.equal(delta, before)
    assert (result.dtype, result.is_contiguous()) == (delta.dtype, True)
    assert result.data_ptr() != cache.data_ptr()
    formulas.assert_rounded(result, cache)
    assert cache_dtype or torch.equal(result, cache)
    return result


@formulas.backend_names(sparse_mlp_down)
@pytest.mark.parametrize("dtype", [*formulas.DTYPES, torch.float64])
@pytest.mark.parametrize("rows", [1, 7, 131, 333])
def test_matches_the_layer_neuron_by_neuron(backend, rows, dtype, device):
    delta, weight, old = down_inputs(2, rows, 17, 24, 50, dtype=dtype, device=device)
    neurons = formulas.random_neurons(2, formulas.blocks_of(rows, 128), 17, 50, device=device)
    run_and_check(backend, delta, weight, neurons, old)
    if dtype != torch.float64:
        run_and_check(backend, delta, weight, neurons, old, cache_dtype=torch.float32)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_are_rounded_once_to_a_cache_of_fewer_bits(dtype, cache_dtype):
    """Of products that cancel, each far larger than their sum."""
    neurons = torch.arange(4, dtype=torch.int32).expand(1, 2, 4).contiguous()
    capacity = 4
    delta = torch.tensor([1.0, 1.0, -1.0, 1.0]).expand(1, 131, capacity).to(dtype)
    rows = torch.tensor([300.0, 0.5009765625, 300.0, 2.0**-9])
    weight = rows[None].expand(24, capacity).to(dtype)
    cache = torch.full((1, 131, 24), 0.25, dtype=cache_dtype)
    result = sparse_mlp_down(delta, weight, neurons, cache, backend="reference")
    assert (cache == torch.tensor(0.7529296875).to(cache_dtype)).all()
    assert torch.equal(result, cache.to(dtype))


@formulas.backend_names(sparse_mlp_down)
@pytest.mark.parametrize("dtype", formulas.DTYPES)
@pytest.mark.parametrize("block_size", [1, 13, 64, 128, 500])
def test_block_sizes(backend, block_size, dtype, device):
    delta, weight, old = down_inputs(2, 70, 9, 24, 50, dtype=dtype, device=device)
    neurons = formulas.random_neurons(2, formulas.blocks_of(70, block_size), 9, 50, device=device)
    run_and_check(backend, delta, weight, neurons, old, block_size=block_size)


@formulas.backend_names(sparse_mlp_down)
@pytest.mark.parametrize("dtype", formulas.DTYPES)
@pytest.mark.parametrize(("channels", "capacity"), [(8, 200), (136, 64), (520, 197)])
def test_more_than_a_tile_of_everything(backend, channels, capacity, dtype, device):
    delta, weight, old = down_inputs(1, 300, capacity, channels, 210, dtype=dtype, device=device)
    neurons = formulas.random_neurons(1, 3, capacity, 210, device=device)
    run_and_check(backend, delta, weight, neurons, old)


@formulas.backend_names(sparse_mlp_down)
def test_nan_comes_out_of_both_layers_where_it_went_in(backend, device):
    """A token in its row, a neuron in the rows of the blocks that keep it."""
    hidden, up, _, down = formulas.mlp_inputs(1, 200, 64, 128, dtype=torch.bfloat16, device=device)
    down = down.T.contiguous().T
    neurons = torch.stack([torch.arange(64), torch.arange(64) + 64])[None].int().to(device)
    old = torch.randn(1, 200, 64, device=device).bfloat16()

    def layer(hidden, up, down):
        cache = formulas.token_contiguous(torch.zeros(1, 200, 128, device=device).bfloat16())
        delta = sparse_mlp_up(hidden, up, None, neurons, cache, activation="gelu", backend=backend)
        return sparse_mlp_down(delta, down, neurons, old.clone(), backend=backend)[0]

    clean = layer(hidden, up, down)
    # The second block keeps neuron 100, the first one neuron 20.
    places = (0, 7, 3), (100, 3), (..., 20)
    rows = slice(7, 8), slice(128, 200), slice(0, 128)
    for number, (place, affected) in enumerate(zip(places, rows, strict=True)):
        tensors = [tensor.clone() for tensor in (hidden, up, down)]
        tensors[number][place] = torch.nan
        found = layer(*tensors)
        others = torch.ones(200, dtype=torch.bool, device=device)
        others[affected] = False
        assert found[affected].isnan().all()
        assert torch.equal(found[others], clean[others])


@formulas.backend_names(sparse_mlp_down)
@pytest.mark.parametrize("dtype", formulas.DTYPES)
@pytest.mark.parametrize("addend_dtype", [torch.bfloat16, torch.float32])
def test_addend_goes_to_the_result_alone(backend, addend_dtype, dtype, device):
    delta, weight, old = down_inputs(2, 131, 17, 24, 50, dtype=dtype, device=device)
    neurons = formulas.random_neurons(2, 2, 17, 50, device=device)
    plain = old.clone()
    cache = old.clone()
    sparse_mlp_down(delta, weight, neurons, plain, backend=backend)
    addend = torch.randn(2, 131, 24, device=device).to(addend_dtype)
    for strided in (addend, addend.mT.contiguous().mT, addend[:1].expand(2, 131, 24)):
        cache.copy_(old)
        result = sparse_mlp_down(delta, weight, neurons, cache, addend=strided, backend=backend)
        assert torch.equal(cache, plain)
        assert result.dtype == dtype
        formulas.assert_rounded(result, plain.float() + strided.float())


@formulas.backend_names(sparse_mlp_down)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("capacity", [17, 64, 130])
@pytest.mark.parametrize("rows", [1, 7, 131, 136, 333])
def test_what_pads_the_tokens_is_not_seen(backend, rows, capacity, dtype, device):
    """The same bits whatever stands there, and with a delta that has no padding."""
    delta, weight, old = down_inputs(2, rows, capacity, 24, 150, dtype=dtype, device=device)
    blocks = formulas.blocks_of(rows, 128)
    neurons = formulas.random_neurons(2, blocks, capacity, 150, device=device)
    expected = sparse_mlp_down(delta, weight, neurons, old.clone(), backend=backend)
    assert expected.isfinite().all()
    for value in (0.0, 1e4):  # at first it is NaN
        formulas.padding_of(delta).fill_(value)
        found = sparse_mlp_down(delta, weight, neurons, old.clone(), backend=backend)
        assert torch.equal(found, expected)
        assert (formulas.padding_of(delta) == value).all()
    if rows % 8 and backend != "reference":  # whose product rounds otherwise for other strides
        for bare, whole in formulas.without_padding(delta):
            before = whole.clone()
            found = sparse_mlp_down(bare, weight, neurons, old.clone(), backend=backend)
            assert torch.equal(found, expected)
            assert torch.equal(whole, before)


@formulas.backend_names(sparse_mlp_down)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_do_not_matter(backend, dtype, device):
    """Delta and caches of any strides; the reference takes any weight as well."""
    delta, weight, old = down_inputs(2, 131, 17, 24, 50, dtype=dtype, device=device)
    neurons = formulas.random_neurons(2, 2, 17, 50, device=device)
    expected = sparse_mlp_down(delta, weight, neurons, old.clone(), backend=backend)
    whole = torch.zeros(2, 140, 40, dtype=dtype, device=device)
    for cache in (whole[:, 3:134, 8:32], whole.mT[:, :24, :131].mT, whole[:, 5:136, 1:25]):
        cache.copy_(old)
        result = sparse_mlp_down(delta.contiguous(), weight, neurons, cache, backend=backend)
        assert torch.equal(result, cache)
        if backend == "reference":  # a library's product may round otherwise for other strides
            formulas.assert_close(cache, expected.double().cpu(), formulas.TOLERANCE[dtype])
        else:
            assert torch.equal(cache, expected)
        cache.zero_()
        assert (whole == 0).all()
    if backend == "reference":
        result = sparse_mlp_down(delta, weight.contiguous(), neurons, old.clone(), backend=backend)
        assert torch.equal(result, expected)


@formulas.backend_names(sparse_mlp_down)
@pytest.mark.parametrize("dtype", formulas.DTYPES)
def test_no_neurons_change_nothing(backend, dtype, device):
    delta, weight, cache = down_inputs(1, 131, 0, 24, 50, dtype=dtype, device=device)
    before = cache.clone()
    neurons = torch.zeros(1, 2, 0, dtype=torch.int32, device=device)
    result = sparse_mlp_down(delta, weight, neurons, cache, backend=backend)
    assert torch.equal(cache, before)
    assert torch.equal(result, before)
    result = sparse_mlp_down(delta, weight, neurons, cache, addend=before, backend=backend)
    formulas.assert_rounded(result, before.double() + before.double())

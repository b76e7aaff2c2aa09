"""Feed-forward weights in FP8 compute what the model does, and are read as their numbers."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from chipsparse.kernels.dispatch import Choice
from chipsparse.kernels.fp8_rows import fp8_rows
from chipsparse.kernels.token_layout import is_token_contiguous
from chipsparse.sparse.cache.tensors import MLPCache
from chipsparse.sparse.layers import mlp, mlp_weights
from chipsparse.sparse.layers.mlp_weights import (
    Fp8MLPWeights,
    MLPWeights,
    fp8_form,
    fp8_linear,
    part_of,
)
from tests.pipelines.changes import rounded_by_rows
from tests.variants import DEVICES

torchao = pytest.importorskip("torchao.quantization")

CHANNELS = 16
NEURONS = 40
ROWS = 8


def in_fp8(*shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    linear = torch.nn.Linear(shape[1], shape[0])
    linear.weight.data = torch.randn(*shape, generator=generator) / shape[1] ** 0.5
    linear.to(dtype)
    torchao.quantize_(linear, torchao.Float8WeightOnlyConfig())
    return linear.weight


def weights_of(gate):
    normal = torch.randn(2 * NEURONS, generator=torch.Generator().manual_seed(9))
    rows = 2 * NEURONS if gate in ("first", "second") else NEURONS
    up = in_fp8(rows, CHANNELS, seed=1)
    down = in_fp8(CHANNELS, NEURONS, seed=2)
    apart = (in_fp8(NEURONS, CHANNELS, seed=3), normal[NEURONS:]) if gate == "apart" else ()
    name = "gelu-tanh" if gate == "none" else "silu"
    return Fp8MLPWeights(up, normal[:rows], down, normal[:CHANNELS], name, gate, *apart)


@pytest.mark.parametrize("gate", ["none", "first", "second", "apart"])
def test_a_dense_step_and_what_sparse_steps_read_are_the_layer_of_these_numbers(gate):
    weights = weights_of(gate)
    cache = MLPCache()
    plain_cache = MLPCache()
    parts = vars(weights)
    numbers = {name: value.dequantize() for name, value in parts.items() if fp8_form(value)}
    plain = MLPWeights.from_linears(**{**parts, **numbers})
    hidden = torch.randn(1, 20, CHANNELS, generator=torch.Generator().manual_seed(5))
    dense = mlp.dense_step(cache, hidden, weights, block_size=ROWS, backend=None)
    expected = mlp.dense_step(plain_cache, hidden, plain, block_size=ROWS, backend=None)
    torch.testing.assert_close(dense, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache.activation, plain_cache.activation, rtol=1e-4, atol=1e-5)
    assert torch.equal(cache.output, dense)
    read = weights.read(torch.float32, backend=None)
    for name in ("up", "up_bias", "down", "down_bias", "gate", "gate_bias"):
        torch.testing.assert_close(getattr(read, name), getattr(plain, name))
    assert read.down.t().is_contiguous()


@pytest.mark.parametrize("where", DEVICES)
def test_in_16_bits_the_kernels_of_the_device_run_on_what_is_read(where):
    device = torch.device(where)
    channels = 64
    neurons = 256
    up, down = (
        in_fp8(*shape, seed=n, dtype=torch.bfloat16).to(device)
        for n, shape in enumerate(((neurons, channels), (channels, neurons)))
    )
    weights = Fp8MLPWeights(up, None, down, None, "gelu-tanh")
    cache = MLPCache()
    before, hidden = torch.randn(2, 1, 300, channels, device=device, dtype=torch.bfloat16)
    read = weights.read(torch.bfloat16, backend=None)
    mlp.dense_step(cache, before, weights, block_size=128, backend=None)
    choices = mlp.backend_choices(cache, hidden, read, block_size=128, backend=None)
    on_gpu = device.type == "cuda"
    assert {choice.backend.name == "reference" for choice in choices.values()} == {not on_gpu}
    assert is_token_contiguous(cache.activation) is on_gpu
    found = mlp.sparse_step(cache, hidden, read, block_size=128, keep_count=neurons, backend=None)
    wide = hidden.double() @ up.dequantize().double().T
    expected = F.gelu(wide, approximate="tanh") @ down.dequantize().double().T
    assert (found.double() - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.parametrize("cached", [True, False])
def test_a_dense_step_is_the_models_own_and_an_addend_is_not_recorded(cached):
    weights = weights_of("none")
    cache = MLPCache() if cached else None
    hidden, addend = torch.randn(2, 2, 20, CHANNELS, generator=torch.Generator().manual_seed(5))
    neurons = F.gelu(F.linear(hidden, weights.up, weights.up_bias), approximate="tanh")
    own = F.linear(neurons, weights.down, weights.down_bias)
    options = {"block_size": ROWS, "backend": None}
    assert torch.equal(mlp.dense_step(None, hidden, weights, **options), own)
    summed = mlp.dense_step(cache, hidden, weights, **options, addend=addend.clone)
    torch.testing.assert_close(summed, own + addend)
    if cached:
        assert torch.equal(cache.output, own)
        assert cache.output.data_ptr() != summed.data_ptr()


def by_rows(*shape, seed):
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return rounded_by_rows((numbers / shape[1] ** 0.5).bfloat16())


@pytest.fixture
def rounding(monkeypatch):
    """The shapes that `fp8_linear` has rounded by what stands in for the kernel."""
    shapes = []

    def launch(call):
        shapes.append(tuple(call.rows.shape))
        return fp8_rows(call.rows, backend="reference")

    chosen = Choice(SimpleNamespace(name="triton", launch=launch), ())
    stand_in = SimpleNamespace(choose=lambda rows: chosen)
    monkeypatch.setattr(mlp_weights, "fp8_rows", stand_in)
    return shapes


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 48, dtype=torch.bfloat16)])
def test_a_linear_whose_rows_the_kernel_rounds_gives_what_torchao_gives(rounding, bias):
    weight = by_rows(48, 64, seed=1)
    rows = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    found = fp8_linear(rows, weight, bias)
    expected = F.linear(rows, weight, bias)
    assert rounding == [(10, 64)]
    # torchao rounds the scales to 16 bits: a number in between may go the other way.
    assert (found - expected).norm() < 2e-2 * expected.norm()
    assert fp8_form(weight.dequantize()) is fp8_form(None) is None
    turned = rows.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(fp8_linear(turned, weight, bias), found)


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_a_part_of_a_weight_has_its_numbers_in_the_same_memory(granularity, inference):
    """torchao's own slices fail in inference mode."""
    kind = torchao.PerRow() if granularity == "row" else torchao.PerTensor()
    weight = type(by_rows(1, 1, seed=1)).from_hp(torch.randn(48, 96), granularity=kind)
    for key in ((slice(-16, None), slice(None)), (slice(None), slice(32)), (slice(8), slice(8, 9))):
        with torch.inference_mode(inference):
            part = part_of(weight, *key)
        assert fp8_form(part) == "weights"
        assert torch.equal(part.dequantize(), weight.dequantize()[key])
        assert part.qdata.data_ptr() == weight.qdata[key].data_ptr()
        assert torch.equal(part_of(weight.dequantize(), *key), part.dequantize())


@pytest.mark.parametrize("strided", [True, False])
def test_products_of_the_columns_parts_add_up_to_the_whole(rounding, strided, monkeypatch):
    """Also where a GPU's product takes rows for contiguous: it then gets a copy."""
    monkeypatch.setattr(mlp_weights, "_multiplies_strided", lambda _: strided)
    taken = []
    multiply = torch._scaled_mm

    def look(data, numbers, **options):
        taken.append(numbers.t().is_contiguous())
        return multiply(data, numbers, **options)

    monkeypatch.setattr(torch, "_scaled_mm", look)
    weight = by_rows(48, 96, seed=1)
    parts = (slice(32), slice(32, None))
    rows = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    found = sum(fp8_linear(rows[..., one], part_of(weight, columns=one), None) for one in parts)
    assert rounding == [(10, 32), (10, 64)]
    assert taken == [not strided] * 2
    expected = rows.double() @ weight.dequantize(torch.float64).T
    assert (found - expected).norm() < 5e-2 * expected.norm()


def test_what_else_torchao_rounds_it_computes_itself(rounding):
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    weights_alone = in_fp8(48, 64, seed=1, dtype=torch.bfloat16)
    bounded = by_rows(48, 64, seed=1)
    padded = by_rows(48, 64, seed=1)
    bounded.act_quant_kwargs.hp_value_ub = 1.0
    padded.mm_config = padded.mm_config._replace(pad_inner_dim=True)
    uneven = by_rows(40, 64, seed=1)
    for weight in (weights_alone, bounded, padded, uneven):
        half = rows.bfloat16()
        assert torch.equal(fp8_linear(half, weight, None), F.linear(half, weight, None))
    assert not mlp_weights._rounds_by_rows(by_rows(48, 64, seed=1), torch.float16)
    assert rounding == []


@pytest.mark.parametrize("first", [0, 256])
@pytest.mark.parametrize("where", DEVICES)
def test_the_kernel_of_the_device_rounds_rows_or_torchao_does(where, first):
    """Also of some columns, which lie among the others of the whole weight."""
    device = torch.device(where)
    columns = slice(first, None)
    weight = by_rows(256, 768, seed=1)
    rows = torch.randn(300, 768, generator=torch.Generator().manual_seed(2)).bfloat16()
    numbers, scale = fp8_rows(rows[:, columns], backend="reference")
    exact = (numbers.double() * scale) @ weight.dequantize(torch.float64)[:, columns].T
    part = part_of(weight.to(device), columns=columns)
    found = fp8_linear(rows.to(device)[:, columns], part, None).cpu().double()
    assert (found - exact).norm() < (5e-3 if device.type == "cuda" else 2e-2) * exact.norm()
    name = fp8_rows.choose(rows.to(device)).backend.name
    assert name == ("triton" if device.type == "cuda" else "reference")

from importlib import import_module

import pytest
import torch

from chipsparse.kernels.fp8_quantization import FP8, fp8_quantization
from tests.kernels.formulas import attention_inputs, backend_names, kernel_names, scores_of

SHAPES = [(1, 1, 1, 1, 64), (2, 3, 7, 9, 64), (1, 2, 131, 333, 128), (2, 1, 64, 1040, 64)]
# Half the distance of two numbers of e4m3, relative to a normal one; and below the least of these.
ROUNDING = 2.0**-4
LEAST = 2.0**-10


def number_of(fp8):
    """Numbers of e4m3 from their bits, as the format defines them."""
    bits = fp8.cpu().view(torch.uint8).long()
    exponent = (bits >> 3) & 15
    mantissa = (bits & 7).double()
    normal = (1 + mantissa / 8) * torch.exp2(exponent.double() - 7)
    number = torch.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    number = torch.where((bits & 127) == 127, torch.nan, number)
    return torch.where(bits < 128, number, -number)


def token_at(place):
    """Which token stands at a place of the stored values."""
    group = place // 16 * 16
    place = place % 16
    return group + 8 * (place // 2 % 2) + 2 * (place // 4) + place % 2


def hadamard(size):
    bits = torch.arange(size)
    signs = [[(-1.0) ** bin(i & j).count("1") for j in bits.tolist()] for i in bits.tolist()]
    return torch.tensor(signs).double() / size**0.5


def values_of(quantized):
    """``[B, H, M, D]`` in float64."""
    stored = number_of(quantized.value)
    places = {token_at(place): place for place in range(stored.shape[-1])}
    rows = stored[..., [places[token] for token in range(quantized.columns)]].mT
    scale, mean = (each.double().cpu() for each in (quantized.value_scale, quantized.value_mean))
    return rows * scale[:, :, None] + mean[:, :, None]


def scores_from(quantized):
    products = quantized.query.double().cpu() @ quantized.key.double().cpu().mT
    factor, shift = (each.double().cpu() for each in (quantized.row_factor, quantized.row_shift))
    return factor[..., None] * products + shift[..., None]


def shifted(inputs):
    """Keys and values with a mean, as models have them."""
    query, key, value = inputs
    return query, key + 3 * key[:, :, :1], value - 2 * value[:, :, :1]


@backend_names(fp8_quantization)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rotate", "scale"), [(False, None), (True, None), (True, -0.3)])
def test_scores_and_values_come_back_within_rounding(backend, shape, dtype, rotate, scale, device):
    inputs = shifted(attention_inputs(*shape, dtype=dtype, device=device, strided=True))
    found = fp8_quantization(*inputs, rotate=rotate, scale=scale, backend=backend)
    assert (found.query.dtype, found.key.dtype, found.value.dtype) == (torch.int8, torch.int8, FP8)
    assert found.query.transpose(1, 2).is_contiguous()
    assert found.value.shape == (*shape[:2], shape[4], (shape[3] + 15) // 16 * 16)
    query, key, value = (each.double().cpu() for each in inputs)
    key_mean = key.mean(2, keepdim=True)
    value_mean = value.mean(2, keepdim=True)
    factor = shape[4] ** -0.5 if scale is None else scale
    shift = (query @ key_mean.mT).squeeze(-1) * factor
    torch.testing.assert_close(found.row_shift.double().cpu(), shift, rtol=1e-5, atol=1e-4)
    key = key - key_mean
    if rotate:
        query = query @ hadamard(shape[4])
        key = key @ hadamard(shape[4])
    # Numbers are off by half of a step, those of a query also by the correction of its scale.
    key_step = key.abs().amax((-1, -2), keepdim=True) / 127
    query_step = query.abs().amax(-1, keepdim=True) / 127
    squares = query.square().sum(-1, keepdim=True)
    corrected = query_step / 2 * query.abs().sum(-1, keepdim=True) / squares
    query_off = query_step / 2 + 1.1 * corrected * query.abs()
    key_off = key_step / 2
    key_off = key_off.expand_as(key)
    bound = query_off @ key.abs().mT + query.abs() @ key_off.mT + query_off @ key_off.mT
    error = scores_from(found) - scores_of(*(each.cpu() for each in inputs[:2]), factor)
    assert (error.abs() <= bound * abs(factor) * 1.001 + 1e-4).all()
    if shape[3] > 1:  # a single key is its mean
        scale = found.row_factor.double().cpu()[..., None] / key_step / abs(factor)
        along = (found.query.double().cpu() * scale * query).sum(-1) * (1 if factor > 0 else -1)
        torch.testing.assert_close(along, query.square().sum(-1), rtol=1e-5, atol=0)
    deviation = value - value_mean
    bound = deviation.abs() * ROUNDING + deviation.abs().amax(2, keepdim=True) / 448 * LEAST
    assert ((values_of(found) - value).abs() <= bound * 1.001 + 1e-5).all()


@backend_names(fp8_quantization)
def test_scales_use_all_of_the_range_and_padding_is_zero(backend, device):
    inputs = shifted(attention_inputs(1, 2, 70, 77, 64, dtype=torch.bfloat16, device=device))
    found = fp8_quantization(*inputs, backend=backend)
    assert (found.query.abs().amax(-1) == 127).all()
    assert (found.key.abs().amax((-1, -2)) == 127).all()
    assert (number_of(found.value).abs().amax(-1) == 448).all()
    padding = [place for place in range(80) if token_at(place) >= 77]
    assert len(padding) == 3
    assert (number_of(found.value)[..., padding] == 0).all()


@backend_names(fp8_quantization)
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("strange", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_becomes_nan(backend, strange, rotate, device):
    """A query in its row, a key in all rows of its head, a value in its place alone."""
    query, key, value = attention_inputs(1, 2, 70, 77, 64, dtype=torch.bfloat16, device=device)
    zeroed = value.clone()
    zeroed[0, 0, 40, 3] = 0.0
    expected = fp8_quantization(query, key, zeroed, rotate=rotate, backend=backend)
    query[0, 0, 5, 1] = strange
    key[0, 1, 9, 2] = strange
    value[0, 0, 40, 3] = strange
    found = fp8_quantization(query, key, value, rotate=rotate, backend=backend)
    assert found.row_factor[0, 0].isnan().nonzero().flatten().tolist() == [5]
    assert found.row_factor[0, 1].isnan().all()
    others = [row for row in range(70) if row != 5]
    assert torch.equal(found.query[0, :, others], expected.query[0, :, others])
    assert torch.equal(found.row_factor[0, 0, others], expected.row_factor[0, 0, others])
    assert torch.equal(found.key[0, 0], expected.key[0, 0])
    token = {token_at(place): place for place in range(80)}[40]
    assert number_of(found.value)[0].isnan().nonzero().tolist() == [[0, 3, token]]
    assert torch.equal(found.value_scale[0, 0, :3], expected.value_scale[0, 0, :3])
    assert torch.equal(found.value_mean, expected.value_mean)


@backend_names(fp8_quantization)
@pytest.mark.parametrize("rotate", [False, True])
def test_zeros_and_equal_rows_stay_exact(backend, rotate, device):
    """Nothing is left of keys and values that are their mean; no scale is zero."""
    query = torch.zeros(1, 1, 5, 64, dtype=torch.bfloat16, device=device)
    key = torch.full((1, 1, 32, 64), 0.75, dtype=torch.bfloat16, device=device)
    found = fp8_quantization(query, key, key, rotate=rotate, backend=backend)
    assert (found.key == 0).all()
    assert (scores_from(found) == 0).all()
    assert (values_of(found) == 0.75).all()


@backend_names(fp8_quantization)
def test_queries_and_keys_that_are_next_to_nothing_count_as_zeros(backend, device):
    """Their scales would have no digits; all scores are as good as 0 anyway."""
    tensors = attention_inputs(1, 1, 5, 32, 64, dtype=torch.bfloat16, device=device)
    query, key = (tensor.sign() * 1e-33 for tensor in tensors[:2])
    found = fp8_quantization(query, key, tensors[2], backend=backend)
    assert (found.query == 0).all()
    assert (found.key == 0).all()
    assert (found.row_factor > 0).all()
    assert (scores_from(found).abs() < 1e-30).all()


@backend_names(fp8_quantization)
def test_values_of_the_smallest_range_stay_finite(backend, device):
    """Whose scale has no finite reciprocal."""
    tensors = attention_inputs(1, 1, 3, 40, 64, dtype=torch.bfloat16, device=device)
    value = (tensors[2] * 1e-37).clamp(-3e-37, 3e-37)
    found = fp8_quantization(*tensors[:2], value, backend=backend)
    assert number_of(found.value).isfinite().all()
    assert ((values_of(found) - value.double().cpu()).abs() <= 3e-38).all()


@kernel_names(fp8_quantization)
def test_many_chunks_have_one_mean_and_scale(backend, device, monkeypatch):
    kernel = import_module("chipsparse.kernels.fp8_quantization.triton_kernel")
    monkeypatch.setattr(kernel, "CHUNK_TOKENS", 128)
    count = 128 * kernel.CHUNKS_AT_ONCE.value + 140
    inputs = shifted(attention_inputs(1, 1, 3, count, 64, dtype=torch.bfloat16, device=device))
    inputs[1][0, 0, -1, 3] = 30.0
    inputs[2][0, 0, -1, 3] = -30.0
    names = (backend, "reference")
    found, expected = (fp8_quantization(*inputs, rotate=True, backend=name) for name in names)
    for name in ("row_factor", "row_shift", "value_scale", "value_mean"):
        pair = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4, msg=name)


@kernel_names(fp8_quantization)
def test_the_kernel_rounds_as_the_reference_does(backend, device):
    inputs = shifted(attention_inputs(1, 2, 200, 1100, 128, dtype=torch.bfloat16, device=device))
    for rotate in (False, True):
        kernel, reference = (
            fp8_quantization(*inputs, rotate=rotate, backend=name)
            for name in (backend, "reference")
        )
        for name in ("query", "key"):
            off = (getattr(kernel, name).int() - getattr(reference, name).int()).abs()
            assert off.max() <= 1  # ties of the last bit
            assert off.double().mean() < 1e-3, name
        pair = number_of(kernel.value), number_of(reference.value)
        assert (pair[0] != pair[1]).double().mean() < 1e-3
        torch.testing.assert_close(*pair, rtol=2 * ROUNDING, atol=2 * LEAST)
        torch.testing.assert_close(kernel.row_factor, reference.row_factor, rtol=1e-3, atol=0)


def test_parts_of_heads_are_views():
    inputs = attention_inputs(1, 4, 20, 33, 64, dtype=torch.float32, device="cpu")
    whole = fp8_quantization(*inputs, backend="reference")
    part = whole.heads(1, 3)
    assert part.key.data_ptr() == whole.key[:, 1].data_ptr()
    assert torch.equal(scores_from(part), scores_from(whole)[:, 1:3])

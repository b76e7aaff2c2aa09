from importlib import import_module

import pytest
import torch

from chipsparse.kernels.fp8_dense_attention import fp8_dense_attention
from chipsparse.kernels.fp8_quantization import fp8_quantization
from tests.kernels import formulas
from tests.kernels.test_fp8_quantization import scores_from, shifted, values_of

SHAPES = [(1, 1, 1, 1, 64), (2, 3, 7, 9, 64), (1, 2, 131, 333, 128), (1, 1, 200, 656, 64)]
# Of weights rounded to e4m3, half a unit in the last of three digits; largest and in the mean.
ROUNDING = 2.0**-4
SUMS_TOLERANCE = 8e-3


def quantized(shape, *, dtype=torch.bfloat16, device="cpu", **options):
    """What FP8 makes of random inputs with a mean, and these."""
    inputs = shifted(formulas.attention_inputs(*shape, dtype=dtype, device=device, strided=True))
    return fp8_quantization(*inputs, backend="reference", **options), inputs


def formula(tensors):
    """Attention of the rounded tensors in float64, its LSE and what rounded weights may change."""
    scores = scores_from(tensors)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse[..., None])
    values = values_of(tensors)
    deviations = (values - tensors.value_mean.double().cpu()[:, :, None]).abs()
    return weights @ values, lse, weights @ deviations * ROUNDING


def sums_of(tensors, previous, block_size_q):
    weights = torch.exp(scores_from(tensors) - previous.double().cpu()[..., None])
    return torch.stack([part.sum(2) for part in weights.split(block_size_q, dim=2)], dim=2)


@formulas.backend_names(fp8_dense_attention)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_formula(backend, shape, dtype, device):
    tensors, inputs = quantized(shape, dtype=dtype, device=device)
    expected, expected_lse, bound = formula(tensors)
    previous = (expected_lse + 0.5).float().to(device)
    output, lse, sums = fp8_dense_attention(tensors, lse_previous=previous, backend=backend)
    assert (output.dtype, output.shape, lse.shape) == (dtype, inputs[0].shape, shape[:3])
    assert output.transpose(1, 2).is_contiguous()
    off = (output.double().cpu() - expected).abs()
    assert (off <= bound + formulas.TOLERANCE[dtype] * (1 + expected.abs())).all()
    formulas.assert_close(lse, expected_lse, 1e-4)
    assert sums.shape == (*shape[:2], formulas.blocks_of(shape[2], 128), shape[3])
    assert sums.dtype == (torch.float32 if dtype == torch.float32 else torch.bfloat16)
    formulas.assert_close(sums, sums_of(tensors, previous, 128), SUMS_TOLERANCE)
    plain, plain_lse, nothing = fp8_dense_attention(tensors, backend=backend)
    assert nothing is None
    assert torch.equal(plain, output)
    torch.testing.assert_close(plain_lse, lse, rtol=0, atol=1e-5)  # another kernel


@formulas.backend_names(fp8_dense_attention)
@pytest.mark.parametrize(("block_size_q", "rows"), [(13, 40), (64, 131), (192, 300), (256, 300)])
def test_any_block_size_and_ragged_blocks(backend, block_size_q, rows, device, monkeypatch):
    tensors, _ = quantized((2, 1, rows, 77, 64), device=device)
    if backend == "triton":  # block by block
        module = import_module("chipsparse.kernels.dense_attention_column_sums.triton_kernel")
        monkeypatch.setattr(module, "TRANSIENT_BYTES", 1)
    _, lse, _ = formula(tensors)
    _, _, sums = fp8_dense_attention(
        tensors,
        lse_previous=lse.float().to(device),
        block_size_q=block_size_q,
        backend=backend,
    )
    formulas.assert_close(sums, sums_of(tensors, lse.float(), block_size_q), SUMS_TOLERANCE)


@formulas.backend_names(fp8_dense_attention)
def test_many_small_weights_beside_a_large_one(backend, device):
    """In e4m3 what is 2 ** -18 of the largest weight is nothing, a thousand times nothing too."""
    query = torch.ones(1, 1, 16, 64, dtype=torch.bfloat16, device=device)
    key = torch.full((1, 1, 2048, 64), -1.5, dtype=torch.bfloat16, device=device)
    value = torch.full_like(key, -1.0)
    key[:, :, :1024] = 0.0
    value[:, :, :1024] = 1.0
    key[:, :, 1900] = 1.0
    value[:, :, 1900] = 0.0
    tensors = fp8_quantization(query, key, value, scale=13 / 64, backend="reference")
    expected, _, _ = formula(tensors)
    assert 1e-3 < expected[0, 0, 0, 0] < 5e-3
    output, _, _ = fp8_dense_attention(tensors, backend=backend)
    if backend == "reference":  # which rounds all weights relative to the largest of the row
        assert (output.abs() < 1e-5).all()
    else:
        formulas.assert_close(output, expected, 1e-4)


@formulas.backend_names(fp8_dense_attention)
@pytest.mark.parametrize("previous", [0.0, -500.0, torch.inf, -torch.inf, torch.nan])
def test_output_never_depends_on_the_previous_lse(backend, previous, device):
    tensors, _ = quantized((1, 1, 150, 90, 64), device=device)
    expected, expected_lse, _ = fp8_dense_attention(tensors, backend=backend)
    stale = torch.full((1, 1, 150), previous, device=device)
    output, lse, sums = fp8_dense_attention(tensors, lse_previous=stale, backend=backend)
    assert torch.equal(output, expected)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-5)  # of another kernel
    assert sums.isnan().all() if previous != previous else sums.isfinite().all()


@formulas.backend_names(fp8_dense_attention)
@pytest.mark.parametrize("strange", [torch.nan, torch.inf])
def test_nan_comes_out_where_it_went_in(backend, strange, device):
    """A query in its row, with the sums of its block; a key in its head; a value in its channel."""
    inputs = formulas.attention_inputs(1, 4, 140, 150, 64, dtype=torch.bfloat16, device=device)
    previous = formulas.full_attention(*inputs)[1].float()
    query, key, value = inputs
    query[0, 0, 5, 3] = strange
    key[0, 1, 9, 3] = strange
    value[0, 2, 9, 3] = strange
    tensors = fp8_quantization(query, key, value, backend="reference")
    output, lse, sums = fp8_dense_attention(tensors, lse_previous=previous, backend=backend)
    affected = torch.zeros(1, 4, 140, 64, dtype=torch.bool, device=device)
    affected[0, 0, 5] = affected[0, 1] = affected[0, 2, :, 3] = True
    assert torch.equal(output.isnan(), affected)
    assert lse[0, 0].isnan().nonzero().flatten().tolist() == [5]
    assert lse[0, 1].isnan().all()
    assert sums[0, 0, 0].isnan().all()
    assert sums[0, 0, 1].isfinite().all()
    assert sums[0, 1].isnan().all()
    assert sums[0, 2:].isfinite().all()


@formulas.backend_names(fp8_dense_attention)
def test_repeats_bit_for_bit_and_by_heads(backend, device):
    tensors, _ = quantized((2, 3, 133, 131, 64), device=device)
    previous = formula(tensors)[1].float().to(device)
    first = fp8_dense_attention(tensors, lse_previous=previous, backend=backend)
    second = fp8_dense_attention(tensors.heads(1, 3), lse_previous=previous[:, 1:], backend=backend)
    assert all(torch.equal(a[:, 1:], b) for a, b in zip(first, second, strict=True))

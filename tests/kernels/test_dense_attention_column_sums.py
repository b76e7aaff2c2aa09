from importlib import import_module

import pytest
import torch

from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention_column_sums import (
    DenseAttentionColumnSums,
    dense_attention_column_sums,
)
from tests.kernels import formulas
from tests.kernels.formulas import SUMS_TOLERANCE, attention_inputs, backend_names, column_sums_of

HALF = [torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1, 1, 64), (2, 3, 7, 9, 64), (1, 2, 131, 333, 128), (1, 1, 337, 640, 64)]


@backend_names(dense_attention_column_sums)
@pytest.mark.parametrize("dtype", [*formulas.DTYPES, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strided", [False, True])
def test_matches_the_formula(backend, shape, dtype, strided, device):
    inputs = attention_inputs(*shape, dtype=dtype, device=device, strided=strided)
    expected, expected_lse = formulas.full_attention(*inputs)
    noise = torch.randn(shape[:3], generator=torch.Generator().manual_seed(1))
    previous = (expected_lse.cpu() + noise).float().to(device)  # a little off, as a step later
    output, lse, sums = dense_attention_column_sums(*inputs, previous, backend=backend)
    assert (output.dtype, lse.shape) == (dtype, shape[:3])
    assert sums.shape == (*shape[:2], formulas.blocks_of(shape[2], 128), shape[3])
    assert sums.dtype == (torch.bfloat16 if dtype in HALF else dtype)
    formulas.assert_attention((output, lse), (expected, expected_lse), dtype)
    formulas.assert_close(sums, column_sums_of(*inputs[:2], previous, 128), SUMS_TOLERANCE[dtype])


@backend_names(dense_attention_column_sums)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("block_size_q", "rows"),
    [(1, 5), (13, 40), (33, 70), (64, 131), (128, 300), (192, 300), (256, 300), (500, 131)],
)
def test_any_block_size_and_ragged_blocks(backend, block_size_q, rows, dtype, device):
    inputs = attention_inputs(2, 1, rows, 77, 64, dtype=dtype, device=device)
    _, lse = formulas.full_attention(*inputs)
    options = {"block_size_q": block_size_q, "backend": backend}
    _, _, sums = dense_attention_column_sums(*inputs, lse.float(), **options)
    tolerance = SUMS_TOLERANCE[dtype]
    formulas.assert_close(sums, column_sums_of(*inputs[:2], lse.float(), block_size_q), tolerance)
    # With the true LSE every row gives away a mass of one.
    sizes = torch.tensor([len(part) for part in torch.arange(rows).split(block_size_q)])
    formulas.assert_close(sums.double().sum(-1), sizes.expand(2, 1, -1), tolerance)


@backend_names(dense_attention_column_sums)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("previous", [0.0, -500.0, 500.0, torch.inf, -torch.inf, torch.nan])
def test_output_never_depends_on_the_previous_lse(backend, previous, dtype, device):
    inputs = attention_inputs(1, 1, 150, 90, 64, dtype=dtype, device=device)
    true = formulas.full_attention(*inputs)[1].float()
    expected = dense_attention_column_sums(*inputs, true, backend=backend)
    actual = dense_attention_column_sums(*inputs, torch.full_like(true, previous), backend=backend)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    if previous != previous:
        assert actual[2].isnan().all()
    else:
        assert actual[2].isfinite().all()


@formulas.kernel_names(dense_attention_column_sums)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("block_size_q", [128, 192])
def test_output_is_the_same_without_column_sums(backend, block_size_q, dtype, device, monkeypatch):
    inputs = attention_inputs(1, 2, 300, 200, 128, dtype=dtype, device=device)
    launch = formulas.backend_of(dense_attention_column_sums, backend).launch
    previous = formulas.full_attention(*inputs)[1].float()
    previous[:, :, 7] = torch.nan
    if backend == "triton":  # block by block
        monkeypatch.setattr(import_module(launch.__module__), "TRANSIENT_BYTES", 1)
    options = {"block_size_q": block_size_q, "scale": 0.1, "backend": backend}
    call = DenseAttentionColumnSums(*inputs, previous, **options)
    output, lse, _ = dense_attention_column_sums.run(call)
    if backend == "gluon":  # the kernel of `dense_attention` is the same one
        plain, plain_lse = dense_attention(*inputs, scale=0.1, backend=backend)
    else:
        plain, plain_lse, nothing = launch(call, with_column_sums=False)
        assert nothing is None
    assert torch.equal(output, plain)
    assert torch.equal(lse, plain_lse)
    expected, expected_lse = formulas.full_attention(*inputs, scale=0.1)
    formulas.assert_attention((output, lse), (expected, expected_lse), dtype)


@backend_names(dense_attention_column_sums)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shift", [-60.0, 60.0])
def test_sums_follow_the_lse(backend, shift, dtype, device):
    """As long as these lie less than 80 below the true ones."""
    inputs = attention_inputs(1, 1, 40, 90, 64, dtype=dtype, device=device)
    previous = formulas.full_attention(*inputs)[1].float() + shift
    _, _, sums = dense_attention_column_sums(*inputs, previous, backend=backend)
    factor = torch.exp(torch.tensor(shift).double())
    expected = column_sums_of(*inputs[:2], previous, 128)
    formulas.assert_close(sums.cpu() * factor, expected.cpu() * factor, SUMS_TOLERANCE[dtype])


@backend_names(dense_attention_column_sums)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_stale_lse_keeps_sums_finite(backend, dtype, device):
    """A very low LSE would overflow; what underflows beside it must not become NaN."""
    query, key, value = attention_inputs(1, 1, 200, 200, 64, dtype=dtype, device=device)
    inputs = query * 100, key, value  # most weights of a row underflow to 0
    previous = torch.full((1, 1, 200), -1e4, device=device)
    _, _, sums = dense_attention_column_sums(*inputs, previous, block_size_q=200, backend=backend)
    assert sums.isfinite().all()
    assert (sums.amax(-1) > 0).all()


@backend_names(dense_attention_column_sums, left_out=("gluon", "reference"))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_all_configs_of_triton(backend, head_dim, device, monkeypatch):
    kernel = import_module("chipsparse.kernels.dense_attention_column_sums.triton_kernel")
    inputs = attention_inputs(1, 1, 200, 200, head_dim, dtype=torch.bfloat16, device=device)
    dense_attention_column_sums.choose(*inputs, 128, backend=backend)
    expected, lse = formulas.full_attention(*inputs)
    monkeypatch.setattr(kernel, "TRANSIENT_BYTES", 0)
    call = DenseAttentionColumnSums(*inputs, lse.float())
    for config in kernel.CONFIGS:
        output, _, sums = kernel.dense_attention_column_sums(call, config=config)
        formulas.assert_close(output, expected, torch.bfloat16)
        expected_sums = column_sums_of(*inputs[:2], lse, 128)
        formulas.assert_close(sums, expected_sums, SUMS_TOLERANCE[torch.bfloat16])


@backend_names(dense_attention_column_sums)
@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_any_scale_and_the_layout_of_the_output(backend, scale, device):
    inputs = attention_inputs(2, 3, 20, 30, 64, dtype=torch.float16, device=device, strided=True)
    expected, previous = formulas.full_attention(*inputs, scale)
    output, lse, _ = dense_attention_column_sums(*inputs, previous, scale=scale, backend=backend)
    formulas.assert_attention((output, lse), (expected, previous), torch.float16)
    assert output.stride() == inputs[0].stride()


@pytest.mark.gpu
@formulas.kernel_names(dense_attention_column_sums)
def test_sums_beyond_32_bit_offsets(backend):
    """4,096 blocks of one row by 2^19 + 100 columns are 4.3 GB."""
    shape = (1, 1, 4096, 2**19 + 100, 64)
    inputs = attention_inputs(*shape, dtype=torch.bfloat16, device="cuda")
    previous = torch.full(shape[:3], 4.0, device="cuda")
    _, _, sums = dense_attention_column_sums(*inputs, previous, block_size_q=1, backend=backend)
    for row in (0, 2048, 4095):
        one = slice(row, row + 1)
        expected = column_sums_of(inputs[0][:, :, one], inputs[1], previous[:, :, one], 1)
        formulas.assert_close(sums[:, :, one], expected, SUMS_TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@formulas.kernel_names(dense_attention_column_sums)
def test_rows_beyond_32_bit_offsets(backend):
    """Few keys of many heads, as every 2^19-th row of 4.3 GB that is NaN (see conftest.py)."""
    storage = torch.empty(1, 2**25 + 2**19, 1, 64, dtype=torch.bfloat16, device="cuda")
    far = storage[:, :: 2**19].transpose(1, 2)
    query, few, _ = attention_inputs(1, 1, 70, 65, 64, dtype=torch.bfloat16, device="cuda")
    far.copy_(few)
    expected, lse = formulas.full_attention(query, few, few)
    output, _, sums = dense_attention_column_sums(query, far, far, lse, backend=backend)
    formulas.assert_close(output, expected, torch.bfloat16)
    expected = column_sums_of(query, few, lse, 128)
    formulas.assert_close(sums, expected, SUMS_TOLERANCE[torch.bfloat16])


@backend_names(dense_attention_column_sums)
def test_nan_comes_out_where_it_went_in(backend, device):
    """A query in its row, with the sums of its block; a key and a value in the rows of its head."""
    inputs = attention_inputs(1, 4, 140, 150, 64, dtype=torch.bfloat16, device=device)
    previous = formulas.full_attention(*inputs)[1].float()
    clean, _, clean_sums = dense_attention_column_sums(*inputs, previous, backend=backend)
    query, key, value = inputs
    query[0, 0, 5, 3] = torch.nan
    key[0, 1, 9, 3] = torch.nan
    value[0, 2, 9, 3] = torch.nan
    output, lse, sums = dense_attention_column_sums(*inputs, previous, backend=backend)
    affected = torch.zeros(1, 4, 140, 64, dtype=torch.bool, device=device)
    affected[0, 0, 5] = affected[0, 1] = affected[0, 2, :, 3] = True
    assert output[affected].isnan().all()
    assert torch.equal(output[~affected], clean[~affected])
    assert lse[0, 0, 5].isnan()
    assert lse[0, 1].isnan().all()
    assert sums[0, 0, 0].isnan().all()
    assert sums[0, 1, :, 9].isnan().all()
    assert torch.equal(sums[0, 2:], clean_sums[0, 2:])

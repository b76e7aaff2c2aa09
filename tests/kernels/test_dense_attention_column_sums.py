import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chipsparse.kernels.dense_attention_column_sums import BACKENDS, dense_attention_column_sums
from tests.kernels.formulas import (
    DTYPES,
    LSE_TOLERANCE,
    TOLERANCE,
    assert_close,
    attention_inputs,
    backend_names,
    column_sums_of,
    full_attention,
    groups_of,
    skip_unless_it_runs,
)

SHAPES = [(1, 1, 1, 1, 64), (2, 3, 7, 9, 64), (1, 2, 131, 333, 128), (1, 1, 1337, 1337, 64)]


@backend_names(BACKENDS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strided", [False, True])
def test_matches_the_formula(backend, shape, dtype, strided, device):
    inputs = attention_inputs(*shape, dtype=dtype, device=device, strided=strided)
    skip_unless_it_runs(BACKENDS, backend, *inputs)
    expected, expected_lse = full_attention(*inputs)
    noise = torch.randn(expected_lse.shape, generator=torch.Generator().manual_seed(1))
    previous = (expected_lse.cpu() + noise).float().to(device)
    output, lse, sums = dense_attention_column_sums(*inputs, previous, backend=backend)
    assert (output.dtype, lse.shape) == (dtype, shape[:3])
    assert sums.shape == (*shape[:2], groups_of(shape[2], 128), shape[3])
    assert_close(output, expected, TOLERANCE[dtype])
    assert_close(lse, expected_lse, LSE_TOLERANCE[dtype])
    assert_close(sums, column_sums_of(*inputs[:2], previous, 128), LSE_TOLERANCE[dtype])


@backend_names(BACKENDS)
@pytest.mark.parametrize("group_rows", [1, 13, 64, 500])
def test_any_group_size_and_ragged_groups(backend, group_rows, device):
    inputs = attention_inputs(2, 2, 131, 77, 64, dtype=torch.float32, device=device)
    skip_unless_it_runs(BACKENDS, backend, *inputs)
    _, lse = full_attention(*inputs)
    _, _, sums = dense_attention_column_sums(
        *inputs, lse.float(), group_rows=group_rows, backend=backend
    )
    assert_close(sums, column_sums_of(*inputs[:2], lse.float(), group_rows), 1e-5)
    # With the true constants every row gives away a mass of one.
    rows = torch.tensor([len(part) for part in torch.arange(131).split(group_rows)])
    assert_close(sums.sum(-1), rows.expand(2, 2, -1), 1e-5)


@backend_names(BACKENDS)
@pytest.mark.parametrize("previous", [0.0, -500.0, 500.0, torch.inf, -torch.inf, torch.nan])
def test_output_never_depends_on_the_previous_constants(backend, previous, device):
    inputs = attention_inputs(1, 2, 150, 90, 64, dtype=torch.float32, device=device)
    skip_unless_it_runs(BACKENDS, backend, *inputs)
    true = full_attention(*inputs)[1].float()
    expected = dense_attention_column_sums(*inputs, true, backend=backend)
    actual = dense_attention_column_sums(*inputs, torch.full_like(true, previous), backend=backend)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    if previous != previous:
        assert actual[2].isnan().all()
    else:
        assert actual[2].isfinite().all()


@backend_names(BACKENDS)
def test_stale_constants_keep_the_order_of_the_columns(backend, device):
    """Very low constants would overflow; what underflows beside them must not become NaN."""
    query, key, value = attention_inputs(1, 1, 1, 200, 64, dtype=torch.float32, device=device)
    skip_unless_it_runs(BACKENDS, backend, query, key, value)
    query = query * 100  # most weights of a row underflow to 0
    previous = torch.full((1, 1, 1), -1e4, device=device)
    _, _, sums = dense_attention_column_sums(query, key, value, previous, backend=backend)
    true = torch.softmax((query.double() @ key.double().mT) / 8, -1)[0, 0, 0]
    assert sums.isfinite().all()
    assert sums.argmax() == true.argmax()
    assert (sums[0, 0, 0].double()[true < 1e-60] == 0).all()


@backend_names(BACKENDS)
def test_a_nan_row_poisons_only_its_group(backend, device):
    inputs = attention_inputs(1, 1, 40, 30, 64, dtype=torch.float32, device=device)
    skip_unless_it_runs(BACKENDS, backend, *inputs)
    previous = full_attention(*inputs)[1].float()
    previous[0, 0, 17] = torch.nan
    _, _, sums = dense_attention_column_sums(*inputs, previous, group_rows=16, backend=backend)
    assert sums.isnan().all(-1).flatten().tolist() == [False, True, False]
    assert sums[0, 0, [0, 2]].isfinite().all()


@backend_names(BACKENDS)
def test_repeats_bit_for_bit(backend, device):
    inputs = attention_inputs(2, 2, 333, 131, 64, dtype=torch.bfloat16, device=device)
    skip_unless_it_runs(BACKENDS, backend, *inputs)
    previous = full_attention(*inputs)[1].float()
    first = dense_attention_column_sums(*inputs, previous, backend=backend)
    second = dense_attention_column_sums(*inputs, previous, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class LargestResult(TorchDispatchMode):
    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result._base is None:
            self.nbytes = max(self.nbytes, result.nbytes)
        return result


@pytest.mark.parametrize("groups_at_once", [1, 3])
def test_transient_memory_stays_within_the_limit(groups_at_once):
    inputs = attention_inputs(1, 1, 640, 2000, 16, dtype=torch.float32, device="cpu")
    previous = full_attention(*inputs)[1].float()
    limit = groups_at_once * 2 * 64 * 2000 * 4  # scores and weights
    with LargestResult() as largest:
        small = dense_attention_column_sums(
            *inputs, previous, group_rows=64, max_transient_bytes=limit, backend="reference"
        )
    assert 64 * 2000 * 4 <= largest.nbytes <= limit // 2
    large = dense_attention_column_sums(*inputs, previous, group_rows=64, backend="reference")
    for a, b in zip(small, large, strict=True):
        assert_close(a, b, 1e-5)


def test_mistakes_are_named():
    inputs = attention_inputs(1, 2, 7, 9, 64, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match=r"lse_previous must be \[1, 2, 7\], got \[1, 2, 9\]"):
        dense_attention_column_sums(*inputs, torch.zeros(1, 2, 9))
    with pytest.raises(ValueError, match="group_rows must be at least 1, got 0"):
        dense_attention_column_sums(*inputs, torch.zeros(1, 2, 7), group_rows=0)
    with pytest.raises(ValueError, match="unknown backend 'fast'; it has"):
        dense_attention_column_sums(*inputs, torch.zeros(1, 2, 7), backend="fast")

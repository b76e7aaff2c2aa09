import pytest
import torch

from chipsparse.kernels.fp8_quantization import FP8
from chipsparse.kernels.fp8_rows import fp8_rows
from tests.kernels.formulas import backend_names, skip_unless_it_runs
from tests.kernels.test_fp8_quantization import number_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (3, 16), (70, 100), (5, 4096), (2, 5000)]
NUMBERS = torch.arange(128, dtype=torch.uint8).view(FP8).double()[:127]  # of e4m3, from 0 to 448


def random_rows(*shape, dtype, device, seed=0):
    """Rows of very different sizes, with zeros in between."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape, generator=generator)
    rows *= 10.0 ** torch.randint(-4, 4, (shape[0], 1), generator=generator)
    rows[:, ::7] = 0
    return rows.to(device, dtype)


def nearest(numbers):
    """What of e4m3 is nearest to float64 numbers within ±448; of two as near, the even one."""
    size = numbers.abs()
    above = torch.searchsorted(NUMBERS, size).clamp(1, 126)
    low, high = size - NUMBERS[above - 1], NUMBERS[above] - size
    up = (high < low) | ((high == low) & (above % 2 == 0))
    return torch.where(up, NUMBERS[above], NUMBERS[above - 1]) * numbers.sign()


@backend_names(fp8_rows)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_row_is_rounded_by_its_largest_number(backend, shape, dtype, device):
    rows = random_rows(*shape, dtype=dtype, device=device)
    skip_unless_it_runs(fp8_rows, backend, rows)
    data, scale = fp8_rows(rows, backend=backend)
    assert data.dtype == FP8
    assert data.is_contiguous()
    wide, scale = rows.cpu().double(), scale.cpu().double()
    largest = wide.abs().amax(-1, keepdim=True)
    expected = torch.where(largest == 0, 1.0, largest / 448)
    torch.testing.assert_close(scale, expected, rtol=2e-7, atol=0)
    # Where a quotient lies between two numbers of e4m3 its own rounding may decide.
    quotient, found = wide / scale, number_of(data)
    off = (found - nearest(quotient.clamp(-448, 448))).abs()
    between = (found - quotient).abs() <= off / 2 * (1 + 1e-5)
    assert ((off == 0) | between).all()
    assert (off == 0).float().mean() > 0.99


@backend_names(fp8_rows)
def test_rows_of_zeros_and_what_is_not_finite(backend, device):
    rows = torch.ones(5, 300, dtype=torch.bfloat16, device=device)
    rows[0], rows[1, 299], rows[2, 5], rows[4] = 0, torch.nan, -torch.inf, -1e-38
    skip_unless_it_runs(fp8_rows, backend, rows)
    data, scale = fp8_rows(rows, backend=backend)
    number = number_of(data) * scale.cpu().double()
    assert (number[[0, 4]] == 0).all()
    assert number[1:3].isnan().all()
    torch.testing.assert_close(number[3], torch.ones(300).double(), rtol=1e-6, atol=0)


@backend_names(fp8_rows)
def test_rows_of_a_wider_tensor(backend, device):
    wide = random_rows(6, 200, dtype=torch.bfloat16, device=device)
    skip_unless_it_runs(fp8_rows, backend, wide)
    found = fp8_rows(wide[1:5, 8:160], backend=backend)
    expected = fp8_rows(wide[1:5, 8:160].contiguous(), backend=backend)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.float(), other.float())


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (torch.zeros(2, 3, 4), r"\[M, K\], K of 1 or more, got torch.float32 \[2, 3, 4\]"),
        (torch.zeros(4, 0), r"got torch.float32 \[4, 0\]"),
        (torch.zeros(4, 4, dtype=torch.int8), r"got torch.int8 \[4, 4\]"),
        (torch.zeros(4, 8).t(), r"rows must be contiguous, got \[M, K\] with strides \[1, 8\]"),
    ],
)
def test_what_does_not_fit_is_refused(rows, said):
    with pytest.raises(ValueError, match=said):
        fp8_rows(rows)

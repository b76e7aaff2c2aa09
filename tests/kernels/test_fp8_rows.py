import pytest
import torch

from chipsparse.kernels.fp8_quantization import FP8
from chipsparse.kernels.fp8_rows import fp8_rows
from chipsparse.kernels.token_layout import has_padding
from tests.kernels.formulas import DTYPES, backend_names, token_contiguous
from tests.kernels.test_fp8_quantization import number_of

NUMBERS = torch.arange(128, dtype=torch.uint8).view(FP8).double()[:127]  # of e4m3, from 0 to 448
# As linears and as caches of activations have their rows rounded.
OF_LINEARS = {}
OF_CACHES = {"headroom": 16, "turned": True}
SHAPES = [(1, 1), (3, 16), (70, 100), (5, 4096), (2, 5000)]
SHAPES += [(1, 1, 1), (2, 7, 50), (1, 131, 70), (3, 64, 64), (1, 5, 400)]
CASES = [(OF_LINEARS if len(shape) == 2 else OF_CACHES, shape) for shape in SHAPES]


def random_rows(*shape, dtype, device):
    """Rows of very different sizes, a third of each next to nothing and a seventh zero."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(shape, generator=generator)
    rows *= 10.0 ** torch.randint(-1, 4, (*shape[:-1], 1), generator=generator)
    rows[..., ::3] *= 1e-3
    rows[..., 1::7] = 0
    return rows.to(device, dtype)


def nearest(numbers):
    """What of e4m3 is nearest to float64 numbers within ±448; of two as near, the even one."""
    size = numbers.abs().contiguous()
    above = torch.searchsorted(NUMBERS, size).clamp(1, 126)
    low = size - NUMBERS[above - 1]
    high = NUMBERS[above] - size
    up = (high < low) | ((high == low) & (above % 2 == 0))
    return torch.where(up, NUMBERS[above], NUMBERS[above - 1]) * numbers.sign()


@backend_names(fp8_rows)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "shape"), CASES)
def test_each_row_is_rounded_by_its_largest_number(backend, form, shape, dtype, device):
    rows = random_rows(*shape, dtype=dtype, device=device)
    for laid_out in (rows, token_contiguous(rows)) if form else (rows,):
        data, scale = fp8_rows(laid_out, **form, backend=backend)
        assert (data.shape, data.dtype) == (shape, FP8)
        assert has_padding(data) if form else data.is_contiguous()
        assert (scale.shape, scale.dtype) == ((*shape[:-1], 1), torch.float32)
        wide = rows.cpu().double()
        scale = scale.cpu().double()
        expected = wide.abs().amax(-1, keepdim=True) * form.get("headroom", 1) / 448
        torch.testing.assert_close(scale, expected, rtol=3e-7, atol=0)
        # Where a quotient lies between two numbers of e4m3 its own rounding may decide.
        quotient = wide / scale
        found = number_of(data.contiguous())
        off = (found - nearest(quotient.clamp(-448, 448))).abs()
        between = (found - quotient).abs() <= off / 2 * (1 + 1e-5)
        assert ((off == 0) | between).all()
        assert (off == 0).float().mean() > 0.99


@backend_names(fp8_rows)
@pytest.mark.parametrize("form", [OF_LINEARS, OF_CACHES])
def test_small_rows_and_what_is_not_finite(backend, form, device):
    rows = torch.ones(6, 300, dtype=torch.bfloat16, device=device)
    rows[0] = 0
    rows[1, 299] = torch.nan
    rows[2, 5] = -torch.inf
    rows[3] = -1e-6
    rows[4] = -1e-38
    data, scale = fp8_rows(rows[None] if form else rows, **form, backend=backend)
    stored = number_of(data.contiguous()).view(6, 300)
    scale = scale.cpu().double().view(6, 1)
    assert (stored[[0, 1, 2, 4]] == 0).all()
    assert scale[0] == 2.0**-8
    assert scale[1:3].isnan().all()
    number = stored * scale
    expected = torch.tensor([[-1e-6], [1.0]]).double().expand(2, 300)
    torch.testing.assert_close(number[[3, 5]], expected, rtol=1 / 16, atol=0)


@backend_names(fp8_rows)
def test_rows_of_a_wider_tensor(backend, device):
    wide = random_rows(6, 200, dtype=torch.bfloat16, device=device)
    found = fp8_rows(wide[1:5, 8:160], backend=backend)
    expected = fp8_rows(wide[1:5, 8:160].contiguous(), backend=backend)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.float(), other.float())

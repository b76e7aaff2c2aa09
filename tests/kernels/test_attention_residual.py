import pytest
import torch

from chipsparse.kernels.attention_residual import attention_residual
from tests.kernels.formulas import DTYPES, assert_close, backend_names

RULES = ["merge", "difference"]
SIZES = [(1, 1, 1, 16), (2, 3, 75, 64), (1, 2, 130, 128), (1, 2, 33, 24)]


def some_inputs(size, dtype, device, *, strided=False):
    generator = torch.Generator().manual_seed(sum(size))

    def tensor(*shape):
        return torch.randn(shape, generator=generator).to(device)

    batch, heads, tokens, width = size
    if strided:
        output, kept = (
            tensor(batch, tokens, heads, width).to(dtype).transpose(1, 2) for _ in range(2)
        )
    else:
        output, kept = (tensor(*size).to(dtype) for _ in range(2))
    lse = tensor(*size[:3]) * 3
    kept_lse = lse - tensor(*size[:3]).abs()
    kept_lse[0, 0, 0] = -torch.inf  # a block that keeps nothing
    kept[0, 0, 0] = 0
    return output, kept, kept_lse, lse


def exact_residual(output, kept, kept_lse, lse, rule):
    """The residual and the mass of the kept columns in float64."""
    mass = (kept_lse.double() - lse.double()).exp()
    weight = mass if rule == "merge" else torch.ones_like(mass)
    return output.double() - weight.unsqueeze(-1) * kept.double(), mass


@backend_names(attention_residual)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("strided", [False, True])
def test_is_what_the_kept_columns_leave(backend, rule, size, dtype, strided, device):
    inputs = some_inputs(size, dtype, device, strided=strided)
    residual, scale, mass = attention_residual(*inputs, delta_rule=rule, backend=backend)
    exact, exact_mass = exact_residual(*inputs, rule)
    assert (residual.dtype, scale) == (dtype, None)
    assert residual.stride() == inputs[0].stride()
    # One rounding; Triton's interpreter truncates to bf16.
    assert_close(residual, exact, max(1e-5, torch.finfo(dtype).eps))
    assert torch.equal(residual[0, 0, 0], inputs[0][0, 0, 0])
    if rule == "difference":
        assert mass is None
    else:
        assert mass.dtype == torch.float32
        assert_close(mass, exact_mass, 1e-5)
        assert mass[0, 0, 0] == 0


@backend_names(attention_residual)
def test_other_strides(backend, device):
    output, kept, kept_lse, lse = some_inputs((2, 3, 75, 64), torch.bfloat16, device)
    expected = attention_residual(output, kept, kept_lse, lse, backend=backend)
    wide = torch.zeros(2, 3, 75, 80, dtype=torch.bfloat16, device=device)
    wide[..., :64] = output
    apart = torch.zeros(2, 3, 75, 2, device=device)
    apart[..., 0] = lse
    found = attention_residual(
        wide[..., :64], kept.clone(), kept_lse, apart[..., 0], backend=backend
    )
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.kept_mass, expected.kept_mass)


@backend_names(attention_residual)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("strided", [False, True])
def test_in_fp8_what_the_kept_columns_leave_is_near(backend, rule, size, strided, device):
    output, kept, kept_lse, lse = some_inputs(size, torch.bfloat16, device, strided=strided)
    output[-1, -1, -1] = kept[-1, -1, -1] = 0  # a row of zeros
    options = {"delta_rule": rule, "backend": backend}
    values, scale, mass = attention_residual(output, kept, kept_lse, lse, fp8=True, **options)
    assert (values.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert values.stride() == output.stride()
    exact, _ = exact_residual(output, kept, kept_lse, lse, rule)
    largest = exact.abs().amax(-1)
    assert_close(scale, (largest / 448), 1e-5)
    found = values.double() * scale.double().unsqueeze(-1)
    error = (found - exact).abs()
    assert (error <= exact.abs() / 16 + largest.unsqueeze(-1) * 2**-18).all()
    if size[2] > 1:  # of rounding alone: 3 digits of numbers that are spread evenly in a binade
        assert 0.02 < float(error.norm() / exact.norm()) < 0.03
    assert (values[-1, -1, -1].float() == 0).all()
    if rule == "merge":
        assert torch.equal(mass, attention_residual(output, kept, kept_lse, lse, **options)[2])


@backend_names(attention_residual)
def test_in_fp8_a_row_that_is_not_finite_is_nan(backend, device):
    output, kept, kept_lse, lse = some_inputs((1, 2, 33, 64), torch.bfloat16, device)
    clean = attention_residual(output, kept, kept_lse, lse, fp8=True, backend=backend)
    output[0, 0, 3, 7], kept[0, 1, 5, 0], output[0, 1, 9] = torch.nan, -torch.inf, torch.inf
    found = attention_residual(output, kept, kept_lse, lse, fp8=True, backend=backend)
    strange = torch.zeros(1, 2, 33, dtype=torch.bool, device=device)
    strange[0, 0, 3] = strange[0, 1, 5] = strange[0, 1, 9] = True
    assert torch.equal(found.scale.isnan(), strange)
    assert (found.values[strange].float() == 0).all()
    assert torch.equal(found.scale[~strange], clean.scale[~strange])
    bytes_of = [each.values[~strange].view(torch.uint8) for each in (found, clean)]
    assert torch.equal(*bytes_of)


@backend_names(attention_residual)
def test_rounds_to_the_nearest_of_e4m3(backend, device):
    """Every number that it has, those between two of them, and just beside these."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    values = torch.cat([numbers, middles, middles * (1 + 2**-12), middles * (1 - 2**-12)])
    values = torch.cat([values, -values])
    rows = torch.full((1, 1, 16, 64), 448.0)  # which makes the scale 1
    rows.flatten()[: len(values)] = values
    rows[..., -1] = 448.0
    rows, nothing = rows.to(device), torch.zeros(1, 1, 16, 64, device=device)
    found = attention_residual(rows, nothing, delta_rule="difference", fp8=True, backend=backend)
    assert (found.scale == 1).all()
    expected = rows.to(torch.float8_e4m3fn)
    assert torch.equal(found.values.view(torch.uint8), expected.view(torch.uint8))

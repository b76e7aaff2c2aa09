import pytest
import torch

from chipsparse.kernels.fp8_activations import fp8_activations
from chipsparse.kernels.fp8_quantization import FP8
from chipsparse.kernels.token_layout import has_padding
from tests.kernels.formulas import backend_names, skip_unless_it_runs, token_contiguous
from tests.kernels.test_fp8_quantization import number_of
from tests.kernels.test_fp8_rows import nearest

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1), (2, 7, 50), (1, 131, 70), (3, 64, 64), (1, 5, 400)]


def random_activations(*shape, dtype, device, seed=0):
    """Tokens of very different sizes, a third of their activations next to nothing."""
    generator = torch.Generator().manual_seed(seed)
    activations = torch.randn(shape, generator=generator)
    activations *= 10.0 ** torch.randint(-1, 4, (*shape[:2], 1), generator=generator)
    activations[..., ::3] *= 1e-3
    return activations.to(device, dtype)


@backend_names(fp8_activations)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens_contiguous", [False, True])
def test_each_token_is_rounded_by_its_largest(backend, tokens_contiguous, shape, dtype, device):
    activation = random_activations(*shape, dtype=dtype, device=device)
    if tokens_contiguous:
        activation = token_contiguous(activation)
    skip_unless_it_runs(fp8_activations, backend, activation)
    data, scale = fp8_activations(activation, backend=backend)
    assert (data.shape, data.dtype) == (shape, FP8)
    assert has_padding(data)
    assert (scale.shape, scale.dtype) == ((*shape[:2], 1), torch.float32)
    wide, scale = activation.cpu().double(), scale.cpu().double()
    expected = wide.abs().amax(-1, keepdim=True) / 28
    torch.testing.assert_close(scale, expected, rtol=3e-7, atol=0)
    # Where a quotient lies between two numbers of e4m3 its own rounding may decide.
    quotient, found = (wide / scale).contiguous(), number_of(data.contiguous())
    off = (found - nearest(quotient)).abs()
    between = (found - quotient).abs() <= off / 2 * (1 + 1e-5)
    assert ((off == 0) | between).all()
    assert (off == 0).float().mean() > 0.99


@backend_names(fp8_activations)
def test_small_tokens_and_what_is_not_finite(backend, device):
    activation = torch.ones(1, 5, 300, dtype=torch.bfloat16, device=device)
    activation[0, 0], activation[0, 1, 299], activation[0, 2, 5] = 0, torch.nan, -torch.inf
    activation[0, 3] = -1e-6
    skip_unless_it_runs(fp8_activations, backend, activation)
    data, scale = fp8_activations(activation, backend=backend)
    stored, number = number_of(data.contiguous()), scale.cpu().double()
    assert (stored[0, :3] == 0).all()
    assert number[0, 0] == 2.0**-8
    assert number[0, 1:3].isnan().all()
    number = stored * number
    assert ((number[0, 3] + 1e-6).abs() <= 1e-6 / 16).all()
    assert ((number[0, 4] - 1).abs() <= 1 / 16).all()


@pytest.mark.parametrize(
    ("activation", "said"),
    [
        (torch.zeros(3, 4), r"must be \[B, N, F\], F of 1 or more, got \[3, 4\]"),
        (torch.zeros(1, 4, 0), r"got \[1, 4, 0\]"),
        (torch.zeros(1, 4, 4, dtype=torch.int8), "got torch.int8"),
    ],
)
def test_what_does_not_fit_is_refused(activation, said):
    with pytest.raises(ValueError, match=said):
        fp8_activations(activation)

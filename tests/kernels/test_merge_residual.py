import pytest
import torch

from chipsparse.kernels.merge_residual import merge_residual, reference
from tests.kernels.formulas import DTYPES, assert_close, backend_names, skip_unless_it_runs

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


@backend_names(merge_residual)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strided", [False, True])
def test_is_what_the_kept_columns_leave(backend, size, dtype, strided, device):
    output, kept, kept_lse, lse = some_inputs(size, dtype, device, strided=strided)
    skip_unless_it_runs(merge_residual, backend, output, kept)
    residual, mass = merge_residual(output, kept, kept_lse, lse, backend=backend)
    exact_mass = (kept_lse.double() - lse.double()).exp()
    exact = output.double() - exact_mass.unsqueeze(-1) * kept.double()
    assert (residual.dtype, mass.dtype) == (dtype, torch.float32)
    assert residual.stride() == output.stride()
    assert_close(mass, exact_mass, 1e-5)
    # One rounding; Triton's interpreter truncates to bf16.
    assert_close(residual, exact, max(1e-5, torch.finfo(dtype).eps))
    assert mass[0, 0, 0] == 0
    assert torch.equal(residual[0, 0, 0], output[0, 0, 0])


@backend_names(merge_residual)
def test_other_strides(backend, device):
    output, kept, kept_lse, lse = some_inputs((2, 3, 75, 64), torch.bfloat16, device)
    skip_unless_it_runs(merge_residual, backend, output, kept)
    expected = merge_residual(output, kept, kept_lse, lse, backend=backend)
    wide = torch.zeros(2, 3, 75, 80, dtype=torch.bfloat16, device=device)
    wide[..., :64] = output
    apart = torch.zeros(2, 3, 75, 2, device=device)
    apart[..., 0] = lse
    found = merge_residual(wide[..., :64], kept.clone(), kept_lse, apart[..., 0], backend=backend)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_the_reference_goes_over_a_few_heads_at_a_time(monkeypatch):
    inputs = some_inputs((2, 3, 75, 64), torch.float32, "cpu")
    expected = merge_residual(*inputs)
    monkeypatch.setattr(reference, "TRANSIENT_BYTES", 1)
    assert all(map(torch.equal, merge_residual(*inputs), expected))


def test_float64_stays_float64():
    output, kept, kept_lse, lse = (
        tensor.double() for tensor in some_inputs((1, 2, 5, 8), torch.float32, "cpu")
    )
    residual, mass = merge_residual(output, kept, kept_lse, lse)
    assert (residual.dtype, mass.dtype) == (torch.float64, torch.float64)
    exact = (kept_lse - lse).exp()
    torch.testing.assert_close(mass, exact, rtol=1e-14, atol=0)
    torch.testing.assert_close(residual, output - exact.unsqueeze(-1) * kept, rtol=1e-13, atol=0)


def test_nothing_is_left_of_an_empty_batch(device):
    output, kept, kept_lse, lse = some_inputs((1, 2, 5, 8), torch.float32, device)
    residual, mass = merge_residual(output[:0], kept[:0], kept_lse[:0], lse[:0])
    assert (residual.shape, mass.shape) == ((0, 2, 5, 8), (0, 2, 5))


def test_errors_name_what_does_not_fit():
    output, kept, kept_lse, lse = some_inputs((1, 2, 5, 8), torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"kept must be .*\[1, 2, 5, 8\].*\[1, 2, 4, 8\]"):
        merge_residual(output, kept[:, :, :4], kept_lse, lse)
    with pytest.raises(ValueError, match=r"lse must be .*\[1, 2, 5\]"):
        merge_residual(output, kept, kept_lse, lse[..., :3])
    with pytest.raises(ValueError, match="float64"):
        merge_residual(output, kept.double(), kept_lse, lse)
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        merge_residual(output, kept, kept_lse, lse, backend="cuda")


def test_the_backend_says_why_it_cannot_run():
    output = torch.zeros(1, 2, 8, 5).mT
    choice = merge_residual.choose(output, output)
    assert choice.backend.name == "reference"
    ((name, _),) = choice.rejected
    assert name == "triton"

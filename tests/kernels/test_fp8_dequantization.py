import pytest
import torch

from chipsparse.kernels.fp8_dequantization import fp8_dequantization
from chipsparse.kernels.fp8_quantization import FP8
from tests.kernels.formulas import backend_names
from tests.kernels.test_fp8_quantization import number_of


def weight(rows, columns, *, device, per_row=True, seed=0):
    """Every bit pattern of e4m3, NaN among them, and scales."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(256, (rows, columns), generator=generator, dtype=torch.uint8)
    scale = torch.rand(rows if per_row else 1, 1, generator=generator) + 0.01
    return bits.view(FP8).to(device), scale.to(device)


@backend_names(fp8_dequantization)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 8), (64, 128), (72, 1000), (129, 264), (8, 3)])
@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_every_number_times_its_scale(backend, shape, dtype, per_row, turned, device):
    data, scale = weight(*shape, device=device, per_row=per_row)
    found = fp8_dequantization(data, scale, dtype=dtype, turned=turned, backend=backend)
    expected = (number_of(data) * scale.cpu().double()).float().to(dtype)
    # Triton's interpreter truncates to bf16.
    truncates = backend == "triton" and device.type == "cpu" and dtype == torch.bfloat16
    rtol = 2.0**-7 if truncates else 0
    torch.testing.assert_close(found.cpu(), expected, rtol=rtol, atol=0, equal_nan=True)
    assert (found.t() if turned else found).is_contiguous()


@backend_names(fp8_dequantization)
def test_rows_of_a_larger_weight(backend, device):
    data, scale = weight(32, 64, device=device)
    options = {"dtype": torch.bfloat16, "backend": backend}
    whole = fp8_dequantization(data, scale, **options)
    part = fp8_dequantization(data[8:24, 16:], scale[8:24], turned=True, **options)
    torch.testing.assert_close(part, whole[8:24, 16:], rtol=0, atol=0, equal_nan=True)

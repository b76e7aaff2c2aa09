"""Definition of `fp8_dequantization`."""

from __future__ import annotations

import torch

from chipsparse.kernels.fp8_dequantization import Fp8Dequantization


def fp8_dequantization(call: Fp8Dequantization) -> torch.Tensor:
    """Run a checked `Fp8Dequantization`."""
    wide = torch.float64 if call.dtype == torch.float64 else torch.float32
    result = (call.data.to(wide) * call.scale).to(call.dtype)
    return result.t().contiguous().t() if call.turned else result.contiguous()

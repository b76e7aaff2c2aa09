"""Definition of `fp8_rows`."""

from __future__ import annotations

import torch

from chipsparse.kernels.fp8_quantization import FP8, LARGEST_FP8, SMALLEST
from chipsparse.kernels.fp8_rows import Fp8RowRounding, Fp8Rows


def fp8_rows(call: Fp8RowRounding) -> Fp8Rows:
    """Run a checked `Fp8RowRounding`."""
    rows = call.rows.float()
    largest = rows.abs().amax(-1, keepdim=True)
    scale = torch.where(largest < SMALLEST, 1.0, largest / LARGEST_FP8)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    return Fp8Rows((rows / scale).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8), scale)

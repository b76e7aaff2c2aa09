"""Definition of `fp8_rows`, some rows at a time, and of numbers that are stored by its scales."""

from __future__ import annotations

import torch

from chipsparse.kernels.checks import ranges, tile_bytes
from chipsparse.kernels.fp8_quantization import FP8, LARGEST_FP8
from chipsparse.kernels.fp8_rows import SCALE_OF_ZEROS, SMALLEST_SCALE, Fp8RowRounding, Fp8Rows


def fp8_rows(call: Fp8RowRounding) -> Fp8Rows:
    """Run a checked `Fp8RowRounding`."""
    rows = call.rows
    (data, scale) = call.results()
    count = rows.shape[-2]
    row_bytes = 2 * 4 * (rows.numel() // max(1, count))
    for first, last in ranges(count, row_bytes, tile_bytes(rows.device)):
        part = rows[..., first:last, :].float()
        largest = part.abs().amax(-1, keepdim=True)
        part_scale = (largest * (call.headroom / LARGEST_FP8)).clamp_(min=SMALLEST_SCALE)
        part_scale = torch.where(largest == 0, SCALE_OF_ZEROS, part_scale)
        finite = part_scale.isfinite()
        part = torch.where(finite, part, 0)
        data[..., first:last, :] = rounded(part, torch.where(finite, part_scale, 1))
        scale[..., first:last, :] = torch.where(finite, part_scale, torch.nan)
    return Fp8Rows(data, scale)


def rounded(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return numbers as they are stored: in units of their row's scale, in e4m3; NaN as 0.

    Numbers of more than 448 units saturate.
    """
    units = numbers.float() * (1 / scale)
    return units.clamp(-LARGEST_FP8, LARGEST_FP8).nan_to_num(0.0).to(FP8)

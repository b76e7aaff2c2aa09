"""Definition of `fp8_activations`, some tokens at a time, and of numbers stored by its scales."""

from __future__ import annotations

import torch

from chipsparse.kernels.checks import ranges, tile_bytes
from chipsparse.kernels.fp8_activations import (
    GROWTH,
    SCALE_OF_ZEROS,
    SMALLEST_SCALE,
    Fp8ActivationRounding,
    Fp8Activations,
)
from chipsparse.kernels.fp8_quantization import FP8, LARGEST_FP8
from chipsparse.kernels.token_layout import empty_token_contiguous


def fp8_activations(call: Fp8ActivationRounding) -> Fp8Activations:
    """Run a checked `Fp8ActivationRounding`."""
    activation = call.activation
    batch, tokens, neurons = activation.shape
    data = empty_token_contiguous(activation, batch, tokens, neurons, dtype=FP8)
    scale = activation.new_empty(batch, tokens, 1, dtype=torch.float32)
    token_bytes = 2 * 4 * batch * neurons
    for first, last in ranges(tokens, token_bytes, tile_bytes(activation.device)):
        part = activation[:, first:last].float()
        largest = part.abs().amax(-1, keepdim=True)
        found = (largest * (GROWTH / LARGEST_FP8)).clamp_(min=SMALLEST_SCALE)
        found = torch.where(largest == 0, SCALE_OF_ZEROS, found)
        finite = found.isfinite()
        data[:, first:last] = rounded(torch.where(finite, part, 0), torch.where(finite, found, 1))
        scale[:, first:last] = torch.where(finite, found, torch.nan)
    return Fp8Activations(data, scale)


def rounded(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Numbers as they are stored: in units of their token's scale, in e4m3; NaN as 0.

    What is larger than 448 units saturates.
    """
    units = numbers.float() * (1 / scale)
    return units.clamp(-LARGEST_FP8, LARGEST_FP8).nan_to_num(0.0).to(FP8)

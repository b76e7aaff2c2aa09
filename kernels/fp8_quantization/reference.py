"""Definition of `fp8_quantization`: one head at a time."""

from __future__ import annotations

from itertools import product

import torch
import torch.nn.functional as F

from chipsparse.kernels.checks import compute_dtype
from chipsparse.kernels.fp8_quantization import (
    FP8,
    LARGEST_FP8,
    LARGEST_INT8,
    NO_SCALE,
    SMALLEST,
    STORED_TOGETHER,
    Fp8Attention,
    Fp8Quantization,
    stored_order,
)
from chipsparse.kernels.triton_support import with_positive_scale


def fp8_quantization(call: Fp8Quantization) -> Fp8Attention:
    """Run a checked `Fp8Quantization`."""
    query, scale = with_positive_scale(call.query, call.softmax_scale)
    key = call.key
    value = call.value
    batch, heads, rows, head_dim = query.shape
    columns = key.shape[2]
    device = query.device
    dtype = compute_dtype(query)
    stored = -(-columns // STORED_TOGETHER) * STORED_TOGETHER
    result = Fp8Attention(
        query=torch.empty_like(query, dtype=torch.int8),
        key=torch.empty(batch, heads, columns, head_dim, dtype=torch.int8, device=device),
        value=torch.empty(batch, heads, head_dim, stored, dtype=FP8, device=device),
        row_factor=torch.empty(batch, heads, rows, device=device),
        row_shift=torch.empty(batch, heads, rows, device=device),
        value_scale=torch.empty(batch, heads, head_dim, device=device),
        value_mean=torch.empty(batch, heads, head_dim, device=device),
        columns=columns,
        dtype=query.dtype,
    )
    for head in product(range(batch), range(heads)):
        head_query = query[head].to(dtype)
        head_key = key[head].to(dtype)
        if call.rotate:
            head_query, head_key = map(hadamard_transform, (head_query, head_key))
        mean = head_key.mean(0)
        result.row_shift[head] = (head_query @ mean) * scale
        head_key = head_key - mean
        key_scale = _int8_scale(head_key.abs().amax())
        result.key[head] = to_int8(head_key / key_scale)
        row_scale = _int8_scale(head_query.abs().amax(-1))
        head_query = head_query / row_scale[:, None]
        result.query[head] = to_int8(head_query)
        along = (head_query * result.query[head]).sum(-1)
        correction = torch.where(along == 0, 1, head_query.square().sum(-1) / along)
        result.row_factor[head] = correction * row_scale * key_scale * scale

        head_value = value[head].to(dtype)
        mean = _finite(head_value).mean(0)
        head_value = head_value - mean
        value_scale = _fp8_scale(_finite(head_value).abs().amax(0))
        result.value_mean[head] = mean
        result.value_scale[head] = value_scale
        result.value[head] = store(to_fp8(head_value / value_scale))
    return result


def to_int8(scaled: torch.Tensor) -> torch.Tensor:
    """Rounds numbers within ±127 to int8; NaN, whose rows get a factor of NaN, becomes 0."""
    return scaled.nan_to_num(0.0).round().to(torch.int8)


def to_fp8(scaled: torch.Tensor) -> torch.Tensor:
    """Rounds to e4m3; saturates, but an infinity becomes NaN."""
    return torch.where(scaled.isinf(), torch.nan, scaled.clamp(-LARGEST_FP8, LARGEST_FP8)).to(FP8)


def store(value: torch.Tensor) -> torch.Tensor:
    """Values ``[M, D]`` as `Fp8Attention` has them: ``[D, M']``."""
    columns = value.shape[0]
    groups = F.pad(value.view(torch.uint8), (0, 0, 0, -columns % STORED_TOGETHER))
    ordered = groups.unflatten(0, (-1, STORED_TOGETHER))[:, stored_order(value.device)]
    return ordered.flatten(0, 1).T.contiguous().view(FP8)


def restore(value: torch.Tensor, columns: int) -> torch.Tensor:
    """Stored values ``[..., D, M']`` as ``[..., M, D]``: what `store` was given."""
    places = stored_order(value.device).argsort()
    groups = value.view(torch.uint8).unflatten(-1, (-1, STORED_TOGETHER))[..., places]
    return groups.flatten(-2)[..., :columns].mT.contiguous().view(FP8)


def hadamard_transform(rows: torch.Tensor) -> torch.Tensor:
    """Multiplies rows ``[..., D]``, D a power of two, with an orthogonal matrix of ±D ** -0.5."""
    width = rows.shape[-1]
    size = 1
    while size < width:
        first, second = rows.unflatten(-1, (-1, 2, size)).unbind(-2)
        rows = torch.stack((first + second, first - second), -2).flatten(-3)
        size *= 2
    return rows * width**-0.5


def _finite(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.isfinite(), values, 0)


def _int8_scale(largest: torch.Tensor) -> torch.Tensor:
    """Return the scale that makes the largest value 127; NaN where one is not finite."""
    scale = torch.where(largest > SMALLEST, largest / LARGEST_INT8, NO_SCALE)
    return torch.where(largest.isfinite(), scale, torch.nan)


def _fp8_scale(largest: torch.Tensor) -> torch.Tensor:
    """Return the scale that makes the largest value 448; 1 where all are 0."""
    return torch.where(largest > 0, largest / LARGEST_FP8, 1.0)

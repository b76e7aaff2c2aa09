"""Weights of linear layers in FP8 (e4m3), read with their scales for kernels of 16-bit numbers."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from chipsparse.kernels.checks import FLOATING
from chipsparse.kernels.dispatch import Call, Operation, triton_or_reference
from chipsparse.kernels.fp8_quantization import FP8
from chipsparse.kernels.triton_support import HALF_PRECISION

OP = "fp8_dequantization"


@dataclass(slots=True, eq=False)
class Fp8Dequantization(Call[torch.Tensor]):
    """Multiplies the numbers of a weight with their scales: ``data[r] * scale[r]``, rounded once.

    NaN stays NaN; e4m3 has no infinities.

    Args:
        data: e4m3 ``[R, K]`` with contiguous rows, as linears store their weights.
        scale: float32 ``[R, 1]``, one for each row (output channel), or ``[1, 1]``, one for all.
        dtype: the dtype of the result: fp16, bf16, fp32 or fp64.
        turned: True makes the columns of the result contiguous instead of its rows.

    Returns:
        ``[R, K]``, a new tensor; where it is turned, the transpose of a contiguous ``[K, R]``.
    """

    data: torch.Tensor
    scale: torch.Tensor
    _: KW_ONLY
    dtype: torch.dtype
    turned: bool = False

    def check(self) -> None:
        """Raises ``ValueError`` where shapes or dtypes do not fit."""
        data = self.data
        scale = self.scale
        if data.dtype != FP8 or data.dim() != 2 or (data.shape[1] > 1 and data.stride(1) != 1):
            raise ValueError(
                f"data must be {FP8} [R, K] with contiguous rows, got {data.dtype} "
                f"{list(data.shape)} with strides {list(data.stride())}",
            )
        if scale.dtype != torch.float32 or scale.shape not in ((data.shape[0], 1), (1, 1)):
            raise ValueError(
                f"scale must be float32 [{data.shape[0]}, 1] or [1, 1], got {scale.dtype} "
                f"{list(scale.shape)}",
            )
        if self.dtype not in FLOATING:
            raise ValueError(f"dtype must be a floating point type, got {self.dtype}")


def _dtype_reason(data: torch.Tensor, dtype: torch.dtype) -> str | None:
    return None if dtype in HALF_PRECISION else f"needs fp16 or bf16, got {dtype}"


fp8_dequantization = Operation(
    OP,
    Fp8Dequantization,
    lambda call: (call.data, call.dtype),
    *triton_or_reference(__name__, OP, _dtype_reason),
)

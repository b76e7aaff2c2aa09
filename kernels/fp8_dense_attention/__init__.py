"""Full attention in 8 bits, with the column sums of each query block where they are asked for."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from chipsparse.kernels.checks import check_block_size, check_shape
from chipsparse.kernels.dispatch import Call, Operation, gluon, triton_or_reference
from chipsparse.kernels.fp8_quantization import Fp8Attention
from chipsparse.kernels.triton_support import block_rows_reason, fp8_unsupported_reason

OP = "fp8_dense_attention"
# Weights are multiplied by 2 to this power: below 448, and far from where e4m3 loses digits.
WEIGHT_BITS = 8
# Kernels take weights relative to what is near, where that is not below 2 to minus this power.
LOWEST_BITS = 32
# One kernel of each backend computes attention in 16 and in 8 bits.
IN_16_BITS = "chipsparse.kernels.dense_attention_column_sums"


@dataclass(slots=True, eq=False)
class Fp8DenseAttention(Call[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]):
    """Softmax attention of int8 queries over int8 keys and e4m3 values; sums are int32 and float32.

    Scores are exact integers before they are scaled. The weights of a row are rounded to e4m3, as
    tensor cores multiply nothing else with e4m3 values: relative to the row's largest, times 256,
    so that they are normal numbers down to 2 ** -14 of it. The log-sum-exp and the column sums are
    those of the weights before.

    Args:
        tensors: what `fp8_quantization` gives.
        lse_previous: ``[B, H, N]`` natural log-sum-exp per row, for column sums; see
            `DenseAttentionColumnSums`. None: no sums.
        block_size_q: R, query rows per block of the sums; the last one may be ragged.

    Returns:
        The output ``[B, H, N, D]`` in the dtype of what was quantized, the log-sum-exp
        ``[B, H, N]`` in float32, and the column sums ``[B, H, G, M]``, G = ceil(N / R), in bf16
        (float32 where no 16-bit tensors were quantized), or None.
    """

    tensors: Fp8Attention
    _: KW_ONLY
    lse_previous: torch.Tensor | None = None
    block_size_q: int = 128

    def check(self) -> None:
        """Raises ``ValueError`` where shapes do not fit."""
        check_block_size(block_size_q=self.block_size_q)
        if self.lse_previous is not None:
            rows = tuple(self.tensors.query.shape[:3])
            check_shape("lse_previous", self.lse_previous, rows)


fp8_dense_attention = Operation(
    OP,
    Fp8DenseAttention,
    lambda call: (call.tensors.query, call.tensors.dtype, call.block_size_q),
    gluon(f"{IN_16_BITS}.gluon_sm90", OP, fp8_unsupported_reason, block_rows_reason),
    *triton_or_reference(__name__, OP, fp8_unsupported_reason, triton_package=IN_16_BITS),
)

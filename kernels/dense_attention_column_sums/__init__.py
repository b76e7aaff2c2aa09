"""Full attention that also sums the attention weight of every key column over each query block."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from chipsparse.kernels.calls import AttentionCall
from chipsparse.kernels.checks import check_block_size, check_shape
from chipsparse.kernels.dispatch import Operation, gluon, triton_or_reference
from chipsparse.kernels.triton_support import attention_unsupported_reason, block_rows_reason

OP = "dense_attention_column_sums"


@dataclass(slots=True, eq=False)
class DenseAttentionColumnSums(AttentionCall[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]):
    """Softmax attention and, in the same pass, the attention weight that each block gives a column.

    The weights are normalized with the log-sum-exp of the previous dense step, so that one pass is
    enough (Chipmunk, "Deep Dive on GPU Kernel Optimizations and Systems", part III):
    ``column_sums[b, h, g, j] = Σ_{i in block g} exp(s_ij - lse_previous_i)``.
    The output and its log-sum-exp never depend on ``lse_previous``.

    Args (and those of `AttentionCall`):
        lse_previous: ``[B, H, N]`` natural log-sum-exp per row. Where it lies more than 80 below
            the row's log-sum-exp now, weights are limited, and only finite sums are promised: a
            kernel limits them by the largest score that it has seen, tile by tile. NaN gives NaN
            sums in its block alone.
        block_size_q: R, query rows per block; the last of the G = ceil(N / R) blocks may be ragged.

    Returns:
        The output ``[B, H, N, D]`` in query's dtype, the log-sum-exp ``[B, H, N]`` in float32
        (float64 for float64 inputs) and the column sums ``[B, H, G, M]`` in query's dtype, but in
        bf16 for fp16 inputs, whose range is too small: columns are only ranked by them.
    """

    lse_previous: torch.Tensor
    _: KW_ONLY
    block_size_q: int = 128

    def check(self) -> None:
        """Raises ``ValueError`` where shapes, dtypes or devices do not fit."""
        self.check_attention()
        check_block_size(block_size_q=self.block_size_q)
        check_shape("lse_previous", self.lse_previous, tuple(self.query.shape[:3]))


dense_attention_column_sums = Operation(
    OP,
    DenseAttentionColumnSums,
    lambda call: (call.query, call.key, call.value, call.block_size_q),
    gluon(f"{__name__}.gluon_sm90", OP, attention_unsupported_reason, block_rows_reason),
    *triton_or_reference(__name__, OP, attention_unsupported_reason),
)

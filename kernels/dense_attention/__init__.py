"""Full attention that also returns its log-sum-exp."""

from __future__ import annotations

import torch

from chipsparse.kernels.dense_attention import library
from chipsparse.kernels.dense_attention.call import DenseAttention
from chipsparse.kernels.dispatch import (
    Backend,
    Operation,
    gluon,
    gluon_unsupported_reason,
    imported,
)
from chipsparse.kernels.triton_support import HALF_PRECISION, attention_unsupported_reason

OP = "dense_attention"
# One kernel computes attention with column sums and without them.
GLUON = "chipsparse.kernels.dense_attention_column_sums.gluon_sm90"
# Where our kernel is faster than PyTorch's: benchmarks/notes/dense_attention.md.
FASTER_HEAD_DIM = 128
FASTER_FROM_TOKENS = 8192


def faster_than_the_library(
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    head_dim: int,
) -> bool:
    """Return True where our kernel is for this device and dtype, and faster with so many keys."""
    if dtype not in HALF_PRECISION or _slower_reason(tokens, head_dim) is not None:
        return False
    return gluon_unsupported_reason(GLUON, device) is None


def _not_auto_reason(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
    return _slower_reason(key.shape[2], key.shape[3])


def _slower_reason(tokens: int, head_dim: int) -> str | None:
    if head_dim != FASTER_HEAD_DIM:
        return f"for heads of {head_dim} PyTorch's are as fast"
    if tokens < FASTER_FROM_TOKENS:
        return f"with {tokens} keys PyTorch's are as fast; it pays from {FASTER_FROM_TOKENS} on"
    return None


dense_attention = Operation(
    OP,
    DenseAttention,
    lambda call: (call.query, call.key, call.value),
    gluon(GLUON, OP, attention_unsupported_reason, not_auto=_not_auto_reason),
    Backend("library", lambda: library.dense_attention, library.unsupported_reason),
    Backend("reference", imported(f"{__name__}.reference", OP)),
)

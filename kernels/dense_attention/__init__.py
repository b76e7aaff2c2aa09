"""Full attention that also returns its log-sum-exp."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

import torch

from chipsparse.kernels.calls import AttentionCall
from chipsparse.kernels.dense_attention import library
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.kernels.dispatch import Backend, Operation, gluon, imported
from chipsparse.kernels.triton_support import (
    HALF_PRECISION,
    attention_unsupported_reason,
    hopper_unsupported_reason,
)

OP = "dense_attention"
# Where our kernel is faster than PyTorch's: benchmarks/notes/dense_attention.md.
FASTER_HEAD_DIM = 128
FASTER_FROM_TOKENS = 8192


@dataclass(slots=True, eq=False)
class DenseAttention(AttentionCall[tuple[torch.Tensor, torch.Tensor]]):
    """Softmax attention of every query row over every key, without mask or dropout.

    The log-sum-exp of a row is ``log Σ_j exp(scale · q_i · k_j)``, the softmax constant that
    FlashAttention (Dao et al., 2022) keeps for its backward pass.

    Args (and those of `AttentionCall`):
        kernels: measures which library kernel is fastest for tensors of this kind, once, with the
            host waiting, and remembers it; None takes the first that can run.
        backend: forces ``gluon`` (ours, on Hopper), ``library`` (cuDNN, flash or memory-efficient
            attention; flash on a CPU) or ``reference``; None takes the first that can run, ours
            only where it is faster.

    Returns:
        The output ``[B, H, N, D]`` in query's dtype, and the natural log-sum-exp ``[B, H, N]`` in
        float32 (float64 for float64 inputs).
    """

    _: KW_ONLY
    kernels: FastestKernel | None = field(default=None, compare=False)
    _settings: tuple[bool, ...] = field(default_factory=library.settings, init=False, repr=False)

    def check(self) -> None:
        """Raises ``ValueError`` where shapes, dtypes or devices do not fit."""
        self.check_attention()


def faster_than_the_library(
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    head_dim: int,
) -> bool:
    """Return True where our kernel is for this device and dtype, and faster with so many keys."""
    if dtype not in HALF_PRECISION or _slower_reason(tokens, head_dim) is not None:
        return False
    return hopper_unsupported_reason(device) is None


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
    gluon(
        "chipsparse.kernels.dense_attention_column_sums.gluon_sm90",
        OP,
        attention_unsupported_reason,
        not_auto=_not_auto_reason,
    ),
    Backend("library", lambda: library.dense_attention, library.unsupported_reason),
    Backend("reference", imported(f"{__name__}.reference", OP)),
)

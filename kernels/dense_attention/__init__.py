"""Full attention that also returns its log-sum-exp, through PyTorch's own kernels."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from chipsparse.kernels.calls import AttentionCall
from chipsparse.kernels.dense_attention import library
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.kernels.dispatch import Backend, Operation, imported

OP = "dense_attention"


@dataclass(slots=True, eq=False)
class DenseAttention(AttentionCall[tuple[torch.Tensor, torch.Tensor]]):
    """Softmax attention of every query row over every key, without mask or dropout.

    The log-sum-exp of a row is ``log Σ_j exp(scale · q_i · k_j)``, the softmax constant that
    FlashAttention (Dao et al., 2022) keeps for its backward pass.

    Args:
        query: ``[B, H, N, D]`` fp16, bf16, fp32 or fp64; any strides, such as a view of
            ``[B, N, H, D]``.
        key: ``[B, H, M, D]``, dtype and device of query.
        value: ``[B, H, M, D]``, likewise.
        scale: factor of the scores; None for ``D ** -0.5``.
        kernels: measures which library kernel is fastest for tensors of this kind, once, with the
            host waiting, and remembers it; None takes the first that can run.
        backend: forces ``library`` (cuDNN, flash or memory-efficient attention; flash on a CPU) or
            ``reference``; None takes the first that can run.

    Returns:
        The output ``[B, H, N, D]`` in query's dtype, and the natural log-sum-exp ``[B, H, N]`` in
        float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the forced backend cannot run.
    """

    _: KW_ONLY
    kernels: FastestKernel | None = None

    def facts(self) -> tuple[Any, ...]:
        """Query, key and value."""
        return self.query, self.key, self.value

    def check(self) -> None:
        """Raises ``ValueError`` where shapes, dtypes or devices do not fit."""
        self.check_attention(OP)


dense_attention = Operation(
    OP,
    DenseAttention,
    Backend("library", lambda: library.dense_attention, library.unsupported_reason),
    Backend("reference", imported(f"{__name__}.reference", OP)),
)

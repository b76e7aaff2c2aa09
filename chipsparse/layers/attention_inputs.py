"""The inputs of the attention of one layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention.measure import FastestKernel


@dataclass(frozen=True)
class AttentionInputs:
    """Query, key and value of a layer, and how its attention is computed.

    Attributes:
        query: ``[B, H, N, D]``.
        key: ``[B, H, M, D]``, as is value.
        value: as key.
        scale: factor of the scores, None for ``D ** -0.5``.
        backend: the kernel backend that is forced, or None.
        kernels: chooses the fastest library kernel for dense attention; None: PyTorch does.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float | None = None
    backend: str | None = None
    kernels: FastestKernel | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    def of_heads(self, heads: slice) -> AttentionInputs:
        """The same of some heads."""
        query, key, value = (each[:, heads] for each in self.tensors)
        return replace(self, query=query, key=key, value=value)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Full attention ``[B, H, N, D]``, and its log-sum-exp (LSE), float32 ``[B, H, N]``."""
        output, lse = dense_attention(
            *self.tensors, scale=self.scale, kernels=self.kernels, backend=self.backend
        )
        return output, lse

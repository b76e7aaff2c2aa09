"""Full attention of one layer: its inputs, and how it is computed in 16 and in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from chipsparse.config import ConfigError
from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.kernels.dispatch import Choice
from chipsparse.kernels.fp8_dense_attention import fp8_dense_attention
from chipsparse.kernels.fp8_quantization import Fp8Attention, fp8_quantization


@dataclass(frozen=True)
class AttentionInputs:
    """Query, key and value of a layer, and how its attention is computed."""

    query: torch.Tensor  # `[B, H, N, D]`
    key: torch.Tensor  # `[B, H, M, D]`, as is value
    value: torch.Tensor  # as key
    scale: float | None = None  # factor of the scores, None for `D ** -0.5`
    backend: str | None = None  # the kernel backend that is forced, or None
    kernels: FastestKernel | None = None  # chooses one for dense attention; None: PyTorch does

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    def of_heads(self, heads: slice) -> AttentionInputs:
        query, key, value = (tensor[:, heads] for tensor in self.tensors)
        return replace(self, query=query, key=key, value=value)

    def attend(self, *, in_fp8: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Full attention ``[B, H, N, D]``, and its log-sum-exp (LSE), float32 ``[B, H, N]``."""
        if in_fp8:
            output, lse, _ = fp8_dense_attention(self.rounded(), backend=self.backend)
        else:
            output, lse = dense_attention(
                *self.tensors,
                scale=self.scale,
                kernels=self.kernels,
                backend=self.backend,
            )
        return output, lse

    def rounded(self) -> Fp8Attention:
        """Query, key and value in 8 bits, rotated where the channels D are a power of two.

        Rotated, no single large channel decides about the error (benchmarks/notes/fp8.md).
        """
        head_dim = self.query.shape[-1]
        rotate = head_dim & (head_dim - 1) == 0
        return fp8_quantization(
            *self.tensors,
            rotate=rotate,
            scale=self.scale,
            backend=self.backend,
        )


def fp8_choices(inputs: AttentionInputs, *, block_size_q: int) -> dict[str, Choice]:
    """The backends of full attention in 8 bits; `ConfigError` where a GPU has only references."""
    query = inputs.query
    backend = inputs.backend
    of_blocks = query, query.dtype, block_size_q
    choices = {
        "fp8_quantization": fp8_quantization.choose(*inputs.tensors, backend=backend),
        "fp8_dense_attention": fp8_dense_attention.choose(*of_blocks, backend=backend),
    }
    if query.device.type == "cuda" and backend is None:
        for choice in choices.values():
            if choice.backend.name == "reference":
                _, reason = choice.rejected[-1]
                raise ConfigError(f"attention.precision fp8 cannot run here: {reason}")
    return choices

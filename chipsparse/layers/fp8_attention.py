"""Full attention of a layer in 8 bits."""

from __future__ import annotations

import torch

from chipsparse.config import ConfigError
from chipsparse.kernels.dispatch import Choice
from chipsparse.kernels.fp8_dense_attention import fp8_dense_attention
from chipsparse.kernels.fp8_quantization import Fp8Attention, fp8_quantization
from chipsparse.layers.attention_inputs import AttentionInputs


def fp8_choices(inputs: AttentionInputs, *, block_size_q: int) -> dict[str, Choice]:
    """The backend of each operation that full attention in 8 bits takes.

    Raises:
        ConfigError: there is none on this GPU or for these tensors but the references.
    """
    query, backend = inputs.query, inputs.backend
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


def fp8_tensors(inputs: AttentionInputs) -> Fp8Attention:
    """Query, key and value in 8 bits, rotated where the channels D are a power of two.

    Rotated, no single large channel decides about the error (benchmarks/notes/fp8.md).
    """
    head_dim = inputs.query.shape[-1]
    rotate = head_dim & (head_dim - 1) == 0
    return fp8_quantization(
        *inputs.tensors, rotate=rotate, scale=inputs.scale, backend=inputs.backend
    )


def fp8_full_attention(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[B, H, N, D]`` and LSE ``[B, H, N]`` of attention computed in 8 bits."""
    output, lse, _ = fp8_dense_attention(fp8_tensors(inputs), backend=inputs.backend)
    return output, lse

"""A dense first layer whose activation function is part of the matrix product."""

from __future__ import annotations

from typing import Any

import torch

from chipsparse.kernels.triton_support import HALF_PRECISION

# PyTorch's own, not public: cuBLASLt applies tanh GELU to the sums before they are rounded, which
# saves writing, reading and writing the neurons once more.
_addmm_activation: Any = getattr(torch, "_addmm_activation", None)


def can_fuse(
    hidden: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    gate_weight: torch.Tensor | None,
) -> bool:
    """Whether `dense_activation` computes such a layer."""
    return (
        _addmm_activation is not None
        and activation == "gelu-tanh"
        and gate_weight is None
        and bias is not None
        and hidden.is_cuda
        and torch.version.hip is None
        and hidden.dtype in HALF_PRECISION
        and not torch.is_grad_enabled()
    )


def dense_activation(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Tanh GELU of ``hidden @ weight.T + bias``: contiguous ``[B, N, F]`` for ``[B, N, C]``.

    `can_fuse` must be true.
    """
    activated: torch.Tensor = _addmm_activation(
        bias, hidden.flatten(0, 1), weight.t(), use_gelu=True
    )
    return activated.unflatten(0, hidden.shape[:2])

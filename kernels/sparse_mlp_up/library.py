"""A dense first layer whose activation function is part of the matrix product."""

from __future__ import annotations

from typing import Any

import torch

from chipsparse.kernels.sparse_mlp_up import DenseActivation, reference
from chipsparse.kernels.triton_support import HALF_PRECISION

# PyTorch's own, not public: cuBLASLt applies tanh GELU to the sums before they are rounded, which
# saves writing, reading and writing the neurons once more.
_addmm_activation: Any = getattr(torch, "_addmm_activation", None)


def dense_activation(call: DenseActivation) -> torch.Tensor:
    """Run a checked `DenseActivation`; the result is contiguous."""
    if not _can_fuse(call):
        return reference.dense_activation(call)
    tokens = call.hidden.flatten(0, 1)
    activated: torch.Tensor = _addmm_activation(call.bias, tokens, call.weight.t(), use_gelu=True)
    return activated.unflatten(0, call.hidden.shape[:2])


def _can_fuse(call: DenseActivation) -> bool:
    return (
        _addmm_activation is not None
        and call.activation == "gelu-tanh"
        and call.gate_weight is None
        and call.bias is not None
        and call.hidden.is_cuda
        and torch.version.hip is None
        and call.hidden.dtype in HALF_PRECISION
        and not torch.is_grad_enabled()
    )

"""Arguments that several operations have, and their checks."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

import torch

from chipsparse.kernels.checks import check_block_size, check_floating, check_shape
from chipsparse.kernels.dispatch import Call, R_co

Activation = Literal["gelu-tanh", "gelu", "silu"]


@dataclass(slots=True, eq=False)
class AttentionCall(Call[R_co]):
    """The arguments of every attention.

    Args:
        query: ``[B, H, N, D]`` fp16, bf16, fp32 or fp64, of any strides, such as a view of
            ``[B, N, H, D]``.
        key: ``[B, H, M, D]``, dtype and device of query, as is value.
        scale: factor of the scores; None for ``D ** -0.5``.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    _: KW_ONLY
    scale: float | None = None

    @property
    def softmax_scale(self) -> float:
        """The factor of the scores: ``D ** -0.5`` where none is given."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def check_attention(self) -> None:
        """Raises ``ValueError`` unless query, key and value fit."""
        query = self.query
        check_floating(query=query)
        if query.dim() != 4 or 0 in query.shape:
            raise ValueError(f"query must be a non-empty [B, H, N, D], got {list(query.shape)}")
        self.check_columns(key=self.key, value=self.value)

    def check_columns(self, **tensors: torch.Tensor) -> None:
        """Raises ``ValueError`` unless keys and then their values, by name, fit the query."""
        query = self.query
        name, key = next(iter(tensors.items()))
        if key.dim() != 4 or key.shape[2] == 0:
            raise ValueError(f"{name} must be a non-empty [B, H, M, D], got {list(key.shape)}")
        shape = *query.shape[:2], key.shape[2], query.shape[3]
        for name, tensor in tensors.items():
            check_shape(name, tensor, shape, query.dtype)
            if tensor.device != query.device:
                raise ValueError(f"{name} is on {tensor.device}, query on {query.device}")


@dataclass(slots=True, eq=False)
class FirstLayerCall(Call[R_co]):
    """Hidden tokens and the first layer of an MLP, with a gate or without.

    Args:
        hidden: ``[B, N, C]`` fp16, bf16, fp32 or fp64.
        weight: ``[F, C]``, dtype of hidden; read in place and never kept.
        bias: ``[F]`` or None.
        activation: activation function, as diffusers names it; with a gate, the gate's.
        gate_weight: ``[F, C]``, dtype of hidden, or None for an MLP without a gate.
        gate_bias: ``[F]`` or None.
        block_size: token rows per block; the last of the G = ceil(N / block_size) may be ragged.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    _: KW_ONLY
    activation: Activation | None = None
    gate_weight: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None
    block_size: int = 128

    def check_first_layer(self, *, activated: bool) -> None:
        """Raises ``ValueError`` unless all fit; ``activated`` where the activation is needed."""
        hidden = self.hidden
        weight = self.weight
        bias = self.bias
        check_block_size(block_size=self.block_size)
        check_floating(hidden=hidden)
        if hidden.dim() != 3:
            raise ValueError(f"hidden must be [B, N, C], got {list(hidden.shape)}")
        shape = *weight.shape[:1], hidden.shape[2]
        check_shape("weight", weight, shape, hidden.dtype)
        if bias is not None:
            check_shape("bias", bias, (weight.shape[0],))
        self._check_gate()
        if activated and self.activation not in get_args(Activation):
            raise ValueError(f"activation must be gelu-tanh, gelu or silu, got {self.activation!r}")

    def _check_gate(self) -> None:
        if self.gate_weight is None:
            if self.gate_bias is not None:
                raise ValueError("gate_bias needs gate_weight, which is None")
            return
        shape = tuple(self.weight.shape)
        check_shape("gate_weight", self.gate_weight, shape, self.weight.dtype)
        if self.gate_bias is not None:
            check_shape("gate_bias", self.gate_bias, (self.weight.shape[0],))

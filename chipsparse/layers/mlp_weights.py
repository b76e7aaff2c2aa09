"""The live weights of a feed-forward layer: those that sparse kernels read, and those in FP8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F

from chipsparse.kernels.calls import Activation
from chipsparse.kernels.dispatch import Choice
from chipsparse.kernels.fp8_dequantization import fp8_dequantization
from chipsparse.kernels.fp8_quantization import FP8
from chipsparse.kernels.sparse_mlp_up.reference import activate

Gate = Literal["none", "first", "second", "apart"]
# What linears in FP8 round.
Fp8Form = Literal["weights", "weights and inputs"]


@dataclass(frozen=True)
class MLPWeights:
    """The live weights of an MLP: ``h @ down.T + down_bias``.

    h is ``activation(x @ up.T + up_bias)``, or in a gated MLP
    ``activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias)``.

    Shapes: up and gate ``[F, C]``, up_bias and gate_bias ``[F]``, down ``[C, F]``, down_bias
    ``[C]``.
    """

    up: torch.Tensor
    up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    activation: Activation
    gate: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None

    @classmethod
    def from_linears(
        cls,
        up: torch.Tensor,
        up_bias: torch.Tensor | None,
        down: torch.Tensor,
        down_bias: torch.Tensor | None,
        activation: str,
        gate: str = "none",
        gate_weight: torch.Tensor | None = None,
        gate_bias: torch.Tensor | None = None,
    ) -> MLPWeights:
        """Views of two or three linear layers, as models store them.

        Args:
            up: ``[F, C]``; of a gated MLP ``[2 F, C]``, one half of which is the gate, unless that
                is ``apart``.
            up_bias: ``[F]`` or ``[2 F]``, or None.
            down: ``[C, F]``.
            down_bias: ``[C]`` or None.
            activation: one of `Activation`.
            gate: which half of ``up`` the gate is, ``first`` or ``second``, or ``none``; ``apart``
                where it is a linear of its own.
            gate_weight: ``[F, C]`` of that.
            gate_bias: ``[F]`` of that, or None.

        Raises:
            ValueError: if the activation or the gate is unknown.
        """
        if activation not in get_args(Activation) or gate not in get_args(Gate):
            raise ValueError(
                f"activation must be one of {', '.join(get_args(Activation))} and gate one of "
                f"{', '.join(get_args(Gate))}, got {activation!r} and {gate!r}"
            )
        kind: Activation = activation  # type: ignore[assignment]
        if gate in ("none", "apart"):
            return cls(up, up_bias, down, down_bias, kind, gate_weight, gate_bias)
        halves = list(up.chunk(2))
        biases = [None, None] if up_bias is None else list(up_bias.chunk(2))
        if gate == "first":
            halves.reverse()
            biases.reverse()
        return cls(halves[0], biases[0], down, down_bias, kind, halves[1], biases[1])

    def read(self, dtype: torch.dtype, *, backend: str | None) -> MLPWeights:
        """What sparse kernels read: these themselves."""
        return self

    def reading_choices(self, dtype: torch.dtype, *, backend: str | None) -> dict[str, Choice]:
        """The backends of what `read` computes: nothing."""
        return {}


@dataclass(frozen=True)
class Fp8MLPWeights:
    """The same of an MLP whose linears keep their weights in e4m3: torchao's ``Float8Tensor``.

    A linear of such a weight is computed by torchao, which rounds its input to e4m3 as well where
    it was told to; sparse kernels get the numbers by `read`.

    Attributes and shapes: see `MLPWeights.from_linears`; the weights are the model's own.
    """

    up: torch.Tensor
    up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    activation: Activation
    gate: Gate = "none"
    gate_weight: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None

    def neurons(self, hidden: torch.Tensor) -> torch.Tensor:
        """The activations ``[B, N, F]`` of hidden ``[B, N, C]``, as the model computes them."""
        up = F.linear(hidden, self.up, self.up_bias)
        if self.gate == "none":
            return activate(up, self.activation)
        if self.gate == "apart":
            assert self.gate_weight is not None
            gate = F.linear(hidden, self.gate_weight, self.gate_bias)
        else:
            up, gate = up.chunk(2, dim=-1)
            if self.gate == "first":
                up, gate = gate, up
        return activate(gate, self.activation) * up

    def output(self, neurons: torch.Tensor) -> torch.Tensor:
        """``[B, N, C]`` of activations ``[B, N, F]``, as the model computes it."""
        return F.linear(neurons, self.down, self.down_bias)

    def read(self, dtype: torch.dtype, *, backend: str | None) -> MLPWeights:
        """The numbers of the weights in a type that the sparse kernels read, laid out for them.

        They are made anew for every call: to read and write a weight once takes little beside what
        many tokens compute with it, and kernels of 16-bit numbers are the fastest there are.
        """

        def read(weight: torch.Tensor, *, turned: bool = False) -> torch.Tensor:
            numbers: Any = weight
            return fp8_dequantization(
                numbers.qdata, numbers.scale, dtype=dtype, turned=turned, backend=backend
            )

        return MLPWeights.from_linears(
            read(self.up),
            self.up_bias,
            read(self.down, turned=True),
            self.down_bias,
            self.activation,
            self.gate,
            None if self.gate_weight is None else read(self.gate_weight),
            self.gate_bias,
        )

    def reading_choices(self, dtype: torch.dtype, *, backend: str | None) -> dict[str, Choice]:
        """The backend of what `read` computes."""
        data: Any = self.down
        return {"fp8_dequantization": fp8_dequantization.choose(data.qdata, dtype, backend=backend)}


def fp8_form(weight: Any) -> Fp8Form | None:
    """What a linear rounds to FP8 whose weight `Fp8MLPWeights` may have; None of other weights.

    That is torchao's, in e4m3, with a scale for each row or one for all.
    """
    data, scale = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if type(weight).__name__ != "Float8Tensor" or data is None or scale is None:
        return None
    if data.dtype != FP8 or data.dim() != 2 or data.stride(1) != 1:
        return None
    if scale.dtype != torch.float32 or scale.shape not in ((data.shape[0], 1), (1, 1)):
        return None
    return "weights" if weight.act_quant_kwargs is None else "weights and inputs"

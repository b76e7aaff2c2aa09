"""The live weights of a feed-forward layer: those that sparse kernels read, and those in FP8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F

from chipsparse.kernels.calls import Activation
from chipsparse.kernels.dispatch import Choice
from chipsparse.kernels.fp8_dequantization import fp8_dequantization
from chipsparse.kernels.fp8_quantization import FP8
from chipsparse.kernels.fp8_rows import Fp8RowRounding, fp8_rows
from chipsparse.kernels.sparse_mlp_up.reference import activate
from chipsparse.kernels.triton_support import compute_capability, no_fp8_reason
from chipsparse.layout import Fp8Form

Float8Tensor: TypeAlias = Any  # torchao's class; torchao need not be installed
Gate = Literal["none", "first", "second", "apart"]
MULTIPLE = 16  # of a weight's rows and columns: what products in FP8 want
HOPPER = 9  # major compute capability


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
        up: torch.Tensor,  # `[F, C]`, or `[2 F, C]` where one half of it is the gate
        up_bias: torch.Tensor | None,  # `[F]` or `[2 F]`
        down: torch.Tensor,  # `[C, F]`
        down_bias: torch.Tensor | None,  # `[C]`
        activation: Activation,  # of the neurons, or of the gate
        gate: Gate = "none",  # half of `up` that it is; "apart" where it is a linear of its own
        gate_weight: torch.Tensor | None = None,  # `[F, C]` of that
        gate_bias: torch.Tensor | None = None,  # `[F]` of that
    ) -> MLPWeights:
        """Return views of two or three linear layers, as models store them."""
        if gate in ("none", "apart"):
            return cls(up, up_bias, down, down_bias, activation, gate_weight, gate_bias)
        halves = list(up.chunk(2))
        biases = [None, None] if up_bias is None else list(up_bias.chunk(2))
        if gate == "first":
            halves.reverse()
            biases.reverse()
        return cls(halves[0], biases[0], down, down_bias, activation, halves[1], biases[1])

    @staticmethod
    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return rows ``[..., K]`` through a linear ``[M, K]``, in 16 or 32 bits."""
        return F.linear(rows, weight, bias)

    def first_layer(
        self,
        hidden: torch.Tensor,
        block_size: int,
        backend: str | None,
    ) -> dict[str, Any]:
        """Return the arguments that a `FirstLayerCall` has of these weights."""
        return {
            "hidden": hidden,
            "weight": self.up,
            "bias": self.up_bias,
            "activation": self.activation,
            "gate_weight": self.gate,
            "gate_bias": self.gate_bias,
            "block_size": block_size,
            "backend": backend,
        }

    def read(self, dtype: torch.dtype, *, backend: str | None) -> MLPWeights:
        """Return itself: sparse kernels read these weights as they are."""
        return self

    def reading_choices(self, dtype: torch.dtype, *, backend: str | None) -> dict[str, Choice]:
        """Return no choice, as nothing converts these weights."""
        return {}


@dataclass(frozen=True)
class Fp8MLPWeights:
    """The same of an MLP whose linears keep their weights in e4m3: torchao's ``Float8Tensor``.

    A linear of such a weight computes what torchao does, which rounds its input to e4m3 as well
    where that was asked for (`fp8_linear`); sparse kernels get the numbers by `read`. The
    attributes are as for `MLPWeights.from_linears`: the model's own weights, or a `part_of` them.
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
        """Return the activations ``[B, N, F]`` of hidden ``[B, N, C]``, as the model does."""
        up = self.linear(hidden, self.up, self.up_bias)
        if self.gate == "none":
            return activate(up, self.activation)
        if self.gate_weight is not None:  # the gate is "apart"
            gate = self.linear(hidden, self.gate_weight, self.gate_bias)
        else:
            up, gate = up.chunk(2, dim=-1)
            if self.gate == "first":
                up, gate = gate, up
        return activate(gate, self.activation) * up

    @staticmethod
    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return rows ``[..., K]`` through a linear ``[M, K]`` as torchao computes it."""
        return fp8_linear(rows, weight, bias)

    def read(self, dtype: torch.dtype, *, backend: str | None) -> MLPWeights:
        """Return the weights in a type that the sparse kernels read, laid out for them.

        They are computed again in every call: to read and write a weight once takes little compared
        with what many tokens compute with it, and kernels of 16-bit numbers are the fastest.
        """

        def read(weight: torch.Tensor, *, turned: bool = False) -> torch.Tensor:
            numbers: Any = weight
            return fp8_dequantization(
                numbers.qdata,
                numbers.scale,
                dtype=dtype,
                turned=turned,
                backend=backend,
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
        """Return the backend that `read` converts the weights with, by op."""
        data: Any = self.down
        return {"fp8_dequantization": fp8_dequantization.choose(data.qdata, dtype, backend=backend)}


def fp8_form(weight: object) -> Fp8Form | None:
    """Return what a linear with a weight of torchao's rounds to FP8; None for other weights.

    Such a weight is in e4m3, with a scale for each row or one for all.
    """
    data = getattr(weight, "qdata", None)
    scale = getattr(weight, "scale", None)
    if type(weight).__name__ != "Float8Tensor" or data is None or scale is None:
        return None
    if data.dtype != FP8 or data.dim() != 2 or data.stride(1) != 1:
        return None
    if scale.dtype != torch.float32 or scale.shape not in ((data.shape[0], 1), (1, 1)):
        return None
    return "weights" if getattr(weight, "act_quant_kwargs", None) is None else "weights and inputs"


def part_of(
    weight: torch.Tensor,
    rows: slice = slice(None),
    columns: slice = slice(None),
) -> torch.Tensor:
    """Some rows or columns of a linear's weight, a view; also of one that has an `fp8_form`.

    Scales are those of rows or of all, so columns share them.
    """
    # Outside of compiled code, which cannot put them together, torchao's own slices fail in
    # inference mode.
    if fp8_form(weight) is None or torch.compiler.is_compiling():
        return weight[rows, columns]
    whole: Any = weight
    scale = whole.scale if len(whole.scale) == 1 else whole.scale[rows]
    return _remade(whole, whole.qdata[rows, columns], scale)


def _remade(weight: Float8Tensor, data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return such a weight with other numbers and scales."""
    _, facts = weight.__tensor_flatten__()
    facts = {**facts, "block_size": list(map(min, weight.block_size, data.shape))}
    parts = {"qdata": data, "scale": scale}
    made: torch.Tensor = type(weight).__tensor_unflatten__(parts, facts, data.shape, None)
    return made


def fp8_linear(rows: torch.Tensor, weight: Float8Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``rows @ weight.T + bias`` ``[..., R]`` of rows ``[..., K]``, as torchao computes it.

    Where both are rounded by rows and a kernel can, rows are rounded in one pass. torchao takes ten
    outside of compiled code, for longer than the product at a video's length.
    """
    if not _rounds_by_rows(weight, rows.dtype) or no_fp8_reason(rows.device) is not None:
        return _by_torchao(rows, weight, bias)
    flat = rows.flatten(0, -2)
    call = Fp8RowRounding(flat if flat.stride(-1) == 1 else flat.contiguous())
    kernel = fp8_rows.choose(call.rows).backend
    if kernel.name == "reference":
        return _by_torchao(rows, weight, bias)
    data, scale = kernel.launch(call)
    numbers = weight.qdata if _multiplies_strided(rows.device) else weight.qdata.contiguous()
    product: torch.Tensor = torch._scaled_mm(
        data,
        numbers.t(),
        scale_a=scale,
        scale_b=weight.scale.t(),
        bias=bias,
        out_dtype=rows.dtype,
        use_fast_accum=weight.mm_config.use_fast_accum,
    )
    unflattened: torch.Tensor = product.unflatten(0, rows.shape[:-1])
    return unflattened


def _by_torchao(
    rows: torch.Tensor,
    weight: Float8Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The linear itself, of contiguous rows: torchao may have other libraries multiply."""
    if not weight.qdata.is_contiguous():
        weight = _remade(weight, weight.qdata.contiguous(), weight.scale)
    return F.linear(rows, weight, bias)


def _multiplies_strided(device: torch.device) -> bool:
    """Return True where PyTorch's products by rows look at the strides of a weight.

    Those for Hopper do. The kernel for Ada does not, and gives wrong numbers without a word.
    """
    return device.type != "cuda" or compute_capability(device)[0] == HOPPER


def _rounds_by_rows(weight: Float8Tensor, dtype: torch.dtype) -> bool:
    """Return True where torchao rounds inputs and weight by rows and does nothing else to them."""
    inputs = weight.act_quant_kwargs
    product = weight.mm_config
    return (
        inputs is not None
        and type(inputs.granularity).__name__ == "PerRow"
        and inputs.granularity.dim == -1
        and inputs.float8_dtype == FP8
        and inputs.hp_value_lb is inputs.hp_value_ub is None
        and product is not None
        and not product.pad_inner_dim
        and weight.scale.shape == (weight.qdata.shape[0], 1)
        and not any(size % MULTIPLE for size in weight.qdata.shape)
        and dtype == torch.bfloat16  # PyTorch's product by rows gives no other
    )

"""The sparse MLP on weights in FP8 as the benchmark runs it, against linears in FP8.

A sparse step reads the weights first, which is part of its time. The baseline rounds the inputs of
both linears by rows as torchao does, compiled on a GPU, and multiplies with PyTorch's own product
in FP8; on a CPU, where that wants whole tiles, it multiplies the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.case_tensors import CaseTensors
from benchmarks.kernel_work import Settings, TimedCall, Work
from benchmarks.mlp_ops import WHOLE, Layer, all_three, make_layer, select
from benchmarks.sampled_checks import Errors, relative_error, require
from chipsparse.kernels.fp8_dequantization import fp8_dequantization
from chipsparse.kernels.fp8_quantization import FP8, LARGEST_FP8
from chipsparse.kernels.fp8_rows import fp8_rows

ROUNDING_LIMIT = 4e-2  # of normal numbers: half of an eighth at most


@dataclass(frozen=True)
class Fp8Layer(Layer):
    """A layer whose weights are what these numbers in e4m3 say, with a scale for each row.

    Shapes: up8 ``[F, C]``, up_scale ``[F, 1]``, down8 ``[C, F]``, down_scale ``[C, 1]``.
    """

    up8: torch.Tensor
    up_scale: torch.Tensor
    down8: torch.Tensor
    down_scale: torch.Tensor

    def read(self, backend: str) -> Layer:
        """With its weights read anew."""
        readers = {each.name for each in fp8_dequantization.backends}
        name = backend if backend in readers else "triton"
        read = partial(fp8_dequantization, dtype=self.hidden.dtype, backend=name)
        return replace(
            self,
            up=read(self.up8, self.up_scale),
            down=read(self.down8, self.down_scale, turned=True),
        )


def rounded_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[M, K]`` in e4m3, and float32 scales ``[M, 1]`` that give them back."""
    largest = rows.abs().amax(-1, keepdim=True).float()
    scale = largest.clamp(min=1e-12) / LARGEST_FP8
    return (rows.float() / scale).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8), scale


def make_fp8_layer(tensors: CaseTensors, settings: Settings) -> Fp8Layer:
    """As `make_layer`, with rounded weights."""
    layer = make_layer(tensors, settings)
    up8, up_scale = rounded_rows(layer.up)
    down8, down_scale = rounded_rows(layer.down.contiguous())
    own = {each.name: getattr(layer, each.name) for each in fields(layer)}
    found = Fp8Layer(**own, up8=up8, up_scale=up_scale, down8=down8, down_scale=down_scale)
    read = found.read("reference")
    found = replace(found, up=read.up, down=read.down)
    # What is listed is chosen by the numbers of the weights.
    return replace(found, neurons=select(replace(found, mean=found.mean.clone()), "reference"))


def reading_and_all_three(layer: Layer) -> Callable[[str], torch.Tensor]:
    """The weights' numbers, selection, up and down."""
    assert isinstance(layer, Fp8Layer)
    return lambda name: all_three(layer.read(name))(name)


def linears_in_fp8(layer: Layer) -> Callable[[], torch.Tensor]:
    """Two linears and the activation, inputs rounded by rows."""
    assert isinstance(layer, Fp8Layer)
    round_rows: Any = rounded_rows
    if layer.hidden.is_cuda:
        round_rows = torch.compile(rounded_rows, dynamic=False)

    def linear(
        inputs: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        numbers, input_scale = round_rows(inputs)
        if not inputs.is_cuda:
            wide = (numbers.float() * input_scale, data.float() * scale)
            return F.linear(*wide, None if bias is None else bias.float()).to(inputs.dtype)
        return torch._scaled_mm(
            numbers,
            data.t(),
            scale_a=input_scale,
            scale_b=scale.t(),
            bias=bias,
            out_dtype=inputs.dtype,
            use_fast_accum=True,
        )

    def call() -> torch.Tensor:
        tokens = layer.hidden.flatten(0, 1)
        neurons = linear(tokens, layer.up8, layer.up_scale, layer.up_bias)
        neurons = F.gelu(neurons, approximate="tanh")
        output = linear(neurons, layer.down8, layer.down_scale, None)
        return output.unflatten(0, layer.hidden.shape[:2])

    return call


def rounding(tensors: CaseTensors, settings: Settings) -> Work:
    """`fp8_rows` of all neurons of a layer, against PyTorch's operations one by one."""
    case, generator = tensors.case, torch.Generator(tensors.device).manual_seed(4)
    shape = case.batch * case.mlp_rows, case.mlp_width
    rows = torch.randn(shape, generator=generator, device=tensors.device, dtype=tensors.dtype)

    def call(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        found = fp8_rows(rows, backend=name)
        return found.data.view(torch.uint8), found.scale

    def compare(result: tuple[torch.Tensor, torch.Tensor], row: int) -> Errors:
        found = result[0][row].view(FP8).float() * result[1][row]
        error = relative_error(found, rows[row].float())
        return {"rel_error": require("relative error", error, ROUNDING_LIMIT, row)}

    timed = TimedCall(
        call,
        compare,
        (0, shape[0] // 2, shape[0] - 1),
        lambda: rounded_rows(rows),
    )
    return Work(
        fp8_rows,
        (rows,),
        lambda: iter((timed,)),
        baseline="rounded by PyTorch",
        fields={"density": 1.0},
        moved_bytes=rows.numel() * (rows.element_size() + 1),
    )


OPS: dict[str, Callable[[CaseTensors, Settings], Work]] = {
    "fp8_rows": rounding,
    "fp8_mlp": replace(
        WHOLE,
        call_on=reading_and_all_three,
        baseline="two linears in FP8 and GELU",
        baseline_on=linears_in_fp8,
        make=make_fp8_layer,
    ),
}

"""Linears in FP8, as users of diffusers' ``TorchAoConfig`` have them: weights and inputs in e4m3.

Both have a scale for each row. Linears whose sizes are no multiples of 16 stay as they are, which
torchao leaves out.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

MULTIPLE = 16


def to_fp8(transformer: Any, blocks: Sequence[str]) -> None:
    """Rounds the linears in these lists of blocks in place, one after the other.

    Args:
        transformer: on a GPU in bfloat16; on a CPU, which torchao refuses, the same tensors are
            put together by hand.
        blocks: names of its lists.

    Raises:
        ModuleNotFoundError: torchao is not installed.
    """
    quantization = importlib.import_module("torchao.quantization")
    rows = quantization.PerRow()
    on_gpu = transformer.device.type == "cuda"
    for linear in linears(transformer, blocks):
        if on_gpu:
            # Kernels around the products are compiled as everywhere else: torchao would also tune
            # each of them, for minutes.
            config = quantization.Float8DynamicActivationFloat8WeightConfig(
                granularity=rows, set_inductor_config=False
            )
            quantization.quantize_(linear, config)
        else:
            weight = rounded(linear.weight.data, rows)
            linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    if on_gpu:
        torch.cuda.empty_cache()  # the weights before: others do not fit into their places


def linears(transformer: Any, blocks: Sequence[str]) -> list[torch.nn.Linear]:
    """Those of the blocks that can be rounded."""
    return [
        module
        for name in blocks
        for module in getattr(transformer, name).modules()
        if isinstance(module, torch.nn.Linear)
        and module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0
    ]


def rounded(weight: torch.Tensor, rows: Any) -> torch.Tensor:
    """What torchao's config makes of a weight ``[F, C]``."""
    tensors = importlib.import_module(
        "torchao.quantization.quantize_.workflows.float8.float8_tensor"
    )
    inference = importlib.import_module("torchao.float8.inference")
    found: torch.Tensor = tensors.Float8Tensor.from_hp(
        weight,
        granularity=rows,
        mm_config=inference.Float8MMConfig(use_fast_accum=True),
        act_quant_kwargs=tensors.QuantizeTensorToFloat8Kwargs(granularity=rows),
    )
    return found

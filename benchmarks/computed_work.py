"""Multiply-adds that a transformer really does, whatever patched it: the measure without noise.

Counted are matrix products and attention, as PyTorch runs them. Of a sparse layer on a CPU these
are the products of the references: kept columns and neurons only, what a refresh does besides the
dense attention, and the choice of neurons; norms, activations and copies count nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chipsparse.layers.attention import AttentionLayer
from chipsparse.layers.mlp import MLPLayer

aten = torch.ops.aten
# Which argument of a matrix product is summed over, along its last axis. The first two appear by
# these names only inside custom operations; elsewhere PyTorch takes them apart before.
SUMMED = {
    **{aten.linear: 0, aten.matmul: 0},
    **{aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1},
    aten._scaled_mm: 0,  # of linears in FP8
}
ATTENTION = "scaled_dot_product"


class WorkCounter(TorchDispatchMode):
    """Adds up the work of one module's calls, where it is entered around them.

    Attributes:
        multiply_adds: so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.multiply_adds = 0
        self._open_calls = 0

    @contextmanager
    def of(self, module: torch.nn.Module) -> Iterator[WorkCounter]:
        """Counts the calls of a module from 0 on, also one that gives its last output again."""
        self.multiply_adds = self._open_calls = 0
        hooks = [
            module.register_forward_pre_hook(self._call_begins),
            module.register_forward_hook(self._call_ends, always_call=True),
        ]
        try:
            with self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    # A session's `LayerObserver`: layers run inside custom operations, and PyTorch shows nothing of
    # what these call.

    def attention(self, layer: AttentionLayer, *args: Any, **options: Any) -> torch.Tensor:
        with self:
            return layer(*args, **options)

    def mlp(self, layer: MLPLayer, *args: Any, **options: Any) -> torch.Tensor:
        with self:
            return layer(*args, **options)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._open_calls:
            self.multiply_adds += _multiply_adds(func, args, result)
        return result

    def _call_begins(self, *_: Any) -> None:
        self._open_calls += 1

    def _call_ends(self, *_: Any) -> None:
        self._open_calls -= 1


def _multiply_adds(func: Any, args: tuple[Any, ...], result: Any) -> int:
    if (place := SUMMED.get(func.overloadpacket)) is not None:
        return result.numel() * args[place].shape[-1]
    if ATTENTION in func.name():
        query, key, value = (tensor.shape for tensor in args[:3])
        return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return 0

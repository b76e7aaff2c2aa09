"""Multiply-adds of a generation: those of matrix products and attention.

`WorkCounter` sees every product that PyTorch runs, but slows a GPU down and sees no compiled code.
So `DenseWork` counts one short dense generation by it, module by module; after that calls are
counted, and the report says what sparse layers left out. Norms, activations, copies and skipped
calls count nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chipsparse.cost_model.layer_times import kept_columns
from chipsparse.kernels.checks import block_count
from chipsparse.layers.attention import AttentionLayer
from chipsparse.layers.mlp import MLPLayer
from chipsparse.plan import Action, SparsityPlan
from chipsparse.report.generation import GenerationReport, LayerRecord

aten = torch.ops.aten
# Which argument of a matrix product is summed over, along its last axis. The first two appear by
# these names only inside custom operations; elsewhere PyTorch takes them apart before.
SUMMED = {
    **{aten.linear: 0, aten.matmul: 0},
    **{aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1},
    aten._scaled_mm: 0,  # of linears in FP8
}
# The names of self-attention in blocks.
ATTENTION = ("attn1", "attn")


class WorkCounter(TorchDispatchMode):
    """Adds up the work of one module's calls, where it is entered around them.

    It is also a session's observer: layers run inside custom operations, and PyTorch shows nothing
    of what these call.

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
        begins, ends = (lambda *_, n=number: self._opened(n) for number in (1, -1))
        hooks = [
            module.register_forward_pre_hook(begins),
            module.register_forward_hook(ends, always_call=True),
        ]
        try:
            with self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()

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
        if not self._open_calls:
            return result
        if (place := SUMMED.get(func.overloadpacket)) is not None:
            self.multiply_adds += result.numel() * args[place].shape[-1]
        elif "scaled_dot_product" in func.name():
            query, key, value = (tensor.shape for tensor in args[:3])
            self.multiply_adds += math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
        return result

    def _opened(self, number: int) -> None:
        self._open_calls += number


def blocks_of(transformer: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that diffusers compiles and caches, in order."""
    names: Any = transformer._repeated_blocks or ()
    return [module for module in transformer.modules() if type(module).__name__ in names]


def attention_of(block: torch.nn.Module) -> torch.nn.Module:
    """The self-attention of a block.

    Raises:
        ValueError: it has none of a known name.
    """
    for name in ATTENTION:
        if (attention := getattr(block, name, None)) is not None:
            return attention
    raise ValueError(f"{type(block).__name__} has no {' or '.join(ATTENTION)}")


@dataclass(frozen=True)
class DenseWork:
    """Multiply-adds of a dense transformer call and of its parts.

    Attributes:
        call: all of it.
        parts: of each block without its self-attention, of each self-attention, and of the last
            linear: what caches pass over.
    """

    call: float
    parts: dict[torch.nn.Module, float]

    @classmethod
    def measured(cls, transformer: Any, generate: Callable[[], object]) -> DenseWork:
        """Counts the calls of a generation; nothing of the transformer may be compiled."""
        counter, calls, open_at = WorkCounter(), 0, dict[torch.nn.Module, int]()
        spent: Counter[torch.nn.Module] = Counter()

        def begin(module: torch.nn.Module, *_: Any) -> None:
            open_at[module] = counter.multiply_adds

        def end(module: torch.nn.Module, *_: Any) -> None:
            nonlocal calls
            calls += module is transformer
            spent[module] += counter.multiply_adds - open_at[module]

        blocks = blocks_of(transformer)
        attentions = [attention_of(block) for block in blocks]
        modules = [transformer, *blocks, *attentions, transformer.proj_out]
        hooks = [module.register_forward_pre_hook(begin) for module in modules]
        hooks += [module.register_forward_hook(end) for module in modules]
        try:
            with counter.of(transformer):
                generate()
        finally:
            for hook in hooks:
                hook.remove()
        for block, attention in zip(blocks, attentions, strict=True):
            spent[block] -= spent[attention]
        parts = {module: spent[module] / calls for module in modules[1:]}
        return cls(counter.multiply_adds / calls, parts)

    def of_calls(self, made: Counter[torch.nn.Module], calls: int) -> float:
        """The work of so many transformer calls in which these parts were computed so often."""
        outside = self.call - sum(self.parts.values())
        return calls * outside + sum(self.parts[part] * count for part, count in made.items())

    def of_report(self, report: GenerationReport) -> float:
        """The work of a generation of ours."""
        computed = [step for step in report.steps if step.action is not Action.SKIP]
        return len(computed) * self.call + sum(
            _more_than_dense(layer, report.plans[step.transformer])
            for step in computed
            for layer in step.layers
        )


def _more_than_dense(layer: LayerRecord, plan: SparsityPlan) -> float:
    """The work of one layer's part beyond the dense one; below zero where it did less."""
    layout, is_sparse = plan.layout, layer.action is Action.SPARSE
    if layer.reason is not None:
        return 0.0
    if layer.part == "attention":
        dense = 2.0 * layout.batch * len(layout.query_rows) * layout.tokens * layout.channels
        if is_sparse:
            return dense * (layer.kept - 1)
        if layer.action is not Action.REFRESH:
            return 0.0
        # Column sums, and the residual, which is what the kept columns lack.
        kept = kept_columns(plan, layer.layer) / layout.tokens * dense
        return dense / (2 * layout.head_dim) + kept
    kind, tokens = layout.kind(layer.layer), layout.mlp_tokens(layer.layer)
    width = layout.width * kind.intermediate_size
    dense = float(layout.batch * tokens * width * kind.mlp_linears)
    blocks = layout.batch * block_count(tokens, plan.config.block_size)
    means = float(blocks * width * (kind.mlp_linears - 1))  # neurons are chosen by block means
    return means + dense * (layer.kept - 1 if is_sparse else 0)

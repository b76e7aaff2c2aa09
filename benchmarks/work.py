"""Multiply-adds of a generation: those of matrix products, convolutions and attention.

PyTorch's counter sees every product, but slows a GPU down and sees no compiled code. So `DenseWork`
counts one short dense generation by it, module by module; after that calls are counted, and the
report says what sparse layers left out. Norms, activations, copies and skipped calls count nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from chipsparse.kernels.checks import block_count
from chipsparse.report.generation import GenerationReport, LayerRecord
from chipsparse.sparse.cost_model.layer_times import kept_columns
from chipsparse.sparse.plan import Action, SparsityPlan

# Attention on a CPU, which PyTorch's counter leaves out.
ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)
    ),
}


def blocks_of(transformer: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that diffusers compiles and caches, in order."""
    names: Any = transformer._repeated_blocks or ()
    return [module for module in transformer.modules() if type(module).__name__ in names]


def attention_of(block: Any) -> torch.nn.Module:
    """The self-attention of a block of Wan or FLUX."""
    attention: torch.nn.Module = block.attn1 if hasattr(block, "attn1") else block.attn
    return attention


@dataclass(frozen=True)
class DenseWork:
    """Multiply-adds of a dense transformer call and of its parts."""

    call: float  # all of it
    # Of each block without its self-attention, of each self-attention, and of the last linear: what
    # caches pass over.
    parts: dict[torch.nn.Module, float]

    @classmethod
    def measured(cls, transformer: Any, generate: Callable[[], object]) -> DenseWork:
        """Counts the calls of a generation; nothing of the transformer may be compiled."""
        calls: list[int] = []
        hook = transformer.register_forward_pre_hook(lambda *_: calls.append(1))
        try:
            with FlopCounterMode(display=False, custom_mapping=ON_CPU) as counter:
                generate()
        finally:
            hook.remove()
        root = type(transformer).__name__
        flops = counter.get_flop_counts()
        names = {module: f"{root}.{name}" for name, module in transformer.named_modules()}
        names[transformer] = root

        def of_call(module: torch.nn.Module) -> float:
            return sum(flops[names[module]].values()) / 2 / len(calls)

        parts = {transformer.proj_out: of_call(transformer.proj_out)}
        for block in blocks_of(transformer):
            attention = attention_of(block)
            parts[attention] = of_call(attention)
            parts[block] = of_call(block) - parts[attention]
        return cls(of_call(transformer), parts)

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
    layout = plan.layout
    is_sparse = layer.action is Action.SPARSE
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
    kind = layout.kind(layer.layer)
    tokens = layout.mlp_tokens(layer.layer)
    width = layout.width * kind.intermediate_size
    dense = float(layout.batch * tokens * width * kind.mlp_linears)
    blocks = layout.batch * block_count(tokens, plan.config.block_size)
    means = float(blocks * width * (kind.mlp_linears - 1))  # neurons are chosen by block means
    return means + dense * (layer.kept - 1 if is_sparse else 0)

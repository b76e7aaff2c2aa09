"""Multiply-adds of a generation, from what was called and kept.

A dispatch mode sees every product, but slows a GPU down and sees nothing of compiled code. So one
short dense generation is counted by it, module by module; after that the calls are counted, and the
report says what sparse layers left out. Matrix products and attention count; norms, activations and
copies count nothing. A skipped call counts nothing either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.computed_work import WorkCounter
from chipsparse.cost_model.layer_times import kept_columns
from chipsparse.kernels.checks import block_count
from chipsparse.plan import Action, SparsityPlan
from chipsparse.report.generation import GenerationReport, LayerRecord

# What blocks call their self-attention.
ATTENTION = ("attn1", "attn")


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
        if (found := getattr(block, name, None)) is not None:
            return found
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
        found = {module: count / calls for module, count in spent.items()}
        return cls(counter.multiply_adds / calls, {m: found[m] for m in modules[1:]})

    def of_calls(self, made: Counter[torch.nn.Module], calls: int) -> float:
        """Of so many transformer calls in which these parts were computed so often."""
        outside = self.call - sum(self.parts.values())
        return calls * outside + sum(self.parts[part] * count for part, count in made.items())

    def of_report(self, report: GenerationReport) -> float:
        """Of a generation of ours."""
        computed = [step for step in report.steps if step.action is not Action.SKIP]
        return len(computed) * self.call + sum(
            _more_than_dense(layer, report.plans[step.transformer])
            for step in computed
            for layer in step.layers
        )


def counted(
    module: torch.nn.Module, forward: Callable[..., Any], made: Counter[torch.nn.Module]
) -> Callable[..., Any]:
    """A forward that adds its calls to what was made of the module.

    It has none of the attributes of the other: by those of a compiled one PyTorch would find what
    that compiles, and pass over hooks on top of this one.
    """

    def counting(*args: Any, **kwargs: Any) -> Any:
        made[module] += 1
        return forward(*args, **kwargs)

    return counting


def _more_than_dense(layer: LayerRecord, plan: SparsityPlan) -> float:
    """What one layer's part did beyond the dense one; below zero where it did less."""
    if layer.reason is not None:
        return 0.0
    return _attention(layer, plan) if layer.part == "attention" else _mlp(layer, plan)


def _attention(layer: LayerRecord, plan: SparsityPlan) -> float:
    layout = plan.layout
    dense = 2.0 * layout.batch * len(layout.query_rows) * layout.tokens * layout.channels
    if layer.action is Action.SPARSE:
        return dense * (layer.kept - 1)
    if layer.action is not Action.REFRESH:
        return 0.0
    sums = dense / (2 * layout.head_dim)
    # The residual is what the kept columns lack.
    return sums + kept_columns(plan, layer.layer) / layout.tokens * dense


def _mlp(layer: LayerRecord, plan: SparsityPlan) -> float:
    layout, kind = plan.layout, plan.layout.kind(layer.layer)
    tokens, width = layout.mlp_tokens(layer.layer), layout.width * kind.intermediate_size
    dense = float(layout.batch * tokens * width * kind.mlp_linears)
    blocks = layout.batch * block_count(tokens, plan.config.mlp.block_size)
    means = float(blocks * width * (kind.mlp_linears - 1))  # neurons are chosen by block means
    return means + dense * (layer.kept - 1 if layer.action is Action.SPARSE else 0)

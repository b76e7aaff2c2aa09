"""Multiply-adds of a generation: those of matrix products, convolutions and attention.

PyTorch's counter sees every product, but slows a GPU down. So `DenseWork` counts one short dense
generation by it, module by module; after that calls are counted. Norms, activations, copies and
skipped calls count nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

# Attention on a CPU, which PyTorch's counter leaves out.
ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)
    ),
}


def blocks_of(transformer: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that diffusers caches, in order."""
    names: Any = transformer._repeated_blocks or ()
    return [module for module in transformer.modules() if type(module).__name__ in names]


@dataclass(frozen=True)
class DenseWork:
    """Multiply-adds of a dense transformer call and of its parts.

    Attributes:
        call: all of it.
        parts: of each block and of the last linear, which caches pass over.
    """

    call: float
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

        passed_over = [transformer.proj_out, *blocks_of(transformer)]
        return cls(of_call(transformer), {module: of_call(module) for module in passed_over})

    def of_calls(self, made: Counter[torch.nn.Module], calls: int) -> float:
        """The work of n transformer calls, of which these parts were computed so often."""
        outside = self.call - sum(self.parts.values())
        return calls * outside + sum(self.parts[part] * count for part, count in made.items())

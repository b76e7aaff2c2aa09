"""Looks at the attention of a model while it generates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any

import torch

from benchmarks.clips import Workload
from benchmarks.records import Record, environment
from chipsparse import SparsityConfig
from chipsparse.layers.attention import AttentionLayer, Unpatched
from chipsparse.layers.mlp import MLPLayer
from chipsparse.layers.state import StepState
from chipsparse.session import Session

EVERY = 12  # so many steps one is probed
# Figures by name, of query, key, value, the model's own output and the scale of the scores (None
# for ``D ** -0.5``); all tensors are ``[B, H, N, D]``.
Look = Callable[..., dict[str, float]]


class _Probe:
    """A session's `LayerObserver` that computes what the model does, and looks at some steps."""

    def __init__(self, look: Look, steps: frozenset[int]) -> None:
        self._look, self._steps = look, steps
        self.found: dict[tuple[int, int], list[dict[str, float]]] = defaultdict(list)

    def attention(
        self,
        layer: AttentionLayer,
        state: StepState,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None,
        unpatched: Unpatched,
    ) -> torch.Tensor:
        output = unpatched(query, key, value, scale)
        step = state.context.step
        if step in self._steps:
            figures = self._look(query, key, value, output, scale=scale)
            self.found[layer.number, step].append(figures)
        return output

    def mlp(self, layer: MLPLayer, *args: Any, **options: Any) -> torch.Tensor:
        return layer(*args, **options)


def probed(
    op: str, workload: Workload, config: SparsityConfig, look: Look, settings: dict[str, Any]
) -> list[Record]:
    """A record for each layer and probed step of a dense generation: means over its calls.

    Args:
        op: of the records.
        workload: model and prompts.
        config: one in which attention is patched.
        look: what is measured at every twelfth step and at the last.
        settings: of the generation, where they are not the profile's.
    """
    from chipsparse.api import attach  # needs diffusers

    steps = workload.settings(**settings).get("num_inference_steps", 50)
    probe = _Probe(look, frozenset(range(0, steps, EVERY)) | {steps - 1})
    with attach(workload.pipe, config, partial(Session, observer=probe)):
        workload.generate(None, **settings)
    return [
        {
            "op": op,
            "case": f"layer {layer}, step {step}",
            "layer": layer,
            "step": step,
            **{name: fmean(each[name] for each in figures) for name in figures[0]},
            **environment(workload.device),
        }
        for (layer, step), figures in sorted(probe.found.items())
    ]

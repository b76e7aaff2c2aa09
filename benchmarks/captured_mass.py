"""How much softmax mass the heaviest columns of each query block capture, by layer and step."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from typing import Any

import torch

from benchmarks.clips import Workload
from benchmarks.records import Record, environment
from benchmarks.run import Run
from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention_column_sums import dense_attention_column_sums
from chipsparse.layers.attention import AttentionLayer, Unpatched
from chipsparse.layers.mlp import MLPLayer
from chipsparse.layers.state import StepState
from chipsparse.pipelines.denoising_loop import DenoisingLoop
from chipsparse.report.generation import GenerationReport
from chipsparse.session import Session
from chipsparse.step import PositionTracker

FRACTIONS = (0.05, 0.1, 0.2)
EVERY = 12  # so many steps one is probed
COLUMNS = {"case": "", **{f"top_{fraction:.0%}": ".3f" for fraction in FRACTIONS}}


class MassProbe:
    """Computes attention densely and measures the column sums at some steps.

    Args:
        block_size_q: query rows that share their columns.
        steps: at which it measures.

    Attributes:
        mass: by layer and step, of each call: the share of the mass in each of `FRACTIONS`.
    """

    def __init__(self, block_size_q: int, steps: frozenset[int]) -> None:
        self._block_size_q = block_size_q
        self._steps = steps
        self.mass: dict[tuple[int, int], list[list[float]]] = defaultdict(list)

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
        """See `LayerObserver`."""
        step = state.context.step
        if step not in self._steps:
            return unpatched(query, key, value, scale)
        output, lse = dense_attention(query, key, value, scale=scale)
        _, _, sums = dense_attention_column_sums(
            query, key, value, lse, block_size_q=self._block_size_q, scale=scale
        )
        ranked = sums.sort(-1, descending=True).values.cumsum(-1)
        share = ranked / ranked[..., -1:]
        counts = [max(1, round(fraction * key.shape[2])) for fraction in FRACTIONS]
        self.mass[layer.number, step].append([share[..., n - 1].mean().item() for n in counts])
        return output

    def mlp(self, layer: MLPLayer, *args: Any, **options: Any) -> torch.Tensor:
        """See `LayerObserver`."""
        return layer(*args, **options)


def run(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds one record per layer and probed step of a dense generation."""
    with to.attempt("captured_mass"):
        to.add(*measure(Workload.of(args, device, dtype)))


def measure(workload: Workload) -> list[Record]:
    """The records of a model; every few steps are probed, and the last one."""
    from chipsparse.pipelines.registry import ADAPTERS  # needs diffusers

    pipe: Any = workload.pipe
    steps = workload.settings().get("num_inference_steps", 50)
    probed = frozenset(range(0, steps, EVERY)) | {steps - 1}
    config = workload.profile.sparsity.override(
        {"mlp.enabled": False, "schedule.actions": ["dense", "refresh", "sparse"]}
    )
    probe = MassProbe(config.attention.block_size_q, probed)
    session = Session(config, GenerationReport(), observer=probe)
    adapter = ADAPTERS[type(pipe.transformer).__name__](
        pipe.transformer, session, PositionTracker(), DenoisingLoop(pipe)
    )
    try:
        workload.generate(None, num_inference_steps=steps)
    finally:
        adapter.remove()
    records = []
    for (layer, step), values in sorted(probe.mass.items()):
        mean = torch.tensor(values).mean(0).tolist()
        named = {f"top_{f:.0%}": value for f, value in zip(FRACTIONS, mean, strict=True)}
        case = {"case": f"layer {layer}, step {step}", "layer": layer, "step": step}
        records.append({"op": "captured_mass", **case, **named, **environment(workload.device)})
    return records

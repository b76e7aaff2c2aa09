"""How much softmax mass the heaviest columns of each query group capture, by layer and step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.clips import Workload
from benchmarks.records import Record, environment
from chipsparse.config import SparsityConfig
from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention_column_sums import dense_attention_column_sums
from chipsparse.report.generation import GenerationReport
from chipsparse.session import Session
from chipsparse.step import PositionTracker

FRACTIONS = (0.05, 0.1, 0.2)
COLUMNS = {"case": "", **{f"top_{fraction:.0%}": ".3f" for fraction in FRACTIONS}}


class MassProbe(Session):
    """A session that computes everything densely and measures the column sums on the way."""

    def __init__(self, config: SparsityConfig, steps: frozenset[int]) -> None:
        super().__init__(config, GenerationReport())
        self._probed_steps = steps
        self.mass: dict[tuple[int, int], list[list[float]]] = defaultdict(list)

    def attention(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None,
        unpatched: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        _, context, _ = self._open_call()
        if context.step not in self._probed_steps:
            return unpatched()
        output, lse = dense_attention(query, key, value, scale=scale)
        rows = self.config.attention.block_size_q
        _, _, sums = dense_attention_column_sums(
            query, key, value, lse, group_rows=rows, scale=scale
        )
        ranked = sums.sort(-1, descending=True).values.cumsum(-1)
        share = ranked / ranked[..., -1:]
        counts = [max(1, round(fraction * key.shape[2])) for fraction in FRACTIONS]
        self.mass[layer, context.step].append([share[..., n - 1].mean().item() for n in counts])
        return output


def run(workload: Workload, *, steps: int, every: int) -> list[Record]:
    """One dense generation, probed every few steps; one record per layer and probed step."""
    from chipsparse.pipelines.registry import ADAPTERS  # needs diffusers

    pipe: Any = workload.pipe
    probed = frozenset(range(0, steps, every)) | {steps - 1}
    config = workload.profile.sparsity.override(
        {"mlp.enabled": False, "schedule.actions": ["dense", "refresh", "sparse"]}
    )
    probe = MassProbe(config, probed)
    adapter = ADAPTERS[type(pipe.transformer).__name__](
        pipe.transformer, probe, PositionTracker(), lambda: pipe.scheduler
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

"""How much softmax mass the heaviest columns of each query block capture, by layer and step."""

from __future__ import annotations

from argparse import Namespace

import torch

from benchmarks.clips import Workload
from benchmarks.probes import probed
from benchmarks.run import Run
from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention_column_sums import dense_attention_column_sums

FRACTIONS = (0.05, 0.1, 0.2)
COLUMNS = {"case": "", **{f"top_{fraction:.0%}": ".3f" for fraction in FRACTIONS}}
# A captured step would not show its layers.
PATCHED = {
    "mlp.enabled": False,
    "schedule.actions": ["dense", "refresh", "sparse"],
    "cuda_graphs": "never",
}


def run(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds one record per layer and probed step of a dense generation."""
    with to.attempt("captured_mass"):
        workload = Workload.of(args, device, dtype)
        config = workload.profile.sparsity.override(PATCHED)

        def captured(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            _output: torch.Tensor,
            *,
            scale: float | None,
        ) -> dict[str, float]:
            """The share of the mass in each of `FRACTIONS`, a mean over blocks and heads."""
            _, lse = dense_attention(query, key, value, scale=scale)
            rows = config.attention.block_size_q
            _, _, sums = dense_attention_column_sums(
                query, key, value, lse, block_size_q=rows, scale=scale
            )
            ranked = sums.sort(-1, descending=True).values.cumsum(-1)
            share = ranked / ranked[..., -1:]
            counts = {f: max(1, round(f * key.shape[2])) for f in FRACTIONS}
            return {f"top_{f:.0%}": share[..., n - 1].mean().item() for f, n in counts.items()}

        to.add(*probed("captured_mass", workload, config, captured, {}))

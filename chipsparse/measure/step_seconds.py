"""How long a sparse and a dense step of one part of a layer take: an estimate from the cost model.

The cost model counts operations; small layers take longer than those, so two floors and a fixed
time are added. What the host takes to launch kernels is left out: captured steps do without, and
how long it takes depends on the host.

Fitted to benchmarks/results/attention_curve_h200.json and sparse_mlp_h200.json, all of whose cases
it decides rightly; it leaves 256 to 1,024 features at 17,408 tokens dense, where a sparse step of
an H200 takes 0.27 ms and a dense one 0.06.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from chipsparse.cache.kinds import Part
from chipsparse.kernels.checks import block_count
from chipsparse.measure.cost_model import Rates, kept_columns, layer_time
from chipsparse.plan import Action, SparsityPlan

# What a sparse step must save of a dense one: less is lost to refreshes, or is noise.
LEAST_GAIN = 0.05
# Of a sparse step beside what its operations take: kernels that begin and end, lists, scores.
SPARSE_SECONDS: Mapping[Part, float] = {"attention": 55e-6, "mlp": 90e-6}
# Bytes in a second in which blocks of rows gather what they keep, mostly from the L2 cache.
GATHER_RATE = 5e12
# Passes over the kept neurons (old and new activations, changes) and over the layer's output.
NEURON_PASSES, OUTPUT_PASSES = 4, 3


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one part of a layer for one guidance branch.

    Attributes:
        sparse: of a sparse step.
        dense: of a dense one.
        measured: whether they were measured on the device, or are estimated.
    """

    sparse: float
    dense: float
    measured: bool = False

    @property
    def pays(self) -> bool:
        """Whether a sparse step saves enough of a dense one."""
        return self.sparse <= (1 - LEAST_GAIN) * self.dense


def estimated_seconds(
    plan: SparsityPlan, layer: int, part: Part, *, dtype: torch.dtype, rates: Rates | None = None
) -> StepSeconds:
    """How long a part of a layer takes that the plan has sparse.

    Args:
        plan: has sizes and shares.
        layer: number of the transformer block.
        part: attention or feed-forward layer.
        dtype: of the hidden states.
        rates: of the device; by default those of an H200.
    """
    rates = Rates() if rates is None else rates
    sparse, dense = (
        getattr(layer_time(layer, action, plan=plan, rates=rates, dtype=dtype), part)
        for action in (Action.SPARSE, Action.DENSE)
    )
    moved = _attention_bytes if part == "attention" else _mlp_bytes
    gathered, read, read_dense = moved(plan, layer, dtype.itemsize)
    sparse = max(sparse, gathered / GATHER_RATE, read / rates.memory)
    return StepSeconds(sparse + SPARSE_SECONDS[part], max(dense, read_dense / rates.memory))


def _attention_bytes(plan: SparsityPlan, layer: int, itemsize: int) -> tuple[int, int, int]:
    """Bytes that a sparse step gathers, that it reads and writes, and that a dense one does."""
    layout = plan.layout
    hidden = layout.batch * layout.tokens * layout.own_attention_channels * itemsize
    blocks = block_count(layout.own_query_rows, plan.config.attention.block_size_q)
    kept = kept_columns(plan, layer)
    gathered = 2 * layout.batch * blocks * kept * layout.own_attention_channels * itemsize
    return gathered, 3 * hidden, 4 * hidden


def _mlp_bytes(plan: SparsityPlan, layer: int, itemsize: int) -> tuple[int, int, int]:
    """As `_attention_bytes`; weights are gathered, of every neuron once for each of its linears."""
    layout, kind = plan.layout, plan.layout.kind(layer)
    tokens, kept = layout.batch * layout.mlp_tokens(layer), plan.mlp_keep_count(layer)
    blocks = layout.batch * block_count(layout.mlp_tokens(layer), plan.config.mlp.block_size)
    gathered = blocks * kept * kind.mlp_linears * layout.width * itemsize
    read = tokens * (NEURON_PASSES * kept + (1 + OUTPUT_PASSES) * layout.width) * itemsize
    return gathered, read, tokens * 2 * (kind.intermediate_size + layout.width) * itemsize

"""The parts of a model's layers that a sparse step would not make faster on a GPU.

Attention or the feed-forward layer of a layer whose sparse step takes longer than a dense one, by
the cost model, is better left alone. The cost model counts operations; small layers take longer
than those, so two floors and a fixed time are added. What the host takes to launch kernels is left
out: captured steps do without, and how long it takes depends on the host.

Fitted to benchmarks/results/attention_curve_h200.json and sparse_mlp_h200.json, all of whose cases
it decides rightly; it leaves 256 to 1,024 features at 17,408 tokens dense, where a sparse step of
an H200 takes 0.27 ms and a dense one 0.06.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from chipsparse.cache.kinds import PARTS, Part
from chipsparse.kernels.checks import block_count
from chipsparse.measure.cost_model import Rates, kept_columns, layer_time
from chipsparse.plan import Action, SparsityPlan

# Of a sparse step beside what its operations take: kernels that begin and end, lists, scores.
SPARSE_SECONDS: Mapping[Part, float] = {"attention": 55e-6, "mlp": 90e-6}
# Bytes in a second in which blocks of rows gather what they keep, mostly from the L2 cache.
GATHER_RATE = 5e12
# Passes over the kept neurons (old and new activations, changes) and over the layer's output.
NEURON_PASSES, OUTPUT_PASSES = 4, 3


@dataclass(frozen=True)
class StepSeconds:
    """Estimated seconds of one part of a layer for one guidance branch.

    Attributes:
        sparse: of a sparse step.
        dense: of a dense one.
    """

    sparse: float
    dense: float


def step_seconds_of(
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


def slower_parts(
    plan: SparsityPlan, device: torch.device, dtype: torch.dtype
) -> dict[tuple[int, Part], str]:
    """What the plan has sparse and is estimated to be slower so, and the reason in words.

    Nothing where ``where_slower`` is sparse or a backend is forced, nor on a CPU: there sparse
    steps are for tests.

    Args:
        plan: what is sparse, for which sizes.
        device: where the model computes.
        dtype: that it computes in.
    """
    config = plan.config
    if device.type != "cuda" or config.where_slower == "sparse" or config.backend != "auto":
        return {}
    slower = {}
    for layer in range(plan.layout.layers):
        for part in PARTS:
            if not plan.is_sparse(layer, part):
                continue
            times = step_seconds_of(plan, layer, part, dtype=dtype)
            if times.sparse >= times.dense:
                slower[layer, part] = (
                    f"a sparse step of it is estimated at {1e3 * times.sparse:.2f} ms on a GPU "
                    f"and a dense one at {1e3 * times.dense:.2f} ms"
                )
    return slower


def remarks_on(slower: Mapping[tuple[int, Part], str], layers: int) -> list[str]:
    """One sentence for each part and reason, of a model with so many layers."""
    alike: dict[tuple[Part, str], list[int]] = {}
    for (layer, part), reason in sorted(slower.items()):
        alike.setdefault((part, reason), []).append(layer)
    return [
        f"{'MLP' if part == 'mlp' else part} runs dense in {len(dense)} of {layers} layers (first: "
        f"layer {dense[0]}), as it is faster so: {reason} (where_slower: sparse would keep it "
        "sparse)"
        for (part, reason), dense in alike.items()
    ]

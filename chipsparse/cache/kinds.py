"""The kinds of tensors that a layer keeps between steps, and how many bytes each takes.

Known from the sizes of a model alone, so that memory can be planned before anything is computed.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from chipsparse.cache.tensors import AttentionCache, Kept, MLPCache
from chipsparse.config import PARTS as PARTS
from chipsparse.config import CachePrecision, Part, SparsityConfig
from chipsparse.kernels.checks import block_count
from chipsparse.kernels.fp8_quantization import FP8
from chipsparse.kernels.token_layout import padded_rows
from chipsparse.layout import ModelLayout
from chipsparse.plan import Action, SparsityPlan

SOFTMAX_BYTES = 4  # LSE, means and scales are float32 whatever the model computes in


# The declarations of all tensors by name.
KINDS: dict[str, Kept] = MLPCache.declared() | AttentionCache.declared()


def kept_kinds(config: SparsityConfig, part: Part) -> frozenset[str]:
    """Return the tensors that a sparse layer of this config keeps."""
    return frozenset(
        name for name, kept in KINDS.items() if kept.part == part and kept.wanted(config)
    )


def _may_keep(config: SparsityConfig, part: Part) -> frozenset[str]:
    """Return the tensors that it may keep, where the memory decides about precisions."""
    return kept_kinds(with_caches(config, in_fp8=config.memory.cache_precision != "full"), part)


def with_caches(config: SparsityConfig, *, in_fp8: bool) -> SparsityConfig:
    """Return the config with its caches kept in FP8 or in full."""
    precision: CachePrecision = "fp8" if in_fp8 else "full"
    return replace(config, memory=replace(config.memory, cache_precision=precision))


def read_kinds(config: SparsityConfig, part: Part, action: Action) -> frozenset[str]:
    """Return the tensors that a layer reads of its cache when it takes an action."""
    kept = _may_keep(config, part)
    if action is Action.SPARSE:
        return kept - {"lse"}
    if action is Action.REFRESH and part == "attention":
        return frozenset({"lse"})
    return frozenset()


def written_kinds(config: SparsityConfig, part: Part, action: Action) -> frozenset[str]:
    """Return the tensors that a layer records or changes when it takes an action."""
    kept = _may_keep(config, part)
    if action is Action.SPARSE:
        return frozenset(kind for kind in kept if KINDS[kind].rewritten)
    if action is Action.SKIP:
        return frozenset()
    if part == "attention" and action is Action.DENSE:
        return kept & {"lse"}
    return kept


def kind_bytes(
    kind: str, layer: int, *, layout: ModelLayout, config: SparsityConfig, dtype: torch.dtype
) -> int:
    """Bytes of one layer's tensor of a kind, for one guidance branch.

    Args:
        kind: one of `KINDS`.
        layer: number of the transformer block.
        layout: sizes of the model and of one call; has the batch.
        config: has the block sizes and shares; caches are in FP8 where it says ``fp8``.
        dtype: of the hidden states.
    """
    rounded = FP8 if config.memory.cache_precision == "fp8" else dtype
    tokens, rows = layout.own_query_rows, layout.mlp_tokens(layer)
    neurons = layout.kind(layer).intermediate_size
    mlp_groups = block_count(rows, config.block_size)
    blocks = block_count(tokens, config.block_size)
    per_sample = {
        "lse": layout.own_heads * tokens * SOFTMAX_BYTES,
        "lse_dense": layout.own_heads * tokens * SOFTMAX_BYTES,
        "kept_mass": layout.own_heads * tokens * SOFTMAX_BYTES,
        "columns": layout.own_heads * blocks * -(-layout.tokens // 8),
        "residual": layout.own_attention_channels * tokens * rounded.itemsize,
        "residual_scale": layout.own_heads * tokens * SOFTMAX_BYTES,
        "activation": neurons * padded_rows(rows) * rounded.itemsize,
        "token_scale": rows * SOFTMAX_BYTES,
        "output": layout.width * rows * dtype.itemsize,
        "mean": mlp_groups * neurons * SOFTMAX_BYTES,
    }
    return layout.batch * per_sample[kind]


def saved_work(part: Part, layer: int, plan: SparsityPlan) -> float:
    """Floating-point operations that a sparse step of one layer saves, for one guidance branch."""
    kept, layout = plan.density(layer, part), plan.layout
    if kept is None:
        return 0.0
    if part == "attention":
        kept = min(1.0, kept + plan.config.attention.random_fraction)
        whole = 4.0 * layout.own_query_rows * layout.tokens * layout.own_attention_channels
    else:
        whole = 4.0 * layout.mlp_tokens(layer) * layout.width * layout.kind(layer).intermediate_size
    return layout.batch * whole * (1 - kept)

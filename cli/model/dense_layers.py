"""Which layers run dense all the time, and why, as far as configs tell."""

from __future__ import annotations

from collections.abc import Mapping

from chipsparse.cache.kinds import PARTS, Part
from chipsparse.cache.placement import Placement
from chipsparse.cli.model.description import ModelDescription
from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.plan import SparsityPlan

QUANTIZED = "quantization_config"  # in a transformer's config


def never_sparse(
    plan: SparsityPlan, adapter: type[ModelAdapter], model: ModelDescription
) -> dict[Part, str]:
    """Parts that run dense in every layer, and why."""
    reasons: dict[Part, str] = {}
    if QUANTIZED in model.transformer_config:
        reasons["mlp"] = "its weights are quantized"
    reasons |= adapter.masked_parts
    if not plan.config.attention.enabled:
        reasons["attention"] = "attention.enabled is false in the profile"
    if not plan.config.mlp.enabled:
        reasons["mlp"] = "mlp.enabled is false in the profile"
    if plan.is_dense():
        reasons = {part: reasons.get(part, "no step of the schedule is sparse") for part in PARTS}
    return reasons


def dense_layers(
    plan: SparsityPlan,
    never: Mapping[Part, str],
    slower: Mapping[tuple[int, Part], str],
    placement: Placement,
) -> dict[Part, dict[int, str]]:
    """Every layer part that runs dense, and why.

    Args:
        plan: what is sparse, for which sizes.
        never: parts that run dense in every layer, and why.
        slower: what would be slower sparse, and why.
        placement: where caches live.
    """
    dense: dict[Part, dict[int, str]] = {}
    for part in PARTS:
        dense[part] = {}
        for layer in range(plan.layout.layers):
            if part in never:
                dense[part][layer] = never[part]
            elif why := plan.why_dense(layer, part):
                dense[part][layer] = f"{why} in the profile"
            elif (layer, part) in slower:
                dense[part][layer] = slower[layer, part]
            elif (layer, part) in placement.recomputed:
                dense[part][layer] = placement.why_recomputed(layer, part)
    return dense

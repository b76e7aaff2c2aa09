"""Which layers run dense all the time, and why, as far as configs tell."""

from __future__ import annotations

from collections.abc import Mapping

from chipsparse.cache.kinds import PARTS, Part
from chipsparse.cache.placement import Placement
from chipsparse.cli.model.description import ModelDescription
from chipsparse.layers.mlp_weights import Fp8Form
from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.plan import SparsityPlan

QUANTIZED = "quantization_config"  # in a transformer's config
# Configs of torchao, as diffusers writes them down, by what their linears round to FP8.
FP8_CONFIGS: Mapping[str, Fp8Form] = {
    "Float8WeightOnlyConfig": "weights",
    "Float8DynamicActivationFloat8WeightConfig": "weights and inputs",
}


def fp8_weights(model: ModelDescription) -> Fp8Form | None:
    """What the linears of a transformer round to FP8; None where its weights are not in it."""
    config = model.transformer_config.get(QUANTIZED) or {}
    kind = config.get("quant_type") if config.get("quant_method") == "torchao" else None
    default = kind.get("default") if isinstance(kind, Mapping) else None
    return FP8_CONFIGS.get(default.get("_type", "")) if isinstance(default, Mapping) else None


def never_sparse(
    plan: SparsityPlan, adapter: type[ModelAdapter], model: ModelDescription
) -> dict[Part, str]:
    """Parts that run dense in every layer, and why."""
    reasons: dict[Part, str] = {}
    if QUANTIZED in model.transformer_config and fp8_weights(model) is None:
        reasons["mlp"] = "its weights are quantized"
    reasons |= adapter.masked_parts
    if not plan.config.attention.is_sparse:
        reasons["attention"] = "attention.density is dense in the profile"
    if not plan.config.mlp.is_sparse:
        reasons["mlp"] = "mlp.density is dense in the profile"
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

"""Temporary."""

from __future__ import annotations

from collections.abc import Mapping

from chipsparse.cache.kinds import PARTS, Part
from chipsparse.cache.placement import Placement
from chipsparse.plan import SparsityPlan


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

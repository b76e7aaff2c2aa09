"""What `chipsparse explain` tells, as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import chipsparse
from chipsparse.cli.explain.outlook import Outlook
from chipsparse.cli.planning.layer_budgets import layer_groups
from chipsparse.cli.results import fields_json
from chipsparse.config import Part
from chipsparse.kernels.checks import block_count
from chipsparse.measure.cost_model import kept_columns
from chipsparse.measure.estimate import RunEstimate

if TYPE_CHECKING:
    from chipsparse.cli.explain.explanation import Explanation


def explanation_json(explained: Explanation) -> dict[str, Any]:
    """One JSON object; sizes in bytes, times in seconds.

    Columns and neurons are those of the layer that keeps most; ``keep`` has those of each.
    """
    plan, layout, memory = explained.plan, explained.plan.layout, explained.memory
    attention = plan.config.attention
    sparse = [layer for layer in range(layout.layers) if plan.is_sparse(layer, "attention")]
    return {
        "chipsparse": chipsparse.__version__,
        "model": explained.model.location,
        "pipeline_class": explained.model.pipeline_class.__name__,
        "transformer_class": explained.model.transformer_class,
        "profile": explained.profile.source,
        "quality": explained.profile.quality,
        "out_of_range": explained.out_of_range,
        "device": explained.target.device,
        "device_here": explained.target.here,
        "dtype": explained.target.dtype,
        "settings": explained.settings,
        "pixels": explained.pixels,
        "branches": explained.branches,
        "tokens": {
            "grids": layout.grids,
            "grid": layout.grid_tokens,
            "text": layout.text_tokens,
            "all": layout.tokens,
        },
        "attention": {
            "query_blocks": block_count(layout.tokens, attention.block_size_q),
            "block_size_q": attention.block_size_q,
            "columns_by_score": _most(plan.attention_keep_count(layer) for layer in sparse),
            "columns_at_random": plan.attention_random_count(),
            "columns": _most(kept_columns(plan, layer) for layer in sparse),
        },
        "layers": _layers(explained),
        "schedule": {
            "actions": plan.describe(),
            "counts": explained.outlook.action_counts,
            "full_steps": plan.schedule.full_steps,
        },
        "weights": {component.name: component.nbytes for component in explained.weights},
        "memory": {
            "weights": explained.weight_bytes,
            "working": explained.outlook.working,
            "caches_wanted": memory.wanted,
            "caches_on_device": memory.branches * memory.placement.device_bytes,
            "caches_on_host": memory.host_bytes,
            "slots": memory.placement.slot_bytes,
            "device": explained.device_bytes,
            "vram": plan.config.memory.vram,
            "ram": plan.config.memory.ram,
        },
        "caches": explained.caches,
        "estimate": _estimate(explained.outlook.estimate),
        "qualities": {name: _quality(each) for name, each in explained.qualities.items()},
        "notes": explained.notes,
    }


def _layers(explained: Explanation) -> list[dict[str, Any]]:
    plan, first, rows = explained.plan, 0, []
    groups = layer_groups(plan)
    config, layout = plan.config.mlp, plan.layout
    for kind in layout.kinds:
        rows.append(
            {
                "name": kind.name,
                "layers": kind.layers,
                "attention": _part(explained, "attention", kind.name, kind.layers),
                "mlp": {
                    **_part(explained, "mlp", kind.name, kind.layers),
                    "token_blocks": block_count(layout.mlp_tokens(first), config.block_size),
                    "block_size": config.block_size,
                    "neurons": kind.intermediate_size,
                    "neurons_kept": _most(
                        plan.mlp_keep_count(layer)
                        for layer in range(first, first + kind.layers)
                        if plan.is_sparse(layer, "mlp")
                    ),
                },
                "keep": [
                    {
                        "layers": group.layers,
                        "columns": group.kept["attention"],
                        "neurons": group.kept["mlp"],
                    }
                    for group in groups
                    if group.kind == kind.name
                ],
            }
        )
        first += kind.layers
    return rows


def _most(counts: Iterable[int]) -> int | None:
    return max(counts, default=None)


def _part(explained: Explanation, part: Part, kind: str, layers: int) -> dict[str, Any]:
    reasons = explained.reasons(part, kind)
    return {"sparse": layers - reasons.total(), "dense": reasons}


def _quality(outlook: Outlook) -> dict[str, Any]:
    return {
        "counts": outlook.action_counts,
        "work": outlook.work,
        "cache_bytes": outlook.cache_bytes,
        "speedup_run": None if outlook.estimate is None else outlook.estimate.speedup_run,
    }


def _estimate(estimate: RunEstimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    return {
        **fields_json(estimate),
        "transfers_hidden": estimate.hidden,
        "speedup_sparse_step": estimate.speedup_sparse_step,
        "speedup_run": estimate.speedup_run,
    }

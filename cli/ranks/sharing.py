"""Whether and how several processes can share a generation, known from a model's configs."""

from __future__ import annotations

import math

import torch

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.planning.planned import PlannedGeneration
from chipsparse.cli.planning.settings import patch_sizes
from chipsparse.cost_model.exchanges import Sharing
from chipsparse.parallel.degrees import Parallel
from chipsparse.parallel.sequence_cut import check_heads, cut_sequence
from chipsparse.pipelines.registry import ADAPTERS


def check_sharing(
    model: ModelDescription, planned: PlannedGeneration | None, parallel: Parallel | None
) -> None:
    """Raises `UserError` where so many processes cannot share the generation.

    Args:
        planned: what they tell of the generation; None where the model's own code decides.
        parallel: the processes; None for one.
    """
    if parallel is None:
        return
    name, adapter = model.transformer_class, ADAPTERS.get(model.transformer_class)
    if adapter is None:
        raise UserError(f"a {name} has no adapter, so several processes cannot share it")
    if parallel.guidance > 1:
        reason = adapter.why_guidance_stays()
        if reason is None and planned is not None and planned.branches == 1:
            reason = "this generation has no guidance; raise --guidance-scale, or leave it out"
        if reason is not None:
            raise UserError(f"--guidance-parallel {parallel.guidance}: {reason}")
    if parallel.ulysses == 1:
        return
    reason = adapter.why_not_split(model.transformer_config)
    if reason is not None:
        raise UserError(f"a {name} cannot run on several processes: {reason}")
    if planned is None:
        return
    layout, mlp = planned.plan.layout, planned.plan.config.mlp
    with user_errors(ValueError):
        check_heads(layout, parallel.ulysses)
        cut_sequence(layout, parallel.ulysses, mlp.block_size if mlp.enabled else 1)


def sharing_of(
    model: ModelDescription, planned: PlannedGeneration, parallel: Parallel, dtype: torch.dtype
) -> Sharing:
    """How processes share a planned generation that `check_sharing` has nothing against."""
    config = model.transformer_config
    channels = config.get("out_channels") or config.get("in_channels", 0)
    return Sharing(
        planned.plan,
        parallel,
        planned.branches,
        dtype,
        output_channels=channels * math.prod(patch_sizes(config)),
    )

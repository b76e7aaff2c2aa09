"""What a generation would do, gathered from configs alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

import chipsparse
from chipsparse.cache.memory_plan import BudgetError, MemoryPlan
from chipsparse.cache.table import KindBytes, bytes_by_kind
from chipsparse.cli.errors import UserError
from chipsparse.cli.explain.outlook import Outlook, Target, look_ahead
from chipsparse.cli.explain.records import (
    KindLayers,
    MemoryNeeds,
    kinds_of_layers,
    memory_needs,
    most,
)
from chipsparse.cli.explain.shared import SharedOutlook, share_out
from chipsparse.cli.generation_options import GenerationOptions
from chipsparse.cli.model.dense_layers import QUANTIZED
from chipsparse.cli.model.description import ModelDescription, choose_device, choose_dtype
from chipsparse.cli.model.schedulers import shifted_scheduler
from chipsparse.cli.model.weights import ComponentWeights, count_weights
from chipsparse.cli.planning import profile_range
from chipsparse.cli.planning.layer_budgets import LayerGroup
from chipsparse.cli.planning.planned import PlannedGeneration
from chipsparse.cli.planning.settings import unused_defaults
from chipsparse.cli.planning.sparse_steps import too_few_steps
from chipsparse.cli.ranks.joined import shared_by
from chipsparse.cli.results import fields_json
from chipsparse.common.byte_sizes import format_bytes
from chipsparse.config import MemoryConfig
from chipsparse.cost_model.run_times import RunEstimate
from chipsparse.kernels.checks import block_count
from chipsparse.parallel.degrees import Parallel
from chipsparse.profiles.profile import Profile

# In the names of pipelines that always see reference images.
SEEING_IMAGES = ("Kontext", "ImageEdit", "ImageLayered")
NO_BUDGET = "planned for a GPU without limit; give --vram to see what fits"


@dataclass(frozen=True)
class Explanation:
    """Everything that `chipsparse explain` tells.

    Attributes:
        outlook: plan, caches and times of the quality that is taken, or of the profile's config.
        shared: how several processes share it; None for one.
        qualities: outlooks of all that the profile has, by name.
        caches: bytes of each kind of tensor that is kept.
        out_of_range: how it differs from what the profile was tuned for, a phrase each.
        notes: what to know beside the numbers, one sentence each.
    """

    model: ModelDescription
    profile: Profile
    target: Target
    outlook: Outlook
    shared: SharedOutlook | None
    qualities: dict[str, Outlook]
    layers: list[KindLayers]
    weights: list[ComponentWeights]
    memory: MemoryNeeds
    caches: dict[str, KindBytes]
    out_of_range: list[str]
    notes: list[str]

    @property
    def planned(self) -> PlannedGeneration:
        """Its settings and what is sparse, when."""
        return self.outlook.planned

    @property
    def groups(self) -> list[LayerGroup]:
        """All layers, by what they keep."""
        return [group for kind in self.layers for group in kind.keep]

    def to_json(self) -> dict[str, Any]:
        """One JSON object; sizes in bytes, times in seconds.

        Columns and neurons are those of the layer that keeps most; ``keep`` has those of each.
        """
        planned, estimate = self.planned, self.outlook.estimate
        plan, layout = planned.plan, planned.plan.layout
        attention = plan.config.attention
        sparse = [layer for group in self.groups if group.columns for layer in group.layers]
        return {
            "chipsparse": chipsparse.__version__,
            "model": self.model.location,
            "pipeline_class": self.model.pipeline_class.__name__,
            "transformer_class": self.model.transformer_class,
            "profile": self.profile.source,
            "quality": self.profile.quality,
            "out_of_range": self.out_of_range,
            "device": self.target.device,
            "device_here": self.target.here,
            "dtype": self.target.dtype,
            "settings": planned.settings,
            "pixels": planned.pixels,
            "branches": planned.branches,
            "tokens": {
                "grids": layout.grids,
                "grid": layout.grid_tokens,
                "text": layout.text_tokens,
                "all": layout.tokens,
            },
            "attention": {
                "query_blocks": block_count(len(layout.query_rows), attention.block_size_q),
                "block_size_q": attention.block_size_q,
                "precision": {
                    action: attention.precision_of(action) for action in ("dense", "refresh")
                },
                "columns_by_score": most(map(plan.attention_keep_count, sparse)),
                "columns_at_random": plan.attention_random_count(),
                "columns": most(group.columns for group in self.groups),
            },
            "layers": self.layers,
            "schedule": {
                "actions": plan.describe(),
                "counts": self.outlook.action_counts,
                "full_steps": plan.schedule.full_steps,
            },
            "weights": {component.name: component.nbytes for component in self.weights},
            "memory": self.memory,
            "caches": self.caches,
            "estimate": None if estimate is None else _estimate_json(estimate),
            "shared": self.shared,
            "qualities": self.qualities,
            "notes": self.notes,
        }


def _estimate_json(estimate: RunEstimate) -> dict[str, Any]:
    return {
        **fields_json(estimate),
        "transfers_hidden": estimate.hidden,
        "speedup_sparse_step": estimate.speedup_sparse_step,
        "speedup_run": estimate.speedup_run,
    }


def explain(options: GenerationOptions, model: ModelDescription, profile: Profile) -> Explanation:
    """Explains the generation that these options ask for; raises `UserError`."""
    target = choose_target(options)
    _ = shifted_scheduler(model, options.flow_shift)  # which raises where it has no flow shift
    weights = count_weights(model, target.dtype)
    weight_bytes = sum(component.nbytes or 0 for component in weights)

    parallel = shared_by(options.gpus or 1, options.guidance_parallel)
    several = parallel if parallel.ranks > 1 else None

    def outlook_of(taken: Profile, parallel: Parallel | None = several) -> Outlook:
        return look_ahead(options, model, taken, target, weights=weight_bytes, parallel=parallel)

    outlook = outlook_of(profile)
    alone = outlook if several is None else outlook_of(profile, None)
    planned, memory = outlook.planned, outlook.memory
    plan = planned.plan
    _check(memory, plan.config.memory, weights=weight_bytes, working=outlook.working)
    out_of_range = profile_range.out_of_range(
        profile,
        model,
        planned.settings,
        target.device,
        target.dtype,
        flow_shift=options.flow_shift,
        here=target.here,
    )
    notes = [
        too_few_steps(plan),
        profile_range.sentence(profile, out_of_range) if out_of_range else None,
        profile.instead,
        profile.standing_note,
        *unused_defaults(model, profile),
        # Whatever is cached, it is told whether the model fits into --vram.
        *replace(plan, config=plan.config.override({"memory.vram": None})).notes(
            on_cpu=target.device.type == "cpu"
        ),
        outlook.why_untimed,
        *_notes(model, target, memory, profile, weights),
    ]
    return Explanation(
        model=model,
        profile=profile,
        target=target,
        outlook=outlook,
        shared=share_out(outlook, alone),
        qualities={
            name: outlook if name == profile.quality else outlook_of(profile.of_quality(name))
            for name in profile.qualities
        },
        layers=kinds_of_layers(outlook),
        weights=weights,
        memory=memory_needs(outlook, weights=weight_bytes, on_gpu=target.device.type != "cpu"),
        caches=bytes_by_kind(memory, plan.layout),
        out_of_range=out_of_range,
        notes=[note for note in notes if note is not None],
    )


def _check(memory: MemoryPlan, budgets: MemoryConfig, *, weights: int, working: int) -> None:
    """Raises `UserError` where nothing fits, and says what would help."""
    needed = f"weights {format_bytes(weights)}, working memory {format_bytes(working)}"
    if budgets.vram is not None and weights + working >= budgets.vram:
        raise UserError(
            f"--vram {format_bytes(budgets.vram)} does not hold the model and its work ({needed}); "
            "in Python, diffusers' enable_model_cpu_offload and enable_group_offload keep a part "
            "of the weights there at a time"
        )
    try:
        memory.check()
    except BudgetError as error:
        raise UserError(f"{error} ({needed})") from error


def choose_target(options: GenerationOptions) -> Target:
    """The device of ``--device``; ``auto`` plans for a GPU even where there is none."""
    if options.device == "auto":
        device, here = torch.device("cuda"), torch.cuda.is_available()
    else:
        device, here = choose_device(options.device), True
    options.check_vram(device)
    return Target.of(device, choose_dtype(options.dtype, device), here=here)


def _notes(
    model: ModelDescription,
    target: Target,
    memory: MemoryPlan,
    profile: Profile,
    weights: list[ComponentWeights],
) -> list[str]:
    notes, budgets = [], profile.sparsity.memory
    if not target.here and budgets.vram is None:
        notes.append(NO_BUDGET)
    if not target.here and budgets.ram is None and memory.needs_host:
        notes.append("host memory is what this machine has free; give --ram for another one")
    unknown = [component.name for component in weights if component.nbytes is None]
    if unknown:
        notes.append(f"the weights of {', '.join(unknown)} are not counted: no config.json there")
    if QUANTIZED in model.transformer_config:
        notes.append(
            "the transformer's weights are counted, and its linears timed, as if they were not "
            "quantized"
        )
    if {"transformer", "transformer_2"} <= set(model.components):
        notes.append(
            "the second expert takes over with a dense step and a refresh of its own, which are "
            "not counted; the first one's caches are freed by then"
        )
    if any(word in model.pipeline_class.__name__ for word in SEEING_IMAGES):
        notes.append("the tokens of a reference image are not counted")
    return notes

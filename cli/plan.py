"""The plan of a generation whose model is known by its configs alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.model.weights import count_weights
from chipsparse.cli.settings import GenerationSettings, guiding_argument, latent_sizes
from chipsparse.cli.views.units import counted
from chipsparse.common.byte_sizes import format_bytes
from chipsparse.common.machine import host_free_bytes
from chipsparse.config import PARTS, ConfigError, Part
from chipsparse.layout import Fp8Form
from chipsparse.parallel.degrees import Parallel
from chipsparse.parallel.sequence_cut import check_heads, cut_sequence
from chipsparse.pipelines.model_sizes import vae_factors
from chipsparse.pipelines.registry import FAMILIES
from chipsparse.profiles.profile import MOST_STEPS, Profile
from chipsparse.report.nothing_sparse import what_helps
from chipsparse.sparse.cache.memory_plan import working_bytes
from chipsparse.sparse.cost_model.relative_cost import asked_cost, why_skipping
from chipsparse.sparse.plan import CACHED, SparsityPlan

QUANTIZED = "quantization_config"  # in a transformer's config
# Configs of torchao, as diffusers writes them down, by what their linears round to FP8.
FP8_CONFIGS: Mapping[str, Fp8Form] = {
    "Float8WeightOnlyConfig": "weights",
    "Float8DynamicActivationFloat8WeightConfig": "weights and inputs",
}


@dataclass(frozen=True)
class PlannedGeneration:
    """The plan of a generation, known without its model."""

    plan: SparsityPlan
    pixels: tuple[int, int]  # height and width of a frame
    branches: int  # transformer calls per step
    never: dict[Part, str]  # what runs dense in every layer, and why
    skipping: str | None = None  # why steps are skipped that the profile would have sparse


def called_steps(settings: GenerationSettings, model: ModelDescription) -> int:
    """Return the number of denoising steps that call the transformer."""
    family = FAMILIES.get(model.transformer_class)
    uncalled = 0 if family is None else family.timestep.uncalled_steps
    return max(1, settings.num_inference_steps - uncalled)


def plan_generation(
    settings: GenerationSettings,
    model: ModelDescription,
    profile: Profile,
) -> PlannedGeneration:
    """Return the plan of a generation with these settings; raise `UserError`."""
    family = FAMILIES.get(model.transformer_class)
    if family is None:
        raise UserError(
            f"the transformer of {model.location} is a {model.transformer_class}, which chipsparse "
            "does not support; chipsparse models lists the classes that it does",
        )
    frames, rows, columns = latent_sizes(settings, model)
    if rows is None or columns is None:
        option = "--height" if rows is None else "--width"
        name = model.pipeline_class.__name__
        raise UserError(f"{name} has no default for {option}; give {option}")
    argument = guiding_argument(model)
    guided = argument is not None and (getattr(settings, argument) or 0) > 1
    in_batch = family.guidance.in_batch and not model.has_guider
    layout = family.planned_layout(
        model.transformer_config,
        latents=(frames, rows, columns),
        text_tokens=settings.max_sequence_length or 0,
        batch=2 if guided and in_batch else 1,
    )
    branches = 2 if guided and not in_batch else 1
    if not model.has_guider:
        branches += family.guidance.further_branches(model.default)
    with user_errors(ConfigError, what=profile.source):
        cost = asked_cost(profile.sparsity, layout, family.sparse.masked)
        steps = called_steps(settings, model)
        plan = SparsityPlan(profile.sparsity, layout, steps, sparse_cost=cost)
    never = never_sparse(model)
    for part in PARTS:
        if not getattr(plan.config, part).is_sparse:
            never[part] = f"{part}.density is dense in the profile"
    if plan.is_dense():
        never = {part: never.get(part, "no step of the schedule is sparse") for part in PARTS}
    space, _ = vae_factors(model.vae_config)
    pixels = rows * space, columns * space
    skipping = why_skipping(plan)
    return PlannedGeneration(plan, pixels, branches, never, skipping)


def never_sparse(model: ModelDescription) -> dict[Part, str]:
    """Return the parts that no config makes sparse in a model, each with the reason."""
    never: dict[Part, str] = {}
    if QUANTIZED in model.transformer_config and fp8_weights(model) is None:
        never["mlp"] = "its weights are quantized"
    family = FAMILIES.get(model.transformer_class)
    if family is not None:
        never |= family.sparse.masked
    return never


def fp8_weights(model: ModelDescription) -> Fp8Form | None:
    """Return what the transformer's linears round to FP8; None where its weights are not in it."""
    config = model.transformer_config.get(QUANTIZED) or {}
    kind = config.get("quant_type") if config.get("quant_method") == "torchao" else None
    default = kind.get("default") if isinstance(kind, Mapping) else None
    return FP8_CONFIGS.get(default.get("_type", "")) if isinstance(default, Mapping) else None


def too_few_steps(plan: SparsityPlan, first_step: Callable[[int], int] = lambda _: 0) -> str | None:
    """Return one sentence where a plan that wants to be sparse has too few steps, else None.

    ``first_step`` gives the first of so many, which is more than 0 where it starts from an image.
    """

    def saves(steps: int) -> bool:
        """Return whether any step uses what another one computed."""
        other = dataclasses.replace(plan, steps=steps)
        first = first_step(steps)
        # What is taken is never less than what is planned, which is quicker to ask for.
        planned = any(other.step_action(step) in CACHED for step in range(first, steps))
        return planned and any(action in CACHED for action in other.actions(first))

    steps = plan.steps
    assert steps is not None
    if saves(steps) or not saves(MOST_STEPS):  # then the profile wants nothing sparse
        return None
    enough = next(more for more in range(steps + 1, MOST_STEPS + 1) if saves(more))
    first = first_step(steps)
    counts = "the only step" if steps - first == 1 else f"all {counted(steps - first, 'step')}"
    changes = what_helps(plan, first)
    return (
        f"nothing runs sparse: the profile's schedule computes {counts} in full, so nothing is "
        f"saved; it takes --steps {enough} or more"
        + (f", or in the profile {changes}" if changes else "")
    )


def check_memory(
    planned: PlannedGeneration,
    frames: int | None,
    model: ModelDescription,
    dtype: torch.dtype,
) -> None:
    """Raise `UserError` where a CPU's memory cannot hold a generation.

    Counts weights, a transformer call and the finished frames, and no caches: what does not fit
    of those runs dense.
    """
    free = host_free_bytes()
    if free is None:
        return
    weights = sum(size or 0 for size in count_weights(model, dtype).values())
    work = working_bytes(planned.plan, dtype=dtype)
    height, width = planned.pixels
    # As decoded, and as an array of three channels.
    pixels = 3 * (frames or 1) * height * width * (dtype.itemsize + torch.float32.itemsize)
    needed = weights + work + pixels
    if needed > free:
        also = "" if frames is None else f" and {counted(frames, 'frame')}"
        raise UserError(
            f"{width}x{height} pixels{also} need about {format_bytes(needed)} of memory (weights "
            f"{format_bytes(weights)}, a transformer call {format_bytes(work)}, frames "
            f"{format_bytes(pixels)}), and {format_bytes(free)} are free; ask for a smaller "
            "--height and --width or fewer --frames",
        )


def check_sharing(
    model: ModelDescription,
    planned: PlannedGeneration | None,
    parallel: Parallel | None,
) -> None:
    """Raise `UserError` where so many processes cannot share the generation.

    ``planned`` is None where the model's own code decides.
    """
    if parallel is None:
        return
    name = model.transformer_class
    family = FAMILIES.get(model.transformer_class)
    if family is None:
        raise UserError(f"a {name} has no adapter, so several processes cannot share it")
    if parallel.guidance > 1:
        reason = family.why_guidance_stays()
        if reason is None and planned is not None and planned.branches == 1:
            reason = "this generation has no guidance; raise --guidance-scale, or leave it out"
        if reason is not None:
            raise UserError(f"--guidance-parallel {parallel.guidance}: {reason}")
    if parallel.ulysses == 1:
        return
    reason = family.why_not_split(model.transformer_config)
    if reason is not None:
        raise UserError(f"a {name} cannot run on several processes: {reason}")
    if planned is not None:
        layout = planned.plan.layout
        config = planned.plan.config
        with user_errors(ValueError):
            check_heads(layout, parallel.ulysses)
            cut_sequence(layout, parallel.ulysses, config.block_size if config.mlp.is_sparse else 1)

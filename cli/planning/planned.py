"""The plan of a generation whose model is known by its configs alone."""

from __future__ import annotations

from dataclasses import dataclass

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.generation_options import GenerationOptions
from chipsparse.cli.model.dense_layers import never_sparse
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.planning.settings import (
    GenerationSettings,
    guiding_argument,
    latent_sizes,
    resolve_settings,
    usual_size,
    vae_factors,
)
from chipsparse.config import ConfigError, Part
from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.pipelines.registry import ADAPTERS
from chipsparse.plan import SparsityPlan
from chipsparse.profiles.profile import Profile


@dataclass(frozen=True)
class PlannedGeneration:
    """What is known of a generation without its model.

    Attributes:
        pixels: height and width of a frame.
        branches: transformer calls per step.
        never: parts that run dense in every layer, and why.
    """

    settings: GenerationSettings
    adapter: type[ModelAdapter]
    plan: SparsityPlan
    pixels: tuple[int, int]
    branches: int
    never: dict[Part, str]


def called_steps(settings: GenerationSettings, model: ModelDescription) -> int:
    """Denoising steps that call the transformer."""
    adapter = ADAPTERS.get(model.transformer_class)
    uncalled = 0 if adapter is None else adapter.uncalled_steps
    return max(1, settings.num_inference_steps - uncalled)


def plan_generation(
    options: GenerationOptions, model: ModelDescription, profile: Profile
) -> PlannedGeneration:
    """Plans the generation that these options ask for; raises `UserError`."""
    settings = resolve_settings(options, model, profile.generation)
    adapter = ADAPTERS.get(model.transformer_class)
    if adapter is None:
        raise UserError(
            f"the transformer of {model.location} is a {model.transformer_class}, which chipsparse "
            f"does not support; supported classes: {', '.join(ADAPTERS)}"
        )
    latents = latent_sizes(settings, model, default=adapter.default_latents)
    argument = guiding_argument(model)
    guided = argument is not None and (getattr(settings, argument) or 0) > 1
    in_batch = adapter.guides_in_batch and not model.has_guider
    layout = adapter.planned_layout(
        model.transformer_config,
        latents=latents,
        text_tokens=settings.max_sequence_length or 0,
        batch=2 if guided and in_batch else 1,
    )
    branches = 1 + (guided and not in_batch)
    if not model.has_guider:
        branches += adapter.further_branches(model.default)
    with user_errors(ConfigError, what=profile.source):
        plan = SparsityPlan(profile.sparsity, layout, called_steps(settings, model))
    space, _ = vae_factors(model.vae_config)
    return PlannedGeneration(
        settings=settings,
        adapter=adapter,
        plan=plan,
        pixels=(latents[1] * space, latents[2] * space),
        branches=branches,
        never=never_sparse(plan, adapter, model),
    )


def planned_if_known(
    options: GenerationOptions, model: ModelDescription, profile: Profile | None
) -> PlannedGeneration | None:
    """As `plan_generation`; None where the model's own code decides on what its configs leave."""
    adapter = ADAPTERS.get(model.transformer_class)
    if profile is None or adapter is None:
        return None
    settings = resolve_settings(options, model, profile.generation)
    if usual_size(settings, model, default=adapter.default_latents) is None:
        return None
    return plan_generation(options, model, profile)

"""The work of `chipsparse explain`: a resolved request, told from configs alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch

from chipsparse.cache.kinds import PARTS, Part
from chipsparse.cache.memory_plan import BudgetError
from chipsparse.cache.table import bytes_by_kind
from chipsparse.cli.errors import UserError
from chipsparse.cli.explain.forecast import Forecast, Target, look_ahead, rank_forecasts
from chipsparse.cli.explain.record import (
    Alone,
    Attention,
    Estimate,
    Explanation,
    KindLayers,
    LayerGroup,
    Memory,
    MLPLayers,
    PartLayers,
    Quality,
    Schedule,
    Shared,
    Tokens,
)
from chipsparse.cli.model.description import choose_device, choose_dtype
from chipsparse.cli.model.weights import ComponentWeights, count_weights
from chipsparse.cli.options import GenerationOptions
from chipsparse.cli.plan import QUANTIZED, plan_generation
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.ranks import shared_by
from chipsparse.cli.request import Request, look_up, resolve
from chipsparse.common.byte_sizes import format_bytes
from chipsparse.cost_model.layer_times import kept_columns
from chipsparse.kernels.checks import block_count
from chipsparse.plan import SparsityPlan
from chipsparse.profiles.profile import Profile

# In the names of pipelines that always see reference images.
SEEING_IMAGES = ("Kontext", "ImageEdit", "ImageLayered")
NO_BUDGET = "planned for a GPU without limit; give --vram to see what fits"


def explain(options: GenerationOptions, display: ProgressDisplay) -> Explanation:
    """Return what a generation would do; raise `UserError`. No weight is read."""
    if options.device == "auto":  # a GPU, even where there is none
        device, here = torch.device("cuda"), torch.cuda.is_available()
    else:
        device, here = choose_device(options.device), True
    options.check_vram(device)
    shared = shared_by(options.gpus or 1, options.guidance_parallel)
    parallel = shared if shared.ranks > 1 else None
    request = resolve(
        options,
        model=look_up(options, display),
        device=device,
        dtype=choose_dtype(options.dtype, device),
        here=here,
        parallel=parallel,
        instead=None,
    )
    profile, model, settings = request.profile, request.model, request.settings
    assert profile is not None
    target = Target.of(device, request.dtype, here=here)
    weights = count_weights(model, request.dtype)
    weight_bytes = sum(component.nbytes or 0 for component in weights)

    def forecast_of(profile: Profile, *, alone: bool = False) -> Forecast:
        planned = plan_generation(settings, model, profile)
        share = None if alone else parallel
        return look_ahead(model, planned, target, weights=weight_bytes, parallel=share)

    forecast = forecast_of(profile)
    _check_memory(forecast, profile, weight_bytes)
    qualities = {
        name: forecast if name == profile.quality else forecast_of(profile.of_quality(name))
        for name in profile.qualities
    }
    planned, plan, memory = forecast.planned, forecast.planned.plan, forecast.memory
    layout, attention = plan.layout, plan.config.attention
    layers = _layers(forecast)
    columns = [group.columns for kind in layers for group in kind.keep]
    sparse = [layer for k in layers for group in k.keep if group.columns for layer in group.layers]
    on_host = 0 if device.type == "cuda" else memory.host_bytes
    alone = None if parallel is None else forecast_of(profile, alone=True)
    return Explanation(
        model=model.location,
        pipeline_class=model.pipeline_class.__name__,
        transformer_class=model.transformer_class,
        profile=profile.source,
        quality=profile.quality,
        out_of_range=request.out_of_range,
        device=str(device),
        device_here=here,
        dtype=str(request.dtype).removeprefix("torch."),
        settings=settings,
        pixels=planned.pixels,
        branches=planned.branches,
        tokens=Tokens(
            grids=layout.grids,
            grid=layout.grid_tokens,
            text=layout.text_tokens,
            all=layout.tokens,
            exact_text=layout.exact_text,
        ),
        attention=Attention(
            query_blocks=block_count(len(layout.query_rows), plan.config.block_size),
            block_size_q=plan.config.block_size,
            precision=attention.precision,
            columns_by_score=_most(map(plan.attention_keep_count, sparse)),
            columns_at_random=plan.attention_random_count(),
            columns=_most(columns),
        ),
        layers=layers,
        schedule=Schedule(
            actions=plan.describe(),
            counts=forecast.action_counts,
            full_steps=plan.schedule.full_steps,
        ),
        weights={component.name: component.nbytes for component in weights},
        memory=Memory(
            weights=weight_bytes,
            working=forecast.working,
            caches_wanted=memory.wanted,
            caches_on_device=memory.branches * memory.placement.device_bytes,
            caches_on_host=memory.host_bytes,
            slots=memory.placement.slot_bytes,
            device=weight_bytes + forecast.working + memory.device_bytes + on_host,
            vram=plan.config.memory.vram,
            ram=plan.config.memory.ram,
            precision="fp8" if memory.in_fp8 else "full",
        ),
        caches=bytes_by_kind(memory, layout),
        estimate=None if forecast.estimate is None else Estimate.of(forecast.estimate),
        shared=None if alone is None else _shared(forecast, alone),
        qualities={name: _quality(quality) for name, quality in qualities.items()},
        notes=_notes(request, profile, forecast, target, weights),
    )


def _layers(forecast: Forecast) -> list[KindLayers]:
    """Return the layers, by the model's name for them."""
    plan, kinds, first = forecast.planned.plan, [], 0
    whole = replace(plan.layout, share=None)  # of all processes together
    for kind in plan.layout.kinds:
        layers = range(first, first + kind.layers)
        first += kind.layers
        groups: dict[tuple[int | None, int | None], list[int]] = {}
        for layer in layers:
            columns, neurons = (_kept(plan, layer, part) for part in PARTS)
            groups.setdefault((columns, neurons), []).append(layer)
        keep = [LayerGroup(layers=own, columns=c, neurons=n) for (c, n), own in groups.items()]
        attention, mlp = (_part(forecast, part, layers) for part in PARTS)
        rows = plan.config.block_size
        mlp = MLPLayers(
            **dict(mlp),
            token_blocks=block_count(whole.mlp_tokens(layers[0]), rows),
            block_size=rows,
            neurons=kind.intermediate_size,
            neurons_kept=_most(group.neurons for group in keep),
        )
        kinds.append(
            KindLayers(name=kind.name, layers=kind.layers, attention=attention, mlp=mlp, keep=keep)
        )
    return kinds


def _kept(plan: SparsityPlan, layer: int, part: Part) -> int | None:
    """Return the columns or neurons that a layer computes at a sparse step; None: it is dense."""
    if plan.is_dense() or not plan.is_sparse(layer, part):
        return None
    return kept_columns(plan, layer) if part == "attention" else plan.mlp_keep_count(layer)


def _part(forecast: Forecast, part: Part, layers: range) -> PartLayers:
    reasons, times = forecast.dense[part], forecast.times
    dense = Counter(reasons[layer] for layer in layers if layer in reasons)
    steps = [times[layer, part] for layer in layers if (layer, part) in times]
    step = max(steps, key=lambda time: time.sparse, default=None)
    return PartLayers(sparse=len(layers) - dense.total(), dense=dense, step=step)


def _most(counts: Iterable[int | None]) -> int | None:
    return max((count for count in counts if count is not None), default=None)


def _quality(forecast: Forecast) -> Quality:
    estimate = forecast.estimate
    return Quality(
        counts=forecast.action_counts,
        work=forecast.work,
        cache_bytes=forecast.cache_bytes,
        speedup_run=None if estimate is None else estimate.speedup_run,
    )


def _shared(forecast: Forecast, alone: Forecast) -> Shared:
    """Return what each process has, and how well they share it.

    Args:
        forecast: of the process with the largest share.
        alone: of one that has all.
    """
    sharing, efficiency, run = forecast.sharing, None, None
    assert sharing is not None
    together, single = forecast.estimate, alone.estimate
    if together is not None and single is not None:
        ranks = sharing.parallel.ranks
        efficiency = {
            action: single.steps[action] / (ranks * seconds)
            for action, seconds in together.steps.items()
            if single.steps[action] > 0
        }
        run = single.run / (ranks * together.run)
    return Shared(
        parallel=sharing.parallel,
        ranks=rank_forecasts(forecast, sharing),
        efficiency=efficiency,
        efficiency_run=run,
        alone=Alone(
            cache_bytes=alone.cache_bytes,
            steps=None if single is None else single.steps,
            run=None if single is None else single.run,
        ),
    )


def _check_memory(forecast: Forecast, profile: Profile, weights: int) -> None:
    """Raise `UserError` where nothing fits, and say what would help."""
    vram, working = profile.sparsity.memory.vram, forecast.working
    needed = f"weights {format_bytes(weights)}, working memory {format_bytes(working)}"
    if vram is not None and weights + working >= vram:
        raise UserError(
            f"--vram {format_bytes(vram)} does not hold the model and its work ({needed}); "
            "in Python, diffusers' enable_model_cpu_offload and enable_group_offload keep a part "
            "of the weights there at a time"
        )
    try:
        forecast.memory.check()
    except BudgetError as error:
        raise UserError(f"{error} ({needed})") from error


def _notes(
    request: Request,
    profile: Profile,
    forecast: Forecast,
    target: Target,
    weights: list[ComponentWeights],
) -> list[str]:
    model, plan, budgets = request.model, forecast.planned.plan, profile.sparsity.memory
    # Whatever is cached, it is told whether the model fits into --vram.
    unlimited = replace(plan, config=plan.config.override({"memory.vram": None}))
    notes = [
        *request.warnings,
        *unlimited.notes(on_cpu=target.device.type == "cpu"),
        forecast.why_untimed,
    ]
    if not target.here and budgets.vram is None:
        notes.append(NO_BUDGET)
    if not target.here and budgets.ram is None and forecast.memory.needs_host:
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
    return [note for note in notes if note is not None]

"""The forecast of a generation on a device, from configs alone: no weight is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch

from chipsparse.cli.errors import UserError
from chipsparse.cli.explain import record
from chipsparse.cli.model.description import ModelDescription, choose_device
from chipsparse.cli.model.weights import count_weights
from chipsparse.cli.options import GenerationOptions
from chipsparse.cli.plan import QUANTIZED, PlannedGeneration, fp8_weights, plan_generation
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.ranks import shared_by
from chipsparse.cli.request import Request, place_on, resolve
from chipsparse.common.byte_sizes import format_bytes
from chipsparse.config import PARTS, Action, Part
from chipsparse.experiments.clips import planned_share
from chipsparse.experiments.timing import measure_rates
from chipsparse.kernels.checks import block_count
from chipsparse.parallel.degrees import Parallel
from chipsparse.parallel.sequence_cut import with_largest_share
from chipsparse.pipelines.model_sizes import patch_sizes
from chipsparse.profiles.measured import measured_with
from chipsparse.profiles.profile import Profile
from chipsparse.profiles.published import published_psnr
from chipsparse.skip.why import listed_full
from chipsparse.sparse.cache import memory_plan
from chipsparse.sparse.cache.tensors import kept_bytes, with_caches
from chipsparse.sparse.cost_model import layer_times
from chipsparse.sparse.cost_model.exchanges import Sharing
from chipsparse.sparse.cost_model.run_times import RunEstimate, estimate_run
from chipsparse.sparse.plan_notes import plan_notes

# In the names of pipelines that always see reference images.
SEEING_IMAGES = ("Kontext", "ImageEdit", "ImageLayered")
FASTER_AND_FASTER = ("faithful", "balanced", "fast", "draft")
UNTIMED = "times are not estimated"


@dataclass(frozen=True)
class Forecast:
    """A generation as its configs tell it; of several processes, the one with the largest share."""

    planned: PlannedGeneration  # with the layout of that process
    working: int  # bytes of a transformer call besides weights and caches
    memory: memory_plan.MemoryPlan
    # Of a step, of what the config has sparse; empty where not known.
    times: Mapping[tuple[int, Part], layer_times.PartSeconds]
    dense: Mapping[Part, dict[int, str]]  # layers of each part that never run sparse, and why
    estimate: RunEstimate | None  # None where times are not known
    why_untimed: str | None
    sharing: Sharing | None  # None for one process

    def quality(self, model: ModelDescription) -> record.Quality:
        """Return the steps, the work, the caches, the speed-up, and what is published for it."""
        plan = self.planned.plan
        memory = self.memory
        estimate = self.estimate
        speedup = None if estimate is None else estimate.speedup_run
        published = None
        if speedup is not None and self.sharing is None:
            published = published_psnr(model.transformer_class, speedup, experts=model.experts)
        return record.Quality(
            counts=Counter(action.value for action in plan.actions()),
            work=planned_share(plan, self.dense),
            cache_bytes=memory.device_bytes + memory.host_bytes,
            speedup_run=speedup,
            published=published,
        )


class Forecaster:
    """Forecasts a request with any quality of its profile; ``weights``: bytes of all."""

    def __init__(self, request: Request, weights: int) -> None:
        self.request = request
        self.weights = weights
        # The first decide what runs dense, and times are estimated from the second ones.
        self.known: layer_times.Rates | None = None
        self.rates: layer_times.Rates | None = None
        self.why_untimed: str | None = None
        device = request.device
        dtype = request.dtype
        if device.type != "cuda":
            self.why_untimed = f"{UNTIMED}: the rates of this CPU are not known"
        elif dtype is torch.float32:
            self.why_untimed = f"{UNTIMED}: the known rates are those of 16-bit types"
        else:
            self.known = (
                layer_times.known_rates(device, dtype) if request.here else layer_times.Rates()
            )
            self.rates = self.known or measure_rates(device)

    def look_ahead(self, profile: Profile, parallel: Parallel | None) -> Forecast:
        """Return the forecast with a profile, shared by processes that can."""
        request = self.request
        dtype = self.request.dtype
        rates = self.known
        on_gpu = request.device.type == "cuda"
        planned = plan_generation(request.settings, request.model, profile)
        sharing = None if parallel is None else _sharing(request, planned, parallel)
        if sharing is not None and sharing.parallel.ulysses > 1:
            # All plan their memory as the one with the largest share.
            layout = with_largest_share(planned.plan.layout, sharing.cut)
            planned = replace(planned, plan=replace(planned.plan, layout=layout))
        plan = planned.plan
        layers = range(planned.plan.layout.layers)
        calls = planned.branches if sharing is None else sharing.calls
        captured = on_gpu and sharing is None and layer_times.captures(plan, dtype, rates)
        never = {(layer, part) for part in planned.never for layer in layers}
        form = fp8_weights(request.model)
        fp8 = {} if form is None else dict.fromkeys(layers, form)
        working = memory_plan.working_bytes(
            plan,
            dtype=dtype,
            captured=calls if captured else 0,
            fp8_mlps=fp8.keys(),
        )
        times: dict[tuple[int, Part], layer_times.PartSeconds] = {}
        slower: dict[tuple[int, Part], str] = {}
        if rates is not None:
            times = layer_times.part_times(
                plan,
                rates=rates,
                dtype=dtype,
                captured=captured,
                dense=never,
                fp8_mlps=fp8,
            )
            slower = layer_times.slower_parts(times, rates)
        budgets = plan.config.memory
        used: dict[str, Any] = {"working": working, "pending": self.weights}
        capacity = memory_plan.declared(budgets, **used)
        if request.here:
            capacity = memory_plan.available(budgets, request.device, **used)
        if parallel is not None:  # the processes of a machine share its memory
            on_device = capacity.device if on_gpu else capacity.device // parallel.ranks
            capacity = replace(capacity, device=on_device, host=capacity.host // parallel.ranks)
        demand = memory_plan.MemoryDemand(dtype, calls, dense=frozenset(never | slower.keys()))
        memory = memory_plan.plan_memory(plan, capacity, demand)
        reasons = {
            **memory.placement.dense,
            **slower,
            **{place: f"{why} in the profile" for place, why in plan.dense.items()},
            **{place: planned.never[place[1]] for place in never},
        }
        dense: dict[Part, dict[int, str]] = {part: {} for part in PARTS}
        for (layer, part), reason in sorted(reasons.items()):
            dense[part][layer] = reason
        if sharing is not None:
            sharing = replace(sharing, dense=frozenset(dense["attention"]))
        estimate = None
        why_untimed = self.why_untimed
        if self.rates is not None:
            estimate = estimate_run(
                plan,
                moved=partial(memory.placement.moved, plan.config),
                captured=captured and not memory.placement.host,
                dense_parts=dense,
                dtype=dtype,
                branches=planned.branches,
                rates=self.rates,
                sharing=sharing,
            )
            launch = self.rates.launch_seconds
            if estimate.stock < len(layers) * planned.branches * launch:
                estimate = None
                why_untimed = (
                    f"{UNTIMED}: a layer this small computes in less time than the host takes to "
                    f"launch a sparse one, about {launch * 1e3:.1f} ms"
                )
        return Forecast(planned, working, memory, times, dense, estimate, why_untimed, sharing)


def _sharing(request: Request, planned: PlannedGeneration, parallel: Parallel) -> Sharing:
    config = request.model.transformer_config
    channels = config.get("out_channels") or config.get("in_channels", 0)
    channels *= math.prod(patch_sizes(config))
    return Sharing(planned.plan, parallel, planned.branches, request.dtype, channels)


def explain(options: GenerationOptions, display: ProgressDisplay) -> record.Explanation:
    """Return what a generation would do; raise `UserError`. No weight is read."""
    if options.device == "auto":  # a GPU, even where there is none
        device = torch.device("cuda")
        here = torch.cuda.is_available()
    else:
        device = choose_device(options.device)
        here = True
    shared = shared_by(options.gpus or 1, options.guidance_parallel)
    parallel = shared if shared.ranks > 1 else None
    place = place_on(device, options, display, here=here, parallel=parallel)
    request = resolve(options, place, instead=None)
    profile = request.profile
    model = request.model
    assert profile is not None  # none is needed for the unpatched model alone
    weights = count_weights(model, request.dtype)
    weight_bytes = sum(size or 0 for size in weights.values())
    forecaster = Forecaster(request, weight_bytes)
    forecast = forecaster.look_ahead(profile, parallel)
    _check_memory(forecast, weight_bytes)
    planned = forecast.planned
    plan = forecast.planned.plan
    memory = forecast.memory
    measured = measured_with(profile, experts=model.experts)
    qualities = {
        name: forecaster.look_ahead(profile.of_quality(name), parallel).quality(model)
        for name in profile.qualities
    }
    layout = plan.layout
    on_host = 0 if device.type == "cuda" else memory.host_bytes
    return record.Explanation(
        model=model.location,
        pipeline_class=model.pipeline_class.__name__,
        transformer_class=model.transformer_class,
        profile=profile.source,
        quality=profile.quality,
        out_of_range=request.out_of_range,
        device=str(device),
        device_here=here,
        dtype=request.dtype_name,
        settings=request.settings,
        pixels=planned.pixels,
        branches=planned.branches,
        grids=layout.grids,
        tokens=layout.tokens,
        text_tokens=layout.text_tokens,
        attention_precision=plan.config.attention.precision,
        layers=_layers(forecast),
        schedule=plan.describe(),
        counts=Counter(action.value for action in plan.actions()),
        full_steps=listed_full(plan.schedule),
        measured_speed=measured.speed_text,
        measured_quality=measured.quality_text,
        weights=weights,
        memory=record.Memory(
            weights=weight_bytes,
            working=forecast.working,
            caches_wanted=memory.wanted,
            device=weight_bytes + forecast.working + memory.device_bytes + on_host,
            vram=plan.config.memory.vram,
            ram=plan.config.memory.ram,
            precision="fp8" if memory.in_fp8 else "model",
        ),
        caches={
            kept.field: sizes for kept, sizes in memory_plan.bytes_by_tensor(memory, layout).items()
        },
        estimate=forecast.estimate,
        shared=None
        if parallel is None
        else _shared(forecast, forecaster.look_ahead(profile, None)),
        qualities=qualities,
        notes=[*_notes(request, forecast, weights), *no_faster(qualities)],
    )


def no_faster(qualities: Mapping[str, record.Quality]) -> list[str]:
    """Return a sentence for each quality that gains no more than one that is closer to dense."""
    notes = []
    ordered = [name for name in FASTER_AND_FASTER if name in qualities]
    for closer, name in pairwise(ordered):
        before = qualities[closer]
        here = qualities[name]
        if before.speedup_run is not None and here.speedup_run is not None:
            is_faster = here.speedup_run > before.speedup_run
        else:
            is_faster = here.work < before.work
        if is_faster:
            continue
        work = f"{here.work:.0%} and {before.work:.0%} of the dense work"
        notes.append(
            f"{name} is no faster than {closer} here ({work}): of the steps, {name} skips "
            f"{here.counts.get('skip', 0)} and computes {here.counts.get('sparse', 0)} sparsely, "
            f"and {closer} skips {before.counts.get('skip', 0)}; a sparse step of this model "
            "saves little",
        )
    return notes


def _layers(forecast: Forecast) -> list[record.PartLayers]:
    """Return both parts of the layers, by the model's name for them."""
    plan = forecast.planned.plan
    layout = forecast.planned.plan.layout
    first = 0
    whole = replace(layout, share=None)  # of all processes together
    parts = []
    for kind in layout.kinds:
        layers = range(first, first + kind.layers)
        first += kind.layers
        for part in PARTS:
            keep: Callable[[int], int] = plan.mlp_keep_count
            rows = whole.mlp_tokens(layers[0])
            total = kind.intermediate_size
            if part == "attention":
                keep = partial(layer_times.kept_columns, plan)
                rows = len(layout.query_rows)
                total = layout.tokens
            kept: dict[int, list[int]] = {}
            for layer in layers:
                if not plan.is_dense() and plan.is_sparse(layer, part):
                    kept.setdefault(keep(layer), []).append(layer)
            known = forecast.times
            times = [known[layer, part] for layer in layers if (layer, part) in known]
            reasons = [why for layer, why in forecast.dense[part].items() if layer in layers]
            parts.append(
                record.PartLayers(
                    kind=kind.name,
                    part=part,
                    sparse=kind.layers - len(reasons),
                    dense=Counter(reasons),
                    blocks=block_count(rows, plan.config.block_size),
                    block_size=plan.config.block_size,
                    total=total,
                    kept=kept,
                    step=max(times, key=attrgetter("sparse"), default=None),
                ),
            )
    return parts


def _shared(forecast: Forecast, alone: Forecast) -> record.Shared:
    """Return what each process has, and how well they share it; ``alone``: of one for all."""
    sharing = forecast.sharing
    memory = forecast.memory
    assert sharing is not None
    config = with_caches(sharing.plan.config, in_fp8=memory.in_fp8)
    sent = {action: sharing.sent_bytes(action) for action in Action}
    ranks = []
    for number, rank in enumerate(sharing.ranks()):
        plan = replace(sharing.plan, config=config, layout=rank.layout)
        cache_bytes = sharing.calls * sum(
            kept_bytes(kept, layer, plan=plan, dtype=sharing.dtype)
            for (layer, _), sizes in {**memory.placement.device, **memory.placement.host}.items()
            for kept in sizes
        )
        ranks.append(
            record.RankForecast(
                rank=number,
                branch=rank.branch,
                heads=rank.layout.own.heads,
                tokens=rank.layout.own.tokens,
                cache_bytes=cache_bytes,
                sent_bytes={action: sizes[number] for action, sizes in sent.items()},
            ),
        )
    efficiency = run = None
    together = forecast.estimate
    single = alone.estimate
    if together is not None and single is not None:
        efficiency = {
            action: single.steps[action] / (len(ranks) * seconds)
            for action, seconds in together.steps.items()
            if single.steps[action] > 0
        }
        run = single.run / (len(ranks) * together.run)
    return record.Shared(
        parallel=sharing.parallel,
        ranks=ranks,
        efficiency=efficiency,
        efficiency_run=run,
    )


def _check_memory(forecast: Forecast, weights: int) -> None:
    """Raise `UserError` where nothing fits, and say what would help."""
    vram = forecast.planned.plan.config.memory.vram
    working = forecast.working
    needed = f"weights {format_bytes(weights)}, working memory {format_bytes(working)}"
    if vram is not None and weights + working >= vram:
        raise UserError(
            f"--vram {format_bytes(vram)} does not hold the model and its work ({needed}); "
            "in Python, diffusers' enable_model_cpu_offload and enable_group_offload keep a part "
            "of the weights there at a time",
        )
    try:
        forecast.memory.check()
    except memory_plan.BudgetError as error:
        raise UserError(f"{error} ({needed})") from error


def _notes(request: Request, forecast: Forecast, weights: Mapping[str, int | None]) -> list[str]:
    model = request.model
    plan = forecast.planned.plan
    profile = request.profile
    assert profile is not None
    # Whatever is cached, it is told whether the model fits into --vram.
    unlimited = replace(plan, config=plan.config.override({"memory.vram": None}))
    budgets = plan.config.memory
    away = not request.here
    unknown = ", ".join(name for name, size in weights.items() if size is None)
    remarks = {
        "planned for a GPU without limit; give --vram to see what fits": (
            away and budgets.vram is None
        ),
        "host memory is what this machine has free; give --ram for another one": (
            away and budgets.ram is None and forecast.memory.needs_host
        ),
        f"the weights of {unknown} are not counted: no config.json there": bool(unknown),
        "the transformer's weights are counted, and its linears timed, as if they were not "
        "quantized": QUANTIZED in model.transformer_config,
        "the second expert takes over with a dense step and a refresh of its own, which are not "
        "counted; the first one's caches are freed by then": (model.experts > 1),
        "the tokens of a reference image are not counted": any(
            word in model.pipeline_class.__name__ for word in SEEING_IMAGES
        ),
    }
    notes = [
        *request.warnings,
        forecast.planned.skipping,
        *plan_notes(unlimited, base=profile.base, on_cpu=request.device.type == "cpu"),
        forecast.why_untimed,
        *(remark for remark, holds in remarks.items() if holds),
    ]
    return [note for note in notes if note is not None]

"""The work of `chipsparse tune`: check, search, and write the profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch

import chipsparse
from chipsparse.cli.errors import UserError
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.model.weights import weights_digest
from chipsparse.cli.plan import called_steps
from chipsparse.cli.profiles import write_profile
from chipsparse.cli.prompts import read_prompts, shapes
from chipsparse.cli.ranks import called, meet, start_others, this_rank
from chipsparse.cli.request import Request, range_of, resolve, working
from chipsparse.cli.settings import GenerationSettings
from chipsparse.cli.tune.lab import TuneLab, calibrated
from chipsparse.cli.tune.options import TuneOptions
from chipsparse.cli.tune.record import TunedResult
from chipsparse.cli.tune.unreachable import unreachable_text
from chipsparse.cli.views.terminal import print_result
from chipsparse.config import CaptureMode
from chipsparse.cost_model.layer_times import as_of_many
from chipsparse.experiments.clips import ClipMaker
from chipsparse.experiments.engine import Experiment, config_digest
from chipsparse.experiments.lpips import Lpips, find_lpips
from chipsparse.experiments.samples import Sample
from chipsparse.experiments.store import Store
from chipsparse.parallel.degrees import Parallel
from chipsparse.profiles.profile import ASSETS, Profile
from chipsparse.profiles.tuned_range import TunedFor, Versions, digest, target_text
from chipsparse.tuning.forms import USUAL_DENSITY
from chipsparse.tuning.search import Search, Tried, Unreachable
from chipsparse.tuning.targets import measurement

LEAST_STEPS = 4


def run(options: TuneOptions) -> None:
    """Check all that is cheap to check, then measure, search, write the profile, and tell."""
    rank = this_rank(options)
    with working(options, rank) as (model, device, dtype, display):
        request = resolve(
            options,
            model=model,
            device=device,
            dtype=dtype,
            parallel=rank.parallel,
            instead="a schedule is tuned on prompts alone",
        )
        profile, settings = request.profile, request.settings
        assert profile is not None
        if rank.starts:
            return start_others("tune", options, rank.ranks)
        steps = called_steps(settings, model)
        if steps < LEAST_STEPS:
            raise UserError(f"tune needs at least {LEAST_STEPS} denoising steps, got {steps}")
        samples = choose_samples(options, video=model.accepts("num_frames"))
        lpips = _lpips(options, settings)
        tuned = _tuned_for(options, model, settings, device, dtype)
        facts = called(options, profile, prompts=[sample.prompt for sample in samples])
        rank = meet(rank, device, facts)
        common = about(tuned, model, profile, options, rank.parallel)
        store = Store(options.results_file, common, kind="tuning", ranks=rank)
        maker = ClipMaker(
            request.load,
            partial(settings.pipeline_call, negative_prompt=options.negative_prompt),
            settings.num_inference_steps,
            display,
            plain_lines=1,
        )
        lab = TuneLab(
            Experiment(
                maker, samples, store, dense=calibrated(rank.parallel), lpips=lambda *_: lpips
            ),
            profile.sparsity,
            options.calibration_prompts,
            options.budget,
            settings.num_inference_steps - steps,
            _capture_mode(request, profile),
            lpips.measure is not None,
        )
        _note(store, options, samples, None)
        display.tell(
            f"the search takes at most the time of {options.budget:g} dense generations "
            f"(--budget), {len(samples)} of them dense"
        )
        search = Search(
            lab,
            profile.sparsity,
            steps,
            options.target,
            calibrating=options.calibration_prompts,
            held_out=options.held_out_prompts,
            budget=options.budget,
        )
        try:
            best = search.run()
        except Unreachable as error:
            raise UserError(unreachable_text(options.target, error, options.budget)) from error
        _note(store, options, samples, best)
        tuned = dataclasses.replace(tuned, measured=measurement(best.pairs))
        config = best.candidate.config
        if not rank.writes:
            return None
        write_profile(
            options.output,
            command="tune",
            model_class=model.transformer_class,
            description=f"{tuned.model}, tuned for {target_text(vars(tuned.target))}.",
            settings=settings,
            config=config,
            tuned=tuned,
        )
    result = TunedResult(
        profile=str(options.output),
        results=str(options.results_file),
        schedule=best.candidate.describe,
        actions=best.pairs[0].actions,
        full=best.candidate.steps.full,
        sparse=best.candidate.steps.sparse or (),
        tuned=tuned.to_dict(),
        sparsity=dataclasses.asdict(config),
        configs_tried=lab.candidates,
    )
    print_result(result, as_json=options.json)


def _capture_mode(request: Request, profile: Profile) -> CaptureMode:
    """The mode in which a few sparse steps run as those of such generations do."""
    planned = request.planned
    if planned is None:
        return profile.sparsity.cuda_graphs
    config = planned.plan.config.override(
        {
            "attention.density": USUAL_DENSITY,
            "schedule": {"actions": ["dense", "refresh", "sparse"]},
        }
    )
    return as_of_many(
        config, dataclasses.replace(planned.plan, config=config), request.dtype
    ).cuda_graphs


def choose_samples(options: TuneOptions, *, video: bool) -> list[Sample]:
    """Return different prompts, those to calibrate with first; the seed of each is its number."""
    file = options.prompts or ASSETS / "prompts" / shapes(video=video)
    texts = list(dict.fromkeys(read_prompts(file)))
    first, others = options.calibration_prompts, options.held_out_prompts
    if len(texts) < first + others:
        raise UserError(
            f"{file} has {len(texts)} different prompts, but {first + others} are needed: {first} "
            f"to calibrate with and {others} others to verify on (--calibration-prompts, "
            "--held-out-prompts)"
        )
    return [Sample(seed, text, seed) for seed, text in enumerate(texts[: first + others])]


def _note(
    store: Store, options: TuneOptions, samples: Sequence[Sample], best: Tried | None
) -> None:
    """Keep what is searched for, and what was chosen, for the page of `report`."""
    target = {name: value for name, value in vars(options.target).items() if value is not None}
    name = ", ".join(f"{each} {value:g}" for each, value in target.items())
    content: dict[str, Any] = {
        "target": target,
        "held_out": [sample.prompt for sample in samples[options.calibration_prompts :]],
        "chosen": None,
    }
    if best is not None:
        content["chosen"] = {
            "config": config_digest(best.candidate.config),
            "form": best.candidate.describe,
            "density": best.candidate.form.density,
            "actions": list(best.pairs[0].actions),
        }
    elif name in store.notes:
        return
    store.note(name, content)


def _lpips(options: TuneOptions, settings: GenerationSettings) -> Lpips:
    if options.max_lpips is None:
        return Lpips(None, "not asked for")
    lpips = find_lpips(settings.height or 1 << 20, settings.width or 1 << 20)
    if lpips.measure is None:
        raise UserError(f"--max-lpips cannot be measured here: {lpips.why_not}; use --min-psnr")
    return lpips


def _tuned_for(
    options: TuneOptions,
    model: ModelDescription,
    settings: GenerationSettings,
    device: torch.device,
    dtype: torch.dtype,
) -> TunedFor:
    return TunedFor(
        model=Path(model.location).name if Path(model.location).exists() else model.location,
        transformer_config=digest(model.transformer_config),
        **range_of(settings, options.flow_shift, device, dtype),
        versions=Versions(
            chipsparse.__version__, str(torch.__version__), str(diffusers.__version__)
        ),
        target=options.target,
    )


def about(
    tuned: TunedFor,
    model: ModelDescription,
    profile: Profile,
    options: TuneOptions,
    parallel: Parallel | None,
) -> dict[str, Any]:
    """What all measurements of a results file have in common."""
    facts = tuned.to_dict()
    del facts["target"], facts["measured"]
    versions = facts.pop("versions")
    config = dataclasses.asdict(profile.sparsity)
    # What is tuned. Memory stays: it changes no result, but what steps take.
    del config["schedule"], config["attention"]["density"]
    return {
        **({} if parallel is None else dataclasses.asdict(parallel)),
        **versions,
        **facts,
        "transformer_class": model.transformer_class,
        "pipeline_class": model.pipeline_class.__name__,
        "weights": weights_digest(model),
        "max_sequence_length": profile.generation.max_sequence_length,
        "negative_prompt": options.negative_prompt,
        "first_dense_layers": profile.sparsity.schedule.first_dense_layers,
        **_flat(config),
    }


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        flat |= _flat(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return flat

"""The work of `chipsparse tune`: check, search, and write the profile."""

from __future__ import annotations

import dataclasses
from typing import Any

from chipsparse.cli.errors import UserError
from chipsparse.cli.launching import called, start_others
from chipsparse.cli.plan import called_steps, never_sparse
from chipsparse.cli.profiles import write_profile
from chipsparse.cli.prompts import read_prompts, shapes
from chipsparse.cli.ranks import meet, this_rank
from chipsparse.cli.request import Request, resolve, working
from chipsparse.cli.tune.lab import TuneLab, calibrated
from chipsparse.cli.tune.options import TuneOptions
from chipsparse.cli.tune.record import Chosen, TunedResult, quality_text, time_text
from chipsparse.cli.views.terminal import print_result
from chipsparse.config import CaptureMode, SparsityConfig
from chipsparse.experiments.engine import Experiment, config_digest
from chipsparse.experiments.lpips import Lpips, find_lpips
from chipsparse.experiments.samples import Sample
from chipsparse.experiments.store import Store
from chipsparse.profiles.profile import ASSETS
from chipsparse.profiles.tuned_range import TunedFor, TunedTarget, target_text
from chipsparse.sparse.cost_model.layer_times import as_of_many
from chipsparse.tuning.forms import DENSITIES
from chipsparse.tuning.search import Search, Unreachable
from chipsparse.tuning.targets import measurement

LEAST_STEPS = 4


def run(options: TuneOptions) -> None:
    """Check all that is cheap to check, then measure, search, write the profile, and print."""
    rank = this_rank(options.gpus, options.guidance_parallel)
    with working(options, rank) as (place, display):
        request = resolve(options, place, instead="a schedule is tuned on prompts alone")
        model = request.model
        profile = request.profile
        settings = request.settings
        assert profile is not None
        if rank.starts:
            start_others("tune", options, rank.ranks)
            return
        steps = called_steps(settings, model)
        if steps < LEAST_STEPS:
            raise UserError(f"tune needs at least {LEAST_STEPS} denoising steps, got {steps}")
        samples = _samples(options, video=model.accepts("num_frames"))
        lpips = _lpips(options, request)
        tuned = _tuned_for(options, request)
        facts = called(options, profile, prompts=[sample.prompt for sample in samples])
        rank = meet(rank, place.device, facts)
        maker = request.maker(display, plain_lines=1)
        common = _common_facts(request, profile.sparsity)
        store = Store(options.results_file, common, kind="tuning", ranks=rank)
        lab = TuneLab(
            Experiment(
                maker,
                samples,
                store,
                dense=calibrated(rank.parallel),
                lpips=lambda *_: lpips,
            ),
            profile.sparsity,
            options,
            settings.num_inference_steps - steps,
            _capture_mode(request, profile.sparsity),
            can_sparse_mlps="mlp" not in never_sparse(model),
        )
        places = range(len(samples))
        first = options.calibration_prompts
        # For the page of `report`: what is searched for, and in the end what was chosen.
        target = {name: value for name, value in options.target.items() if value is not None}
        name = ", ".join(f"{key} {value:g}" for key, value in target.items())
        held_out = [sample.prompt for sample in samples[first:]]
        note: dict[str, Any] = {"target": target, "held_out": held_out, "chosen": None}
        if name not in store.notes:
            store.note(name, note)
        display.tell(
            f"the search takes at most the time of {options.budget:g} dense generations "
            f"(--budget), {len(samples)} of them dense",
        )
        prompts = {"calibrating": places[:first], "held_out": places[first:]}
        search = Search(
            lab,
            profile.sparsity,
            steps,
            tuned.target,
            **prompts,
            budget=options.budget,
        )
        try:
            best = search.run()
        except Unreachable as error:
            raise UserError(_unreachable_text(options, error)) from error
        candidate = best.candidate
        measured = measurement(best.pairs)
        chosen = Chosen.model_validate(
            {
                "config": config_digest(candidate.config),
                "form": candidate.describe,
                "density": candidate.form.density,
                "actions": best.pairs[0].actions,
                "measured": measured,
            },
        )
        store.note(name, {**note, "chosen": chosen.model_dump(mode="json")})
        if not rank.writes:
            return
        write_profile(
            options.output,
            request,
            command="tune",
            description=f"{tuned.model}, tuned for {target_text(target)}.",
            config=candidate.config,
            tuned=dataclasses.replace(tuned, measured=measured),
        )
    tried = {clip.get("facts", {}).get("config") for clip in store.measured.values()} - {None}
    result = TunedResult(
        profile=str(options.output),
        results=str(options.results_file),
        chosen=chosen,
        sparsity=candidate.config.words(),
        configs_tried=len(tried),
    )
    print_result(result, as_json=options.json)


def _unreachable_text(options: TuneOptions, error: Unreachable) -> str:
    """Return a sentence about a target that nothing meets: the closest, and how to go on."""
    best = measurement(error.best.pairs)
    cannot = "cannot be met here"
    more = ""
    if error.out_of_budget:
        cannot = f"was not found within --budget {options.budget:g}"
        more = ", or give a larger --budget"
    return (
        f"{target_text(options.target)} {cannot}: the closest on the held-out prompts "
        f"({error.best.candidate.describe}) has {quality_text(best)}, and takes "
        f"{time_text(best)}; ask for less{more}: what was measured is kept"
    )


def _capture_mode(request: Request, config: SparsityConfig) -> CaptureMode:
    """Return the mode in which a few sparse steps run as those of such generations do."""
    if request.planned is None:
        return config.cuda_graphs
    plan = request.planned.plan
    few = {"actions": ["dense", "refresh", "sparse"]}
    config = plan.config.override({"attention.density": DENSITIES[0], "schedule": few})
    return as_of_many(config, dataclasses.replace(plan, config=config), request.dtype).cuda_graphs


def _samples(options: TuneOptions, *, video: bool) -> list[Sample]:
    """Return different prompts, those to calibrate with first; the seed of each is its number."""
    file = options.prompts or ASSETS / "prompts" / shapes(video=video)
    texts = list(dict.fromkeys(read_prompts(file)))
    first = options.calibration_prompts
    others = options.held_out_prompts
    if len(texts) < first + others:
        raise UserError(
            f"{file} has {len(texts)} different prompts, but {first + others} are needed: {first} "
            f"to calibrate with and {others} others to verify on (--calibration-prompts, "
            "--held-out-prompts)",
        )
    return [Sample(seed, text, seed) for seed, text in enumerate(texts[: first + others])]


def _lpips(options: TuneOptions, request: Request) -> Lpips:
    if options.max_lpips is None:
        return Lpips(None, "not asked for")
    lpips = find_lpips(request.settings.height or 1 << 20, request.settings.width or 1 << 20)
    if lpips.measure is None:
        raise UserError(f"--max-lpips cannot be measured here: {lpips.why_not}; use --min-psnr")
    return lpips


def _tuned_for(options: TuneOptions, request: Request) -> TunedFor:
    facts = request.facts
    return TunedFor(
        model=facts["model"],
        transformer_config=facts["transformer_config"],
        **request.tuned_facts,
        versions={name: facts["versions"][name] for name in ("chipsparse", "torch", "diffusers")},
        target=TunedTarget(**options.target),
    )


def _common_facts(request: Request, sparsity: SparsityConfig) -> dict[str, Any]:
    """Return the facts that all measurements of a results file have in common."""
    config = sparsity.words()
    # What is tuned. Memory stays: it changes no result, but what steps take.
    del config["schedule"], config["attention"]["density"]
    for group in ("attention", "mlp", "memory"):
        config |= {f"{group}.{field}": value for field, value in config.pop(group).items()}
    return {
        **request.measured_with,
        "negative_prompt": request.options.negative_prompt,
        **config,
    }

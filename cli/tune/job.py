"""The work of `chipsparse tune`: check, search, and write the profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch

import chipsparse
from chipsparse.cli.commands.tune import TuneOptions
from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.generation.generator import Generator
from chipsparse.cli.generation.lpips import find_lpips
from chipsparse.cli.model.description import ModelDescription, load_pipeline
from chipsparse.cli.model.schedulers import shifted_scheduler
from chipsparse.cli.model.weight_files import weights_digest
from chipsparse.cli.planning.planned import called_steps, planned_if_known
from chipsparse.cli.planning.profile_file import write_profile
from chipsparse.cli.planning.profile_range import range_of
from chipsparse.cli.planning.request import check_prompt_is_enough, requested, required_profile
from chipsparse.cli.planning.settings import GenerationSettings, resolve_settings
from chipsparse.cli.prompts import Prompt, read_prompts, shapes
from chipsparse.cli.ranks.joined import Joined
from chipsparse.cli.ranks.several import met
from chipsparse.cli.results import NO_JSON, fields_json
from chipsparse.cli.tune.lab import TuneLab, config_digest
from chipsparse.cli.tune.shared_results import SharedResults
from chipsparse.cli.tune.unreachable import unreachable_text
from chipsparse.cli.work_progress import WorkProgress
from chipsparse.config import CaptureMode
from chipsparse.cost_model.layer_times import as_of_many
from chipsparse.experiments.quality import PerceptualDistance
from chipsparse.parallel.degrees import Parallel
from chipsparse.profiles.profile import ASSETS, Profile
from chipsparse.profiles.tuned_range import TunedFor, Versions, digest, target_text
from chipsparse.tuning.results_file import ResultsError, ResultsFile, ResultsWriteError
from chipsparse.tuning.search import Search, Tried, Unreachable
from chipsparse.tuning.targets import measurement

LEAST_STEPS = 4


@dataclass(frozen=True)
class Tuned:
    """A finished search.

    Attributes:
        results: the file with the measurements.
        found: what was chosen, and what was measured.
        configs_tried: how many configs were generated with, now or before.
    """

    profile: Path
    results: Path
    found: Tried = field(metadata=NO_JSON)
    tuned: TunedFor
    configs_tried: int

    def to_json(self) -> dict[str, Any]:
        """What was chosen, with the whole config."""
        return {
            **fields_json(self),
            "schedule": self.found.candidate.describe,
            "actions": self.found.pairs[0].actions,
            "sparsity": self.found.candidate.config,
        }


def run(options: TuneOptions, process: Joined) -> Tuned:
    """Checks all that is cheap to check, then measures, searches and writes.

    Args:
        process: this one, of those that generate together. The first one keeps what is measured,
            compares and writes.
    """
    try:
        with user_errors(ResultsWriteError):
            return _run(options, process)
    except ResultsError as error:  # an older file may be of any weights
        text = str(error).replace("weights null,", "weights that it does not name,")
        raise UserError(text) from error


def _run(options: TuneOptions, process: Joined) -> Tuned:
    with requested(options, process) as request:
        model, device, dtype, display = request
        profile = required_profile(options, model)
        settings = resolve_settings(options, model, profile.generation)
        check_prompt_is_enough(model, "a schedule is tuned on prompts alone")
        scheduler = shifted_scheduler(model, options.flow_shift)
        steps = called_steps(settings, model)
        if steps < LEAST_STEPS:
            raise UserError(f"tune needs at least {LEAST_STEPS} denoising steps, got {steps}")
        prompts = choose_prompts(options, video=model.accepts("num_frames"))
        lpips = _lpips(options, settings)
        tuned = _tuned_for(options, model, settings, device, dtype)
        process = met(process, options, request, [profile], prompts)
        common = about(tuned, model, profile, options, process.parallel)
        results = SharedResults(options.results_file, common, process)
        generator = Generator(
            lambda: load_pipeline(model, device=device, dtype=dtype, scheduler=scheduler),
            settings,
            WorkProgress(display),
            options.negative_prompt,
            plain_lines=1,
        )
        lab = TuneLab(
            generator,
            profile.sparsity,
            prompts,
            options.calibration_prompts,
            results,
            options.budget,
            lpips,
            settings.num_inference_steps - steps,
            _capture_mode(options, model, profile, dtype),
            process,
        )
        _keep(results, options, prompts, None)
        display.tell(
            f"the search takes at most the time of {options.budget:g} dense generations "
            f"(--budget), {len(prompts)} of them dense"
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
            found = search.run()
        except Unreachable as error:
            raise UserError(unreachable_text(options.target, error, options.budget)) from error
    _keep(results, options, prompts, found)
    tuned = dataclasses.replace(tuned, measured=measurement(found.pairs))
    config = found.candidate.config
    if process.writes:
        write_profile(
            options.output,
            command="tune",
            model_class=model.transformer_class,
            description=f"{tuned.model}, tuned for {target_text(vars(tuned.target))}.",
            settings=settings,
            config=config,
            tuned=tuned,
        )
    return Tuned(options.output, options.results_file, found, tuned, lab.candidates)


def _capture_mode(
    options: TuneOptions, model: ModelDescription, profile: Profile, dtype: torch.dtype
) -> CaptureMode:
    """The mode in which a few sparse steps run as those of such generations do."""
    planned = planned_if_known(options, model, profile)
    if planned is None:
        return profile.sparsity.cuda_graphs
    config = planned.plan.config.override(
        {"attention.enabled": True, "schedule": {"actions": ["dense", "refresh", "sparse"]}}
    )
    return as_of_many(config, dataclasses.replace(planned.plan, config=config), dtype).cuda_graphs


def choose_prompts(options: TuneOptions, *, video: bool) -> list[Prompt]:
    """Different prompts, those to calibrate with first; the seed of each is its number."""
    file = options.prompts or ASSETS / "prompts" / shapes(video=video)
    texts = list(dict.fromkeys(read_prompts(file)))
    first, others = options.calibration_prompts, options.held_out_prompts
    if len(texts) < first + others:
        raise UserError(
            f"{file} has {len(texts)} different prompts, but {first + others} are needed: {first} "
            f"to calibrate with and {others} others to verify on (--calibration-prompts, "
            "--held-out-prompts)"
        )
    return [Prompt(seed, text, seed) for seed, text in enumerate(texts[: first + others])]


def _keep(
    results: ResultsFile, options: TuneOptions, prompts: Sequence[Prompt], found: Tried | None
) -> None:
    """Keeps what is searched for, and what was chosen, for the page of `report`."""
    target = {name: value for name, value in vars(options.target).items() if value is not None}
    name = ", ".join(f"{each} {value:g}" for each, value in target.items())
    content: dict[str, Any] = {
        "target": target,
        "held_out": [prompt.name for prompt in prompts[options.calibration_prompts :]],
        "chosen": None,
    }
    if found is not None:
        content["chosen"] = {
            "config": config_digest(found.candidate.config),
            "form": found.candidate.describe,
            "density": found.candidate.form.density,
            "actions": list(found.pairs[0].actions),
        }
    elif results.search(name) is not None:
        return
    results.keep_search(name, content)


def _lpips(options: TuneOptions, settings: GenerationSettings) -> PerceptualDistance | None:
    if options.max_lpips is None:
        return None
    found = find_lpips(settings.height or 1 << 20, settings.width or 1 << 20)
    if found.measure is None:
        raise UserError(f"--max-lpips cannot be measured here: {found.why_not}; use --min-psnr")
    return found.measure


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

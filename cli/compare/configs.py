"""Two configs against the stock model and against each other, over prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import chipsparse
from chipsparse.cli.commands.compare import CompareOptions
from chipsparse.cli.compare.files import ComparisonClip
from chipsparse.cli.compare.paired_runs import SIDES, PairedRuns, Side, WorstClips, run_prompts
from chipsparse.cli.compare.statistics import statistics
from chipsparse.cli.compare.subjects import Subject
from chipsparse.cli.errors import UserError
from chipsparse.cli.generation.generator import Generator
from chipsparse.cli.generation_options import GenerationOptions
from chipsparse.cli.media import write as media
from chipsparse.cli.media.panels import difference_rows, stack_panels
from chipsparse.cli.model.description import ModelDescription, load_pipeline
from chipsparse.cli.model.schedulers import shifted_scheduler
from chipsparse.cli.planning import profile_range
from chipsparse.cli.planning.request import (
    check_prompt_is_enough,
    look_up,
    requested,
    required_profile,
)
from chipsparse.cli.planning.settings import (
    OPTION_OF,
    GenerationSettings,
    resolve_settings,
)
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.prompts import Prompt, first_prompts, shapes
from chipsparse.cli.ranks.joined import Joined
from chipsparse.cli.ranks.several import check_shared, met
from chipsparse.cli.results import fields_json
from chipsparse.cli.wording import counted, sharing_text
from chipsparse.cli.work_progress import WorkProgress
from chipsparse.experiments.statistics import LEAST_VALUES, LEVEL, RESAMPLES
from chipsparse.parallel.degrees import Parallel
from chipsparse.profiles.profile import Profile

BUNDLED_COUNT = 8  # prompts, where no file of them is given


@dataclass(frozen=True)
class ConfigsComparison:
    """What `chipsparse compare` found out about two configs.

    Attributes:
        subjects: A and B as they were typed.
        profiles: of A and B; None for the stock model.
        flow_shift: of the scheduler; None for its own.
        range_notes: that the profile of A or B was tuned for other ones, a sentence.
        parallel: the processes that made all clips together, dense ones too; None for one.
        clip: of the worst prompt, if one was asked for.
        unwritten: why the clip could not be written.
    """

    model: ModelDescription
    device: torch.device
    dtype: torch.dtype
    subjects: tuple[Subject, Subject]
    profiles: dict[Side, Profile | None]
    settings: GenerationSettings
    flow_shift: float | None
    range_notes: dict[Side, str]
    parallel: Parallel | None
    runs: PairedRuns
    clip: ComparisonClip | None
    unwritten: str | None

    def to_json(self) -> dict[str, Any]:
        """Every generation, and means and medians with their intervals."""
        found = statistics(self.runs.prompts)
        sides = zip(SIDES, self.subjects, self.profiles.values(), strict=True)
        shown = None
        if self.clip is not None:
            shown = {**fields_json(self.clip), "prompt": self.runs.worst.index}
        return {
            "chipsparse": chipsparse.__version__,
            "mode": "configs",
            "model": self.model.location,
            "transformer_class": self.model.transformer_class,
            "device": self.device,
            "dtype": self.dtype,
            "settings": self.settings,
            "flow_shift": self.flow_shift,
            "parallel": self.parallel,
            "configs": {
                side: {"name": subject.text, "profile": None if profile is None else profile.source}
                for side, subject, profile in sides
            },
            "reference": "dense",
            "interrupted": self.runs.interrupted,
            "interval": {"level": LEVEL, "resamples": RESAMPLES, "method": "bootstrap percentile"},
            "A": found["A"],
            "B": found["B"],
            "B - A": found["B - A"],
            "lpips_missing": self.runs.lpips.why_not,
            "clip": shown,
            "notes": list(notes(self)),
            "prompts": self.runs.prompts,
        }


def compare_configs(options: CompareOptions, process: Joined) -> ConfigsComparison | None:
    """Checks all that is cheap to check, then generates, compares and writes.

    Args:
        process: this one, of those that make the clips together. The first one compares and
            writes; the others return None.
    """
    with requested(options, process) as request:
        model, device, dtype, display = request
        check_prompt_is_enough(model, "configs are compared on prompts alone")
        profiles = profiles_of(options, model)
        settings = _common_settings(options, model, profiles)
        scheduler = shifted_scheduler(model, options.flow_shift)
        video = model.accepts("num_frames")
        prompts = _prompts(options, video=video)
        if options.output is not None:
            media.check_kind(options.output, video=video)
        range_notes: dict[Side, str] = {}
        for side, profile in profiles.items():
            if profile is None:
                continue
            differences = profile_range.out_of_range(
                profile, model, settings, device, dtype, flow_shift=options.flow_shift
            )
            if differences:
                range_notes[side] = profile_range.sentence(profile, differences)
                display.tell(f"chipsparse: warning: {range_notes[side]}")
        generator = Generator(
            lambda: load_pipeline(model, device=device, dtype=dtype, scheduler=scheduler),
            settings,
            WorkProgress(display),
        )
        process = met(process, options, request, profiles.values(), prompts)
        runs = run_prompts(generator, profiles, prompts, process)
        if runs is None:
            return None
        clip, unwritten = None, None
        if options.output is not None:
            try:
                with display.stage(f"writing {options.output}"):
                    clip = _write_clip(runs.worst, options.output, options)
            except UserError as error:  # the numbers took longer than the clip
                unwritten = str(error)
    return ConfigsComparison(
        model=model,
        device=device,
        dtype=dtype,
        subjects=options.subjects,
        profiles=profiles,
        settings=settings,
        flow_shift=options.flow_shift,
        range_notes=range_notes,
        parallel=process.parallel,
        runs=runs,
        clip=clip,
        unwritten=unwritten,
    )


def _prompts(options: CompareOptions, *, video: bool) -> list[Prompt]:
    found = first_prompts(
        options.prompts,
        bundled=shapes(video=video),
        usual=BUNDLED_COUNT,
        count=options.count,
        seed=options.seed,
    )
    if len(found) < LEAST_VALUES:
        raise UserError(
            f"{options.prompts} has {counted(len(found), 'prompt')}; intervals need at least "
            f"{LEAST_VALUES}, one a line"
        )
    return found


def check_configs_shared(
    options: CompareOptions, parallel: Parallel, display: ProgressDisplay
) -> None:
    """Raises `UserError` where so many processes cannot share it; loads no weight."""
    model = look_up(options, display)
    _ = shifted_scheduler(model, options.flow_shift)  # which raises where it has no flow shift
    for profile in profiles_of(options, model).values():
        check_shared(options, model, profile, parallel)


def profiles_of(options: CompareOptions, model: ModelDescription) -> dict[Side, Profile | None]:
    """The profiles of A and B; None for the stock model."""
    found: dict[Side, Profile | None] = {}
    for side, subject in zip(SIDES, options.subjects, strict=True):
        taken = dataclasses.replace(options, config=subject.path, quality=subject.quality)
        found[side] = None if subject.kind == "dense" else required_profile(taken, model)
    return found


def _common_settings(
    options: GenerationOptions, model: ModelDescription, profiles: dict[Side, Profile | None]
) -> GenerationSettings:
    """The settings that both configs ask for; raises `UserError` where they ask for others."""
    found = [
        resolve_settings(options, model, profile.generation)
        for profile in profiles.values()
        if profile is not None
    ]
    first, last = (dataclasses.asdict(settings) for settings in (found[0], found[-1]))
    for name, value in first.items():
        if value != last[name]:
            option = OPTION_OF.get(name)
            way = f"give {option}" if option else "make them the same in both files"
            raise UserError(
                f"A generates with {name} {value} and B with {last[name]}; clips of other "
                f"settings do not compare: {way}"
            )
    return found[0]


def _write_clip(worst: WorstClips, output: Path, options: CompareOptions) -> ComparisonClip:
    others = [
        (worst.frames[side], f"{side}: {Path(subject.text).stem}")
        for side, subject in zip(SIDES, options.subjects, strict=True)
        if subject.kind != "dense"
    ]
    rows, factor = difference_rows((worst.frames["dense"], "dense"), others, factor=options.amplify)
    written = media.write_media({output: stack_panels(rows)}, fps=options.rate)
    return ComparisonClip(written[output], factor)


def notes(comparison: ConfigsComparison) -> Iterator[str]:
    """What to know beside the numbers, one sentence each."""
    runs = comparison.runs
    count = len(runs.prompts)
    if runs.interrupted:
        yield f"interrupted: of {runs.asked} prompts, the first {count} are compared"
    if comparison.parallel is not None:
        yield f"dense and both configs ran on the same GPUs: {sharing_text(comparison.parallel)}"
    if count < 10:
        yield f"intervals from {count} prompts are rough and tend to be too narrow; use more"
    yield from (f"{side}: {sentence}" for side, sentence in comparison.range_notes.items())
    for side in SIDES:
        fallbacks = [line for each in runs.prompts for line in each.sides[side].fallbacks]
        yield from (f"{side}: {line}" for line in dict.fromkeys(fallbacks))

"""Two configs against the stock model and against each other, over prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
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
from chipsparse.cli.media import write as media
from chipsparse.cli.media.panels import difference_rows, stack_panels
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.profiles import out_of_range_text
from chipsparse.cli.prompts import Prompt, first_prompts, shapes
from chipsparse.cli.ranks import Rank, called, meet, start_others
from chipsparse.cli.request import Request, Work, resolve, working
from chipsparse.cli.results import fields_json
from chipsparse.cli.settings import OPTION_OF, GenerationSettings
from chipsparse.cli.wording import counted, sharing_text
from chipsparse.cli.work_progress import WorkProgress
from chipsparse.experiments.clips import ClipMaker
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


def compare_configs(options: CompareOptions, process: Rank) -> ConfigsComparison | None:
    """Checks all that is cheap to check, then generates, compares and writes.

    Args:
        process: this one, of those that make the clips together. The first one compares and
            writes; the others return None.
    """
    with working(options, process) as work:
        model, device, dtype, display = work
        requests = _requests(options, work, process.parallel)
        profiles = {side: None if each is None else each.profile for side, each in requests.items()}
        asked = [each for each in requests.values() if each is not None]
        _check_settings(asked)
        settings, video = asked[0].settings, model.accepts("num_frames")
        prompts = _prompts(options, video=video)
        if options.output is not None:
            media.check_kind(options.output, video=video)
        if process.starts:
            start_others("compare", options, process.ranks)
            return None
        range_notes: dict[Side, str] = {}
        for side, each in requests.items():
            if each is not None and each.profile is not None and each.out_of_range:
                range_notes[side] = out_of_range_text(each.profile, each.out_of_range)
                display.tell(f"chipsparse: warning: {range_notes[side]}")
        generator = ClipMaker(
            asked[0].load,
            lambda prompt: settings.pipeline_call(prompt, negative_prompt=None),
            settings.num_inference_steps,
            WorkProgress(display),
        )
        facts = called(options, *profiles.values(), prompts=[each.text for each in prompts])
        process = meet(process, device, facts)
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


def _requests(
    options: CompareOptions, work: Work, parallel: Parallel | None
) -> dict[Side, Request | None]:
    """The requests of A and B; None for the stock model."""
    found: dict[Side, Request | None] = dict.fromkeys(SIDES)
    for side, subject in zip(SIDES, options.subjects, strict=True):
        if subject.kind != "dense":
            found[side] = resolve(
                dataclasses.replace(options, config=subject.path, quality=subject.quality),
                model=work.model,
                device=work.device,
                dtype=work.dtype,
                parallel=parallel,
                instead="configs are compared on prompts alone",
            )
    return found


def _check_settings(requests: Sequence[Request]) -> None:
    """Raises `UserError` where both configs ask for other settings."""
    first, last = (dataclasses.asdict(requests[place].settings) for place in (0, -1))
    for name, value in first.items():
        if value != last[name]:
            option = OPTION_OF.get(name)
            way = f"give {option}" if option else "make them the same in both files"
            raise UserError(
                f"A generates with {name} {value} and B with {last[name]}; clips of other "
                f"settings do not compare: {way}"
            )


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

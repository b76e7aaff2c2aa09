"""Two configs against the stock model and against each other, over prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from chipsparse.bootstrap import LEAST_VALUES
from chipsparse.cli import denoise, media
from chipsparse.cli.compare_files import Picture
from chipsparse.cli.compare_subjects import Subject
from chipsparse.cli.difference_picture import difference_rows
from chipsparse.cli.errors import UserError, first_line
from chipsparse.cli.lpips import Lpips, find_lpips
from chipsparse.cli.model import (
    ModelDescription,
    choose_device,
    choose_dtype,
    load_pipeline,
    quiet_libraries,
)
from chipsparse.cli.panels import stack_panels
from chipsparse.cli.patching import patched
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.request import check_prompt_is_enough, look_up, required_profile
from chipsparse.cli.settings import (
    OPTION_OF,
    CommonOptions,
    GenerationSettings,
    check_seed,
    resolve_settings,
)
from chipsparse.clip_comparison import ClipComparison, compare_clips
from chipsparse.config import SparsityConfig
from chipsparse.profiles import ASSETS, Profile

BUNDLED_COUNT = 8  # prompts, where no file of them is given

Side = Literal["A", "B"]
SIDES: tuple[Side, Side] = ("A", "B")


@dataclass(frozen=True, kw_only=True)
class CompareOptions(CommonOptions):
    """What the user typed for two configs; None where an option was left out."""

    subjects: tuple[Subject, Subject]
    prompts: Path | None
    count: int | None
    seed: int
    output: Path | None
    factor: int | None
    fps: int

    def check(self) -> None:
        """Raises `UserError` for what is wrong with any model and on any device."""
        super().check()
        check_seed(self.seed)
        if self.count is not None and self.count < LEAST_VALUES:
            raise UserError(f"--count {self.count}: intervals need at least {LEAST_VALUES} prompts")
        if self.output is not None:
            media.check_output(self.output, fps=self.fps)


@dataclass(frozen=True)
class ConfigRun:
    """One prompt's generation under one config, against the stock model's of the same seed.

    Attributes:
        seconds: of the denoising loop.
        speedup: the stock model's seconds over these.
        clip: how far its frames are from the stock model's.
        fallbacks: see `denoise.Generation`.
    """

    seconds: float
    speedup: float
    clip: ClipComparison
    fallbacks: list[str]


@dataclass(frozen=True)
class PromptRuns:
    """All that was generated for one prompt.

    Attributes:
        prompt: in words.
        seed: of the noise.
        dense_seconds: of the stock model.
        sides: of both configs.
    """

    prompt: str
    seed: int
    dense_seconds: float
    sides: dict[Side, ConfigRun]


@dataclass(frozen=True)
class ConfigsComparison:
    """What `chipsparse compare` found out about two configs.

    Attributes:
        model: what the model's files say.
        device: where it ran.
        dtype: of the weights.
        subjects: A and B as they were typed.
        profiles: of A and B; None for the stock model.
        settings: of every generation.
        prompts: one entry for each.
        lpips: the metric, or why there is none.
        picture: of the worst prompt, if one was asked for.
        pictured: which prompt that is, from 0.
    """

    model: ModelDescription
    device: torch.device
    dtype: torch.dtype
    subjects: tuple[Subject, Subject]
    profiles: dict[Side, Profile | None]
    settings: GenerationSettings
    prompts: list[PromptRuns]
    lpips: Lpips
    picture: Picture | None
    pictured: int | None


def compare_configs(options: CompareOptions) -> ConfigsComparison:
    """Checks all that is cheap to check, then generates, compares and writes."""
    options.check()
    device = choose_device(options.device)
    options.check_vram(device)
    dtype = choose_dtype(options.dtype, device)
    with ProgressDisplay() as display, quiet_libraries(debug=options.debug):
        model = look_up(options, display)
        check_prompt_is_enough(model, "configs are compared on prompts alone")
        profiles = {
            side: _profile(options, subject, model)
            for side, subject in zip(SIDES, options.subjects, strict=True)
        }
        settings = _common_settings(options, model, profiles)
        prompts = read_prompts(options, video=model.accepts("num_frames"))
        if options.output is not None:
            media.check_kind(options.output, video=model.accepts("num_frames"))
        with display.stage("loading the model"):
            pipe = load_pipeline(model, device=device, dtype=dtype)
        runner = _Runner(pipe, profiles, settings, display)
        runs, lpips, worst = _run_prompts(runner, prompts, options)
        picture = None
        if options.output is not None:
            with display.stage(f"writing {options.output}"):
                picture = _write_picture(worst, options.output, options)
    return ConfigsComparison(
        model=model,
        device=device,
        dtype=dtype,
        subjects=options.subjects,
        profiles=profiles,
        settings=settings,
        prompts=runs,
        lpips=lpips,
        picture=picture,
        pictured=None if picture is None else worst.index,
    )


def read_prompts(options: CompareOptions, *, video: bool) -> list[str]:
    """The first ``--count`` lines of ``--prompts`` that are not empty, or of the bundled ones."""
    path = options.prompts or ASSETS / "prompts" / ("shapes.txt" if video else "images.txt")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {path} could not be read: {first_line(error)}") from error
    found = [line.strip() for line in lines if line.strip()]
    wanted = options.count or (BUNDLED_COUNT if options.prompts is None else len(found))
    if len(found) < max(wanted, LEAST_VALUES):
        asked = f"--count {options.count} asks for more" if options.count else ""
        raise UserError(
            f"{path} has {len(found)} prompt{'s' * (len(found) != 1)}; "
            + (asked or f"intervals need at least {LEAST_VALUES}, one a line")
        )
    return found[:wanted]


def _profile(options: CommonOptions, subject: Subject, model: ModelDescription) -> Profile | None:
    if subject.kind == "dense":
        return None
    return required_profile(dataclasses.replace(options, config=subject.path), model)


def _common_settings(
    options: CommonOptions, model: ModelDescription, profiles: dict[Side, Profile | None]
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
                f"A generates with {name} {value} and B with {last[name]}; pictures of other "
                f"settings do not compare: {way}"
            )
    return found[0]


@dataclass(frozen=True)
class _Worst:
    """The prompt that is farthest from the stock model, with its clips."""

    index: int
    psnr_db: float
    frames: dict[str, np.ndarray]


def _run_prompts(
    runner: _Runner, prompts: list[str], options: CompareOptions
) -> tuple[list[PromptRuns], Lpips, _Worst]:
    runs: list[PromptRuns] = []
    worst: _Worst | None = None
    for index, prompt in enumerate(prompts):
        seed = options.seed + index
        made = runner.generate(prompt, seed, index, len(prompts))
        dense = made["dense"]
        if index == 0:
            lpips = find_lpips(*dense.frames.shape[1:3])
        sides = {side: _against(dense, made[side], lpips) for side in SIDES}
        runs.append(PromptRuns(prompt, seed, dense.denoising_seconds, sides))
        lowest = min(run.clip.psnr_db for run in sides.values())
        if worst is None or lowest < worst.psnr_db:
            worst = _Worst(index, lowest, {name: each.frames for name, each in made.items()})
    assert worst is not None
    return runs, lpips, worst


def _against(dense: denoise.Generation, made: denoise.Generation, lpips: Lpips) -> ConfigRun:
    return ConfigRun(
        seconds=made.denoising_seconds,
        speedup=dense.denoising_seconds / made.denoising_seconds,
        clip=compare_clips(dense.frames, made.frames, perceptual=lpips.measure),
        fallbacks=made.fallbacks,
    )


class _Runner:
    """Generates one prompt with the stock model and under both configs, on one pipeline."""

    def __init__(
        self,
        pipe: Any,
        profiles: dict[Side, Profile | None],
        settings: GenerationSettings,
        display: ProgressDisplay,
    ) -> None:
        self._pipe, self._settings, self._display = pipe, settings, display
        self._configs: dict[str, SparsityConfig] = {
            side: profile.sparsity for side, profile in profiles.items() if profile is not None
        }
        self._warm: set[str] = set()

    def generate(
        self, prompt: str, seed: int, index: int, count: int
    ) -> dict[str, denoise.Generation]:
        """The generations of one prompt by the names "dense", "A" and "B".

        Which of them goes first changes from prompt to prompt, so that a machine that slows down
        or warms up favours none.
        """
        names = ["dense", *self._configs]
        first = index % len(names)
        made = {}
        for name in names[first:] + names[:first]:
            made[name] = self._one(name, prompt, seed, f"prompt {index + 1} of {count}, {name}")
        return {name: made.get(name, made["dense"]) for name in ("dense", *SIDES)}

    def _one(self, name: str, prompt: str, seed: int, text: str) -> denoise.Generation:
        arguments = self._settings.pipeline_call(prompt)
        with ExitStack() as stack:
            config = self._configs.get(name)
            report = None if config is None else stack.enter_context(patched(self._pipe, config))
            if name not in self._warm:
                with self._display.stage(f"{text}: warming up"):
                    denoise.warm_up(self._pipe, arguments, seed=seed, report=lambda: report)
            with self._display.denoising(text, self._settings.num_inference_steps) as steps:
                made = denoise.generate(
                    self._pipe, arguments, seed=seed, display=steps, report=lambda: report
                )
        if made.host_bytes == 0:  # else each patching takes and pins host memory anew
            self._warm.add(name)
        return made


def _write_picture(worst: _Worst, output: Path, options: CompareOptions) -> Picture:
    others = [
        (worst.frames[side], f"{side}: {Path(subject.text).stem}")
        for side, subject in zip(SIDES, options.subjects, strict=True)
        if subject.kind != "dense"
    ]
    rows, factor = difference_rows((worst.frames["dense"], "dense"), others, factor=options.factor)
    written = media.write_media({output: stack_panels(rows)}, fps=options.fps)
    return Picture(written[output], factor)


def notes(comparison: ConfigsComparison) -> Iterator[str]:
    """What to know beside the numbers, one sentence each."""
    count = len(comparison.prompts)
    if count < 10:
        yield f"intervals from {count} prompts are rough and tend to be too narrow; use more"
    for side in SIDES:
        told = [line for runs in comparison.prompts for line in runs.sides[side].fallbacks]
        yield from (f"{side}: {line}" for line in dict.fromkeys(told))

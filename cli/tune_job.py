"""The work of `chipsparse tune`: calibrate, predict, search, and write the profile."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import chipsparse
from chipsparse.cli.errors import UserError, first_line
from chipsparse.cli.lpips import find_lpips
from chipsparse.cli.model import (
    ModelDescription,
    load_pipeline,
    quiet_libraries,
)
from chipsparse.cli.option_checks import check_positive
from chipsparse.cli.output_names import check_inputs_stay
from chipsparse.cli.profile_range import range_of
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.report_file import check_file
from chipsparse.cli.request import (
    checked,
    look_up,
    required_profile,
)
from chipsparse.cli.settings import (
    CommonOptions,
    GenerationSettings,
    resolve_settings,
)
from chipsparse.cli.tune_lab import VERIFICATION_COST, Prompt, TuneLab, check_dense_folder
from chipsparse.cli.tune_profile import write_profile
from chipsparse.cli.tune_record import SearchRecord
from chipsparse.cli.work_progress import WorkProgress
from chipsparse.clip_comparison import PerceptualDistance
from chipsparse.config import SparsityConfig
from chipsparse.layout import ModelLayout
from chipsparse.plan import SparsityPlan
from chipsparse.profiles import ASSETS, Profile
from chipsparse.tuned_range import TunedFor, TunedMeasurement, TunedTarget, Versions, digest
from chipsparse.tuning.allocation import Candidate, frontier
from chipsparse.tuning.error_model import ErrorModel
from chipsparse.tuning.recording import layout_from_json
from chipsparse.tuning.results_file import ResultsError, ResultsFile, ResultsWriteError
from chipsparse.tuning.schedules import schedules
from chipsparse.tuning.search import search
from chipsparse.tuning.time_model import TimeModel, WholeTimes

# What stands for the score of pictures that are the same.
SAME_DB = 100.0
# A profile that is better than asked by no more than this will do.
TOLERANCE_DB = 0.25
TOLERANCE_SHARE = 0.02
# What a search mostly takes, for the estimate of the time left.
LIKELY_ROUNDS = 4
# LPIPS falls about as amplitudes do; where a PSNR is not known, this joins the two.
LPIPS_AT_20_DB = 0.4


@dataclass(frozen=True, kw_only=True)
class TuneOptions(CommonOptions):
    """What the user typed for `tune`."""

    output: Path
    min_psnr: float | None
    max_lpips: float | None
    max_seconds: float | None
    prompts: Path | None
    results: Path | None
    calibration_prompts: int
    held_out_prompts: int
    rounds: int

    @property
    def results_file(self) -> Path:
        """Where measurements are kept."""
        return self.results or self.output.with_suffix(".tune.json")

    def check(self) -> None:
        """Raises `UserError` for what is wrong with any model and on any device."""
        super().check()
        targets = {
            "--min-psnr": self.min_psnr,
            "--max-lpips": self.max_lpips,
            "--max-seconds": self.max_seconds,
        }
        given = {name: value for name, value in targets.items() if value is not None}
        if len(given) != 1:
            raise UserError(
                f"give one target of {', '.join(targets)}; got {' and '.join(given) or 'none'}"
            )
        for name, value in given.items():
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{name} {value} must be a number above 0")
        for name, count in (
            ("--calibration-prompts", self.calibration_prompts),
            ("--held-out-prompts", self.held_out_prompts),
            ("--rounds", self.rounds),
        ):
            check_positive(name, count)
        check_file("--output", self.output, ".yaml", ".yml")
        check_file("--results", self.results_file, ".json")
        for option, output in (("--output", self.output), ("--results", self.results_file)):
            check_inputs_stay(option, output, [self.config, self.prompts])
        check_dense_folder(self.results_file)


@dataclass(frozen=True)
class Tuned:
    """A finished search.

    Attributes:
        profile: the file that was written.
        results: the file with the measurements.
        config: what is computed.
        tuned: for what, and what was measured.
        predicted: what the frontier said.
        tried: how many configs were verified for it, now or before.
        plan: what the config means for the model.
    """

    profile: Path
    results: Path
    config: SparsityConfig
    tuned: TunedFor
    predicted: Candidate
    tried: int
    plan: SparsityPlan


@dataclass(frozen=True)
class Verified:
    """A config on the held-out prompts, as far as it was tried.

    Attributes:
        pairs: one measurement of each prompt.
    """

    pairs: list[dict[str, Any]]

    @property
    def psnrs(self) -> list[float]:
        """In dB; `SAME_DB` for the same pictures."""
        return [SAME_DB if p["psnr_db"] is None else min(SAME_DB, p["psnr_db"]) for p in self.pairs]

    @property
    def seconds(self) -> float:
        """Median."""
        return statistics.median(pair["seconds"] for pair in self.pairs)

    def score(self, options: TuneOptions) -> float:
        """What must reach `goal`."""
        if options.max_seconds is not None:
            return -self.seconds
        if options.max_lpips is not None:
            return lpips_score(max(pair["lpips"] for pair in self.pairs))
        return min(self.psnrs)


def run(options: TuneOptions) -> Tuned:
    """Checks all that is cheap to check, then measures, searches and writes."""
    try:
        return _run(options)
    except (ResultsError, ResultsWriteError) as error:
        raise UserError(str(error)) from error


def _run(options: TuneOptions) -> Tuned:
    device, dtype = checked(options)
    with ProgressDisplay() as display, quiet_libraries(debug=options.debug):
        model = look_up(options, display)
        profile = required_profile(options, model)
        settings = resolve_settings(options, model, profile.generation)
        calibration, held_out = choose_prompts(options, video=model.accepts("num_frames"))
        lpips = _lpips(options, settings)
        tuned = _tuned_for(options, model, settings, device, dtype)
        progress = WorkProgress(display)

        def load() -> Any:
            with progress.stage("loading the model"):
                return load_pipeline(model, device=device, dtype=dtype)

        try:
            results = ResultsFile(options.results_file, about(tuned, model, profile, options))
            lab = TuneLab(
                load,
                settings,
                options.negative_prompt,
                profile.sparsity,
                results,
                progress,
                lpips,
            )
        except ResultsError:
            raise
        except ValueError as error:
            raise UserError(first_line(error)) from error
        later = {**lab.dense_work(held_out), **_likely_rounds(options, held_out)}
        candidates, dense_seconds, layout = predict(
            lab, calibration, profile.sparsity, settings, later
        )
        names = [prompt.name for prompt in held_out]
        record = SearchRecord(results, tuned.target, candidates, dense_seconds, names)
        chosen, verified, tried = _search(
            options, lab, candidates, held_out, progress, dense_seconds
        )
    plan = SparsityPlan(chosen.config, layout, settings.num_inference_steps)
    record.choose(plan)
    tuned = dataclasses.replace(tuned, measured=_measurement(verified))
    write_profile(options.output, model.transformer_class, settings, chosen.config, tuned)
    return Tuned(options.output, options.results_file, chosen.config, tuned, chosen, tried, plan)


def choose_prompts(options: TuneOptions, *, video: bool) -> tuple[list[Prompt], list[Prompt]]:
    """Disjoint prompts to calibrate with and to verify on; the seed of each is its number."""
    file = options.prompts or ASSETS / "prompts" / ("shapes.txt" if video else "images.txt")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {file} cannot be read: {first_line(error)}") from error
    texts = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    first, needed = options.calibration_prompts, options.held_out_prompts
    if len(texts) < first + needed:
        raise UserError(
            f"{file} has {len(texts)} different prompts, but {first + needed} are needed: {first} "
            f"to calibrate with and {needed} others to verify on (--calibration-prompts, "
            "--held-out-prompts)"
        )
    prompts = [Prompt(text, seed) for seed, text in enumerate(texts)]
    return prompts[:first], prompts[first : first + needed]


def predict(
    lab: TuneLab,
    calibration: list[Prompt],
    config: SparsityConfig,
    settings: GenerationSettings,
    later: Mapping[str, float],
) -> tuple[list[Candidate], float, ModelLayout]:
    """The frontier, the time of a dense generation, and the layout, from calibrations.

    ``later`` is what will be measured then, by name, in dense generations.
    """
    errors, times, layout = models(*lab.calibrate(calibration, later), config, settings)
    steps = settings.num_inference_steps
    candidates = frontier(schedules(config, steps), layout, errors, times)
    dense_seconds = times.dense_seconds(steps)
    if not candidates:
        raise UserError(
            f"no config is predicted to be faster than dense ({dense_seconds:.1f} s) here; a "
            "larger picture, more steps or a GPU give sparsity more to save"
        )
    return candidates, dense_seconds, layout


def models(
    recordings: Sequence[dict[str, Any]],
    gains: Sequence[dict[str, Any]],
    config: SparsityConfig,
    settings: GenerationSettings,
) -> tuple[ErrorModel, TimeModel, ModelLayout]:
    """What predicts errors and times, and the layout that they are about."""
    layout = layout_from_json(recordings[0]["layout"])
    errors = ErrorModel(recordings, gains, settings.num_inference_steps)
    step_seconds = [seconds for gain in gains for seconds in gain["step_seconds"]]
    whole = WholeTimes(
        statistics.median(step_seconds),
        statistics.median(gain["skipped_step_seconds"] for gain in gains),
        statistics.median(each["other_seconds"] for each in recordings),
    )
    entries = [entry for recording in recordings for entry in recording["times"]]
    branches = recordings[0]["branches"]
    return errors, TimeModel(entries, whole, branches, layout, errors.layers, config), layout


def _search(
    options: TuneOptions,
    lab: TuneLab,
    candidates: list[Candidate],
    held_out: list[Prompt],
    progress: WorkProgress,
    dense_seconds: float,
) -> tuple[Candidate, Verified, int]:
    """Where the target holds, what was measured there, and how many configs are known."""
    # From the fastest to the most accurate; a limit of time is walked the other way round.
    order = candidates[::-1] if options.max_seconds is not None else candidates
    verified: dict[int, Verified] = {}
    for place, candidate in enumerate(order):
        known = _verify(options, lab, candidate.config, held_out, known_only=True)
        if known is not None:
            verified[place] = known
    before = len(verified)

    def measure(place: int) -> float:
        _plan_rounds(options, lab, progress, order[place].config, held_out, len(verified) - before)
        made = _verify(options, lab, order[place].config, held_out)
        assert made is not None
        verified[place] = made
        return made.score(options)

    found = search(
        [prediction(candidate, options) for candidate in order],
        goal_of(options),
        measure,
        known={place: each.score(options) for place, each in verified.items()},
        tolerance=_tolerance(options),
        rounds=options.rounds,
    )
    if found.place is None:
        raise UserError(_unreachable(options, verified[found.best], dense_seconds))
    return order[found.place], verified[found.place], len(verified)


def _plan_rounds(
    options: TuneOptions,
    lab: TuneLab,
    progress: WorkProgress,
    config: SparsityConfig,
    held_out: list[Prompt],
    rounds_done: int,
) -> None:
    """Tells the progress what this round takes, and about what later ones will."""
    work = lab.verification_work(config, held_out)
    progress.plan({**work, **_likely_rounds(options, held_out, rounds_done + 1)})


def _likely_rounds(
    options: TuneOptions, held_out: list[Prompt], rounds_done: int = 0
) -> dict[str, float]:
    """About what the rounds that are left will take, by name, in dense generations."""
    likely = range(rounds_done, min(options.rounds, LIKELY_ROUNDS))
    return {f"round {number + 1}": VERIFICATION_COST * len(held_out) for number in likely}


def _verify(
    options: TuneOptions,
    lab: TuneLab,
    config: SparsityConfig,
    held_out: list[Prompt],
    *,
    known_only: bool = False,
) -> Verified | None:
    """Prompt by prompt, until one of them misses the target: the others cannot make up for it.

    None where only what is known counts, and that is not enough.
    """
    pairs: list[dict[str, Any]] = []
    for prompt in held_out:
        pair = lab.known(config, prompt) if known_only else lab.verify(config, prompt)
        if pair is None:
            return None
        pairs.append(pair)
        if options.max_seconds is None and Verified(pairs).score(options) < goal_of(options):
            break
    return Verified(pairs)


def goal_of(options: TuneOptions) -> float:
    """The score that must be reached."""
    if options.max_seconds is not None:
        return -options.max_seconds
    if options.max_lpips is not None:
        return lpips_score(options.max_lpips)
    assert options.min_psnr is not None
    return options.min_psnr


def prediction(candidate: Candidate, options: TuneOptions) -> float:
    """What the score is expected to be."""
    return -candidate.seconds if options.max_seconds is not None else candidate.psnr_db


def lpips_score(distance: float) -> float:
    """A distance in dB, comparable to a PSNR."""
    return 20 - 20 * math.log10(max(distance, 1e-6) / LPIPS_AT_20_DB)


def _tolerance(options: TuneOptions) -> float:
    if options.max_seconds is not None:
        return TOLERANCE_SHARE * options.max_seconds
    return TOLERANCE_DB


def _unreachable(options: TuneOptions, best: Verified, dense_seconds: float) -> str:
    if options.max_seconds is not None:
        return (
            f"--max-seconds {options.max_seconds:g} cannot be met here: the fastest config that "
            f"was tried takes {best.seconds:.2f} s (dense: {dense_seconds:.2f} s)"
        )
    if options.max_lpips is not None:
        worst = max(pair["lpips"] for pair in best.pairs)
        return (
            f"--max-lpips {options.max_lpips:g} cannot be met by anything faster than dense: the "
            f"best config that was tried reaches {worst:.4f}"
        )
    return (
        f"--min-psnr {options.min_psnr:g} cannot be met by anything faster than dense: the best "
        f"config that was tried reaches {min(best.psnrs):.2f} dB on the held-out prompts"
    )


def _measurement(verified: Verified) -> TunedMeasurement:
    pairs, psnrs = verified.pairs, verified.psnrs
    ssims = [pair["ssim"] for pair in pairs if pair["ssim"] is not None]
    distances = [pair["lpips"] for pair in pairs if pair["lpips"] is not None]

    def decibel(value: float) -> float | None:
        return None if value >= SAME_DB else round(value, 2)

    return TunedMeasurement(
        prompts=len(pairs),
        psnr_db_worst=decibel(min(psnrs)),
        psnr_db_median=decibel(statistics.median(psnrs)),
        ssim_worst=round(min(ssims), 4) if ssims else None,
        lpips_worst=round(max(distances), 4) if distances else None,
        seconds=round(verified.seconds, 3),
        dense_seconds=round(statistics.median(pair["dense_seconds"] for pair in pairs), 3),
    )


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
        **range_of(settings, device, dtype),
        versions=Versions(chipsparse.__version__, str(torch.__version__), _diffusers_version()),
        target=TunedTarget(options.min_psnr, options.max_lpips, options.max_seconds),
    )


def about(
    tuned: TunedFor, model: ModelDescription, profile: Profile, options: TuneOptions
) -> dict[str, Any]:
    """What all measurements of a results file have in common."""
    facts = dataclasses.asdict(tuned)
    del facts["target"], facts["measured"]
    versions = facts.pop("versions")
    config = dataclasses.asdict(profile.sparsity)
    # These are what is tuned, or change no result.
    for name in ("schedule", "layers", "guard", "memory"):
        del config[name]
    for part in ("attention", "mlp"):
        del config[part]["keep_fraction"]
    return {
        **{f"{name}": version for name, version in versions.items()},
        **facts,
        "transformer_class": model.transformer_class,
        "pipeline_class": model.pipeline_class.__name__,
        "max_sequence_length": profile.generation.max_sequence_length,
        "negative_prompt": options.negative_prompt,
        **_flat(config),
    }


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        flat |= _flat(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return flat


def _diffusers_version() -> str:
    import diffusers

    return str(diffusers.__version__)

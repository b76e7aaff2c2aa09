"""The measurements that tuning is made of, each kept in the results file as soon as it is made."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chipsparse.api import attach
from chipsparse.cli import denoise
from chipsparse.cli.denoise import Generation
from chipsparse.cli.errors import UserError, first_line, reason
from chipsparse.cli.output_names import check_writable
from chipsparse.cli.patching import patched
from chipsparse.cli.settings import GenerationSettings
from chipsparse.cli.tune_names import dense_name, pair_name
from chipsparse.cli.work_progress import WorkProgress
from chipsparse.clip_comparison import PerceptualDistance, compare_clips
from chipsparse.config import SparsityConfig
from chipsparse.placing import place
from chipsparse.scratch import scratch_folder
from chipsparse.tuning.calibration import CalibrationSession
from chipsparse.tuning.probes import ProbeSteps
from chipsparse.tuning.recording import Recording
from chipsparse.tuning.replay import Error, ReplaySession
from chipsparse.tuning.results_file import ResultsFile

# What a sparse generation takes, in dense ones, until it is known better.
VERIFICATION_COST = 0.7
# Lines about a calibration where there is no bar: it takes as long as several generations.
CALIBRATION_LINES = 4


@dataclass(frozen=True)
class Prompt:
    """A prompt with its seed.

    Attributes:
        text: what to show.
        seed: of the noise.
    """

    text: str
    seed: int

    @property
    def name(self) -> str:
        """What measurements of it are called."""
        return f"seed {self.seed}, {self.text}"


class TuneLab:
    """Generates and measures; whatever is in the results file is not measured again.

    Args:
        load: loads the pipeline; called when something must be generated.
        settings: of the pipeline call.
        negative_prompt: what not to show, or None.
        config: what is to be tuned.
        results: where measurements are kept.
        progress: told of each.
        lpips: measures LPIPS, where it is asked for.
    """

    def __init__(
        self,
        load: Callable[[], Any],
        settings: GenerationSettings,
        negative_prompt: str | None,
        config: SparsityConfig,
        results: ResultsFile,
        progress: WorkProgress,
        lpips: PerceptualDistance | None = None,
    ) -> None:
        self._load = load
        self._settings = settings
        self._negative_prompt = negative_prompt
        self._config = config
        self._results = results
        self._progress = progress
        self._lpips = lpips
        self._recorded: tuple[Prompt, Recording, Generation] | None = None
        self.probes = ProbeSteps.spread(settings.num_inference_steps)

    @functools.cached_property
    def _pipe(self) -> Any:
        return self._load()

    # Calibration.

    def calibrate(
        self, prompts: list[Prompt], later: Mapping[str, float]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Recordings of all prompts, and replays of the first one's.

        Args:
            prompts: to calibrate with.
            later: what will be measured then, by name, in dense generations.
        """
        replays: list[tuple[int, Error]] = [
            *((step, "sparse") for step in self.probes.disturbed),
            *((step, "skip") for step in self.probes.skipped),
        ]
        steps = self._settings.num_inference_steps
        first = prompts[0]
        names = {
            (step, kind): f"replay, step {step}, {kind}, {first.name}" for step, kind in replays
        }
        jobs = [(f"calibration, {p.name}, {i} of {len(prompts)}", p) for i, p in enumerate(prompts)]
        # What the steps of each take, in dense steps.
        costs = {
            **{n: self.probes.step_costs(i, len(prompts)) for i, (n, _) in enumerate(jobs)},
            **{n: [0.0] * step + [1.0] * (steps - step) for (step, _), n in names.items()},
        }
        lost = [n for n in names.values() if n not in self._results][:1]
        if lost and jobs[0][0] in self._results:  # see `_replay`
            costs[lost[0]] = costs[jobs[0][0]] + costs[lost[0]]
        work = {n: sum(each) / steps for n, each in costs.items() if n not in self._results}
        self._progress.plan({**work, **later})
        recordings = [
            self._measured(
                name,
                functools.partial(self._calibrate, prompt, turn, len(prompts)),
                step_costs=costs[name],
            )
            for turn, (name, prompt) in enumerate(jobs)
        ]
        gains = [
            self._measured(
                name,
                functools.partial(self._replay, prompts, step, kind),
                step_costs=costs[name],
            )
            for (step, kind), name in names.items()
        ]
        return recordings, gains

    def _calibrate(self, prompt: Prompt, turn: int, turns: int) -> dict[str, Any]:
        recording, made = self._record(prompt, turn, turns)
        if turn == 0:
            self._recorded = prompt, recording, made
        other_seconds = made.total_seconds - made.denoising_seconds
        return {**recording.to_json(), "other_seconds": other_seconds}

    def _record(self, prompt: Prompt, turn: int, turns: int) -> tuple[Recording, Generation]:
        recording = Recording()
        make = functools.partial(
            CalibrationSession,
            probes=self.probes,
            recording=recording,
            turn=turn,
            turns=turns,
        )
        with self._attached(make) as handle:
            watches = [each.session.watch(each.transformer) for each in handle._adapters]
            try:
                title = f"calibration {turn + 1} of {turns}"
                made = self._generate(
                    prompt, title, handle.report, rounded=False, plain_lines=CALIBRATION_LINES
                )
            finally:
                for watch in watches:
                    watch.remove()
        if not recording.errors:
            reasons = "; ".join(handle.report.fallbacks) or "nothing of it can run sparse"
            raise UserError(f"there is nothing to tune: {reasons}")
        return recording, made

    def _replay(self, prompts: list[Prompt], step: int, kind: Error) -> dict[str, Any]:
        if self._recorded is None:  # an interruption lost the outputs, which no file keeps
            self._recorded = (prompts[0], *self._record(prompts[0], 0, len(prompts)))
        prompt, recording, exact = self._recorded
        sessions: list[ReplaySession] = []

        def make(*arguments: Any) -> ReplaySession:
            sessions.append(
                ReplaySession(*arguments, trajectory=recording.trajectory, step=step, error=kind)
            )
            return sessions[-1]

        with self._attached(make) as handle:
            title = f"replay of step {step + 1}"
            made = self._generate(prompt, title, handle.report, rounded=False)
        changes = [change for session in sessions for change in session.changes.values()]
        # The clock starts at the first call that computes; from then on steps are timed.
        skipped = [s.seconds for s in made.steps[1:] if s.action == "skip"]
        return {
            "step": step,
            "error": kind,
            "change": float(np.sqrt(np.mean(np.square(changes)))) if changes else 0.0,
            # Of unrounded pictures: most of what one step does is lost in eight bits.
            "squared_error": float(
                np.mean(np.square(made.frames - exact.frames, dtype=np.float64))
            ),
            "step_seconds": [s.seconds for s in made.steps if s.action == "dense"],
            "skipped_step_seconds": statistics.median(skipped) if skipped else 0.0,
        }

    @contextlib.contextmanager
    def _attached(self, make: Callable[..., Any]) -> Iterator[Any]:
        try:
            handle = attach(self._pipe, self._config, make)
        except ValueError as error:
            raise UserError(first_line(error)) from error
        with handle:
            yield handle

    # Verification.

    def verify(self, config: SparsityConfig, prompt: Prompt) -> dict[str, Any]:
        """The sparse generation of a prompt against the dense one, paired by seed."""
        dense = self._dense(prompt)
        pair = self._measured(self._pair_name(config, prompt), lambda: self._pair(config, prompt))
        return {**pair, "dense_seconds": dense["seconds"]}

    def known(self, config: SparsityConfig, prompt: Prompt) -> dict[str, Any] | None:
        """The same where it was measured before, else None."""
        pair = self._results.get(self._pair_name(config, prompt))
        dense = self._results.get(dense_name(prompt.name))
        if pair is None or dense is None:
            return None
        return {**pair, "dense_seconds": dense["seconds"]}

    def dense_work(self, prompts: list[Prompt]) -> dict[str, float]:
        """The dense generations that are left to make, by name; each takes 1."""
        names = [dense_name(prompt.name) for prompt in prompts]
        return {name: 1.0 for name in names if name not in self._results}

    def verification_work(self, config: SparsityConfig, prompts: list[Prompt]) -> dict[str, float]:
        """What is left to measure for a config, by name, in dense generations."""
        names = [self._pair_name(config, prompt) for prompt in prompts]
        pairs = {name: VERIFICATION_COST for name in names if name not in self._results}
        return {**self.dense_work(prompts), **pairs}

    def _pair_name(self, config: SparsityConfig, prompt: Prompt) -> str:
        lpips = self._lpips is not None
        return pair_name(config_digest(config), prompt.name, lpips=lpips)

    def _pair(self, config: SparsityConfig, prompt: Prompt) -> dict[str, Any]:
        dense = self._dense_frames(prompt)
        with patched(self._pipe, config) as report:
            made = self._generate(prompt, f"verification, prompt {prompt.seed}", report)
        found = compare_clips(dense, made.frames, perceptual=self._lpips)
        kept = [(s.attention_kept, s.mlp_kept) for s in made.steps]
        return {
            "psnr_db": None if found.identical else found.psnr_db,
            "ssim": found.ssim,
            "lpips": found.lpips,
            "seconds": made.total_seconds,
            "actions": [s.action for s in made.steps],
            "attention_kept": _mean([each for each, _ in kept]),
            "mlp_kept": _mean([each for _, each in kept]),
            "fallbacks": made.fallbacks,
        }

    def _dense(self, prompt: Prompt) -> dict[str, Any]:
        measured: dict[str, Any] = self._measured(
            dense_name(prompt.name), lambda: self._make_dense(prompt)
        )
        return measured

    def _make_dense(self, prompt: Prompt) -> dict[str, Any]:
        made = self._generate(prompt, f"dense, prompt {prompt.seed}", None)
        file = self._frames_file(prompt)
        try:
            file.parent.mkdir(exist_ok=True)
            with scratch_folder(file.parent) as scratch:
                np.save(scratch / file.name, made.frames)
                place({file: scratch / file.name}, scratch=scratch)
        except OSError as error:
            raise UserError(
                f"the dense pictures in {file.parent} could not be written: {reason(error)}"
            ) from error
        return {"seconds": made.total_seconds}

    def _dense_frames(self, prompt: Prompt) -> np.ndarray:
        file = self._frames_file(prompt)
        if not file.is_file():  # the folder may be deleted at any time
            self._make_dense(prompt)
        frames: np.ndarray = np.load(file)
        return frames

    def _frames_file(self, prompt: Prompt) -> Path:
        digest = hashlib.sha256(prompt.name.encode()).hexdigest()[:16]
        return dense_folder(self._results.path) / f"{digest}.npy"

    # Generating.

    def _measured(
        self, name: str, measure: Callable[[], Any], *, step_costs: Sequence[float] = ()
    ) -> Any:
        with self._progress.working(name, step_costs=step_costs):
            return self._results.measured(name, measure)

    def _generate(
        self,
        prompt: Prompt,
        title: str,
        report: Any,
        *,
        rounded: bool = True,
        plain_lines: int = 1,
    ) -> Generation:
        arguments = self._settings.pipeline_call(prompt.text, negative_prompt=self._negative_prompt)
        pipe = self._pipe
        count = self._settings.num_inference_steps
        with self._progress.denoising(title, count, plain_lines=plain_lines) as steps:
            return denoise.generate(
                pipe,
                arguments,
                seed=prompt.seed,
                display=steps,
                report=lambda: report,
                rounded=rounded,
            )


def dense_folder(results: Path) -> Path:
    """Where the dense pictures are kept that verification compares with."""
    return results.with_name(f"{results.stem}-dense")


def check_dense_folder(results: Path) -> None:
    """Raises `UserError` where that folder could not be made or written to."""
    folder = dense_folder(results)
    if folder.is_dir():
        check_writable("the folder", folder / "frames.npy")
    elif folder.exists():
        raise UserError(
            f"{folder}, which keeps the dense pictures beside {results}, is no folder; move it, or "
            "name another file with --results"
        )


def config_digest(config: SparsityConfig) -> str:
    """A short name of what a config computes, wherever its caches live."""
    content = asdict(config)
    del content["memory"]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _mean(values: list[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present else None

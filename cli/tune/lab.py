"""The measurements that tuning is made of, each kept in the results file as soon as it is made."""

from __future__ import annotations

import functools
import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.generation import denoise
from chipsparse.cli.generation.against_dense import keep_frames, quality
from chipsparse.cli.generation.denoise import Generation
from chipsparse.cli.generation.generator import Generator
from chipsparse.cli.generation.patching import patched, stock
from chipsparse.cli.media.output_names import check_writable
from chipsparse.cli.progress import duration
from chipsparse.cli.prompts import Prompt
from chipsparse.cli.ranks.joined import Joined
from chipsparse.cli.tune.names import dense_name, pair_name, pair_of, times_name
from chipsparse.config import CaptureMode, SparsityConfig
from chipsparse.experiments.quality import PerceptualDistance
from chipsparse.pipelines.denoising_loop import check_scheduler
from chipsparse.report.generation import GenerationReport
from chipsparse.tuning.calibration import SchedulerTap
from chipsparse.tuning.forms import ActionSeconds
from chipsparse.tuning.jump_costs import Trajectory
from chipsparse.tuning.results_file import ResultsFile
from chipsparse.tuning.rivals import DENSITIES
from chipsparse.tuning.targets import SAME_DB, Pair

# Steps that tell what one of each kind takes. The first of a kind may compile or record it, and the
# last step frees the caches: neither is counted.
TIMED_ACTIONS = ("dense", "refresh", "refresh", *["sparse"] * 4, "skip", "skip", "dense")
# The share of columns at which sparse MLPs are timed: what they take does not depend on it.
MLP_TIMED_AT = DENSITIES[0]
# What a candidate takes, in dense generations, until it is known.
LIKELY_SHARE = 0.4


@dataclass
class TuneLab:
    """Generates and measures; whatever is in the results file is not measured again.

    Attributes:
        generator: has the pipeline, not patched.
        config: what is to be tuned.
        prompts: those that calibrate first.
        calibrating: how many these are.
        budget: dense generations that a search may take, in all.
        uncalled_steps: how many of ``num_inference_steps`` do not call the transformer.
        cuda_graphs: with which a few sparse steps run as those of a generation do.
        process: this one, of those that generate together, dense clips too. The first one has the
            files and compares.
    """

    generator: Generator
    config: SparsityConfig
    prompts: Sequence[Prompt]
    calibrating: int
    results: ResultsFile
    budget: float
    lpips: PerceptualDistance | None = None
    uncalled_steps: int = 0
    cuda_graphs: CaptureMode = "auto"
    process: Joined = Joined()
    _used: dict[str, float] = field(default_factory=dict, init=False)  # of the budget
    _estimated: bool = field(default=False, init=False)

    @property
    def candidates(self) -> int:
        """How many configs were generated with, now or before."""
        pairs = (pair_of(name) for name in self._used)
        return len({pair[0] for pair in pairs if pair is not None})

    @functools.cached_property
    def _pipe(self) -> Any:
        pipe = self.generator.pipe
        with user_errors(ValueError):
            check_scheduler(getattr(pipe, "scheduler", None))
        arguments = self.generator.arguments(self.prompts[0].text)
        with self.generator.progress.stage("warming up"), stock(pipe, self.process.parallel):
            denoise.warm_up(pipe, arguments, seed=self.prompts[0].seed, report=None)
        return pipe

    # Dense generations.

    def trajectory(self, prompt: int) -> Trajectory:
        """Of the dense generation of a prompt."""
        kept = self._dense(prompt)["trajectory"]
        return Trajectory(**{name: np.array(values) for name, values in kept.items()})

    def _dense(self, prompt: int) -> dict[str, Any]:
        name = dense_name(self.prompts[prompt].name)
        made: dict[str, Any] = self._measured(name, 1.0, lambda: self._make_dense(prompt))
        if len(self._used) == 1 and not self._estimated:
            self._estimated = True
            self._tell_the_time(made["seconds"])
        return made

    def _tell_the_time(self, seconds: float) -> None:
        self.generator.progress.display.tell(
            f"a dense generation takes {duration(seconds)} here: the search ends within "
            f"{self.budget:g} times that, {duration(self.budget * seconds)}"
        )

    def _make_dense(self, number: int) -> dict[str, Any]:
        prompt, pipe = self.prompts[number], self._pipe
        with stock(pipe, self.process.parallel), SchedulerTap(pipe.scheduler) as tap:
            made = self._generate(prompt, f"dense, prompt {prompt.seed}", None)
        trajectory = tap.trajectory()
        if trajectory.steps != len(made.steps):
            raise UserError(
                f"{type(pipe).__name__} calls its scheduler {trajectory.steps} times for "
                f"{len(made.steps)} steps; only schedulers of one call a step can be tuned for"
            )
        if self.process.writes:
            keep_frames(self._frames_file(prompt), made.frames)
        return {
            "seconds": made.total_seconds,
            "step_seconds": statistics.median(step.seconds for step in made.steps),
            "other_seconds": made.total_seconds - made.denoising_seconds,
            "trajectory": {name: each.tolist() for name, each in vars(trajectory).items()},
        }

    def _dense_file(self, number: int) -> Path:
        """Where the first process has the frames of the dense clip of a prompt."""
        file = self._frames_file(self.prompts[number])
        if not self.process.first(file.is_file):  # the folder may be deleted at any time
            self._make_dense(number)
        return file

    def _frames_file(self, prompt: Prompt) -> Path:
        digest = hashlib.sha256(prompt.name.encode()).hexdigest()[:16]
        return dense_folder(self.results.path) / f"{digest}.npy"

    # Times.

    def step_seconds(self) -> ActionSeconds:
        """What the steps of each kind take, in a short generation for each kind of sparse step."""
        kinds = [(keep, False) for keep in DENSITIES]
        if self.config.mlp.enabled:
            kinds.append((MLP_TIMED_AT, True))
        timed = {kind: self._timed(*kind) for kind in kinds}
        sparse = {kind: each["sparse"] for kind, each in timed.items()}
        if self.config.mlp.enabled:
            extra = sparse[MLP_TIMED_AT, True] - sparse[MLP_TIMED_AT, False]
            sparse |= {(keep, True): sparse[keep, False] + extra for keep in DENSITIES}
        dense = [self._dense(prompt) for prompt in range(self.calibrating)]
        return ActionSeconds(
            dense=statistics.median(each["step_seconds"] for each in dense),
            refresh=statistics.median(each["refresh"] for each in timed.values()),
            sparse=sparse,
            skipped=statistics.median(each["skip"] for each in timed.values()),
            other=statistics.median(each["other_seconds"] for each in dense),
            measuring=sum(each["seconds"] for each in timed.values()),
        )

    def _timed(self, keep: float, sparse_mlp: bool) -> dict[str, float]:
        steps = self.generator.settings.num_inference_steps - self.uncalled_steps
        share = len(TIMED_ACTIONS) / steps
        name = times_name(keep, sparse_mlp=sparse_mlp)
        timed: dict[str, float] = self._measured(
            name, share, lambda: self._time_steps(keep, sparse_mlp)
        )
        self._used[name] = timed["seconds"] / self._dense(0)["seconds"]
        return timed

    def _time_steps(self, keep: float, sparse_mlp: bool) -> dict[str, float]:
        config = self.config.override(
            {
                "schedule": {
                    "actions": list(TIMED_ACTIONS),
                    "first_dense_layers": self.config.schedule.first_dense_layers,
                },
                "attention.density": keep,
                "mlp.enabled": sparse_mlp,
                "cuda_graphs": self.cuda_graphs,
            }
        )
        arguments = {
            **self.generator.arguments(self.prompts[0].text),
            "num_inference_steps": len(TIMED_ACTIONS) + self.uncalled_steps,
        }
        count, seed = len(TIMED_ACTIONS), self.prompts[0].seed
        title = f"steps with {keep:.0%} of the columns{' and sparse MLPs' * sparse_mlp}"
        with (
            patched(self._pipe, config, parallel=self.process.parallel) as report,
            self.generator.progress.denoising(title, count, plain_lines=1) as steps,
        ):
            timed, _ = denoise.time_steps(
                self._pipe, arguments, seed=seed, display=steps, report=report
            )
        medians = {
            kind: statistics.median(
                step.seconds
                for place, step in enumerate(timed[:-1])
                if TIMED_ACTIONS[place] == TIMED_ACTIONS[place - 1] == kind
            )
            for kind in ("refresh", "sparse", "skip")
        }
        return {**medians, "seconds": sum(step.seconds for step in timed)}

    # Candidates.

    def pair(self, config: SparsityConfig, prompt: int, form: str) -> Pair:
        """A generation against the dense one, paired by seed."""
        dense = self._dense(prompt)
        name = pair_name(
            config_digest(config), self.prompts[prompt].name, lpips=self.lpips is not None
        )
        made = self._measured(
            name, LIKELY_SHARE, lambda: {"form": form, **self._make_pair(config, prompt)}
        )
        self._used[name] = made["seconds"] / dense["seconds"]
        return Pair(
            psnr_db=SAME_DB if made["psnr_db"] is None else min(SAME_DB, made["psnr_db"]),
            ssim=made["ssim"],
            lpips=made["lpips"],
            seconds=made["seconds"],
            dense_seconds=dense["seconds"],
            actions=tuple(made["actions"]),
        )

    def _make_pair(self, config: SparsityConfig, number: int) -> dict[str, Any]:
        file, prompt = self._dense_file(number), self.prompts[number]
        with patched(self._pipe, config, parallel=self.process.parallel) as report:
            made = self._generate(prompt, f"candidate, prompt {prompt.seed}", report)
            self.process.gather_fallbacks(report)
        measured = quality(np.load(file), made.frames, self.lpips) if self.process.writes else {}
        return {
            **measured,
            "seconds": made.total_seconds,
            "actions": [step.action for step in made.steps],
            "work": made.work_share,
            "fallbacks": list(report.fallbacks),
        }

    # Generating.

    def _measured(self, name: str, cost: float, measure: Callable[[], Any]) -> Any:
        """As of the results file; ``cost`` is what it is likely to take, in dense generations."""
        left = max(0.0, self.budget - sum(self._used.values()) - cost)
        if name not in self.results:
            self.generator.progress.plan({name: cost, "all that may follow": left})
        with self.generator.progress.working(name):
            made = self.results.measured(name, measure)
        self._used[name] = cost
        return made

    def _generate(self, prompt: Prompt, title: str, report: GenerationReport | None) -> Generation:
        return self.generator.make(prompt.text, seed=prompt.seed, title=title, report=report)


def dense_folder(results: Path) -> Path:
    """Where the dense clips are kept that candidates are compared with."""
    return results.with_name(f"{results.stem}-dense")


def check_dense_folder(results: Path) -> None:
    """Raises `UserError` where that folder could not be made or written to."""
    folder = dense_folder(results)
    if folder.is_dir():
        check_writable("the folder", folder / "frames.npy")
    elif folder.exists():
        raise UserError(
            f"{folder}, which keeps the dense clips beside {results}, is no folder; move it, or "
            "name another file with --results"
        )


def config_digest(config: SparsityConfig) -> str:
    """A short name of what a config computes, wherever its caches live."""
    content = asdict(config)
    del content["memory"]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

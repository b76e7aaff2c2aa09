"""The trials of tuning, each a clip of the engine or a few timed steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.progress import duration
from chipsparse.cli.tune.options import TuneOptions
from chipsparse.config import CaptureMode, SparsityConfig
from chipsparse.experiments import engine
from chipsparse.experiments.clips import Generation, patched, stock, time_steps, warm_up
from chipsparse.experiments.records import ClipRecord
from chipsparse.experiments.samples import DENSE
from chipsparse.parallel.degrees import Parallel
from chipsparse.pipelines.denoising_loop import check_scheduler
from chipsparse.tuning.calibration import watched_scheduler
from chipsparse.tuning.forms import DENSITIES, ActionSeconds, with_sparse_mlp
from chipsparse.tuning.jump_costs import Trajectory
from chipsparse.tuning.targets import SAME_DB, Pair

if TYPE_CHECKING:
    from chipsparse.pipelines.call import Pipeline

# Steps that tell the time of one of each kind. The first of a kind may compile or record it, and
# the last step frees the caches: neither is counted.
TIMED_ACTIONS = ("dense", "refresh", "refresh", *["sparse"] * 4, "skip", "skip", "dense")
LIKELY_COST = 0.4  # of a candidate, in dense generations, until it is known


@dataclass
class TuneLab:
    """Generates and measures for a `Search`; what is in the store is not measured again."""

    experiment: engine.Experiment  # its samples calibrate first; its dense way is `calibrated`
    config: SparsityConfig  # to tune
    options: TuneOptions
    uncalled_steps: int = 0  # steps of the pipeline that do not call the transformer
    # The mode in which a few sparse steps run as those of a generation do.
    cuda_graphs: CaptureMode = "auto"
    can_sparse_mlps: bool = True  # the model's MLPs can run sparse
    _used: dict[str, float] = field(default_factory=dict, init=False)  # of the budget
    _warmed: Pipeline | None = field(default=None, init=False)  # the pipeline, once it is

    def __post_init__(self) -> None:
        self._maker = self.experiment.maker
        self._store = self.experiment.store
        self._parallel = self._store.ranks.parallel

    def warmed_pipe(self) -> Pipeline:
        """Return the pipeline, which is loaded and warmed up once."""
        if self._warmed is not None:
            return self._warmed
        maker = self._maker
        sample = self.experiment.samples[0]
        pipe = maker.pipe
        with user_errors(ValueError):
            check_scheduler(getattr(pipe, "scheduler", None))
        with maker.progress.stage("warming up"), stock(pipe, self._parallel):
            warm_up(pipe, maker.arguments(sample.prompt), seed=sample.seed, report=None)
        self._warmed = pipe
        return pipe

    def trajectory(self, prompt: int) -> Trajectory:
        """Return the trajectory of a prompt's dense generation; the first one tells the budget."""
        made = self._clip(self.experiment.dense_way, prompt)
        if prompt == 0:
            seconds = made.total_seconds
            budget = self.options.budget
            self._maker.progress.tell(
                f"a dense generation takes {duration(seconds)} here: the search ends within "
                f"{budget:g} times that, {duration(budget * seconds)}",
            )
        kept = made.facts["trajectory"]
        return Trajectory(**{name: np.array(values) for name, values in kept.items()})

    def step_seconds(self) -> ActionSeconds:
        """Return the times of steps, from a short generation for each kind of sparse step."""
        timed = {(density, False): self._timed(density) for density in DENSITIES}
        sparse = {kind: times["sparse"] for kind, times in timed.items()}
        # Whatever the profile has, sparse MLPs are tried; they are taken only where generations are
        # better with them. Their time does not depend on the share of columns.
        usual = DENSITIES[0]
        if self.can_sparse_mlps:
            timed[usual, True] = self._timed(usual, sparse_mlp=True)
            extra = timed[usual, True]["sparse"] - sparse[usual, False]
            sparse |= {(density, True): sparse[density, False] + extra for density in DENSITIES}
        prompts = range(self.options.calibration_prompts)
        dense = [self._clip(self.experiment.dense_way, prompt) for prompt in prompts]
        return ActionSeconds(
            dense=statistics.median(record.facts["step_seconds"] for record in dense),
            refresh=statistics.median(times["refresh"] for times in timed.values()),
            sparse=sparse,
            skipped=statistics.median(times["skip"] for times in timed.values()),
            other=statistics.median(record.total_seconds - record.seconds for record in dense),
            measuring=sum(times["seconds"] for times in timed.values()),
        )

    def pair(self, config: SparsityConfig, prompt: int, form: str) -> Pair:
        """Return a generation against the dense one, paired by seed."""
        dense = self._clip(self.experiment.dense_way, prompt)
        facts = {"form": form, "config": engine.config_digest(config)}
        way = engine.sparse_way(
            "candidate",
            config,
            parallel=self._parallel,
            facts=facts,
            warm=False,
        )
        lpips = "" if self.options.max_lpips is None else ", with LPIPS"
        way = replace(way, cost=LIKELY_COST, key=way.key + lpips)
        made = self._clip(way, prompt)
        cost = made.total_seconds / dense.total_seconds
        self._used[engine.record_name(way, self.experiment.samples[prompt])] = cost
        return Pair(
            psnr_db=SAME_DB if made.psnr_db is None else min(SAME_DB, made.psnr_db),
            ssim=made.ssim,
            lpips=made.lpips,
            seconds=made.total_seconds,
            dense_seconds=dense.total_seconds,
            actions=tuple(made.actions),
        )

    def _clip(self, way: engine.Way, prompt: int) -> ClipRecord:
        sample = self.experiment.samples[prompt]
        name = engine.record_name(way, sample)
        self._prepare(name, way.cost)
        made = self.experiment.clip(way, sample).record
        self._used.setdefault(name, way.cost)
        return made

    def _prepare(self, name: str, cost: float) -> None:
        """Load the model and plan a measurement, where that is not in the store."""
        if name not in self._store.measured:
            self.warmed_pipe()
            left = max(0.0, self.options.budget - sum(self._used.values()) - cost)
            self._maker.progress.plan({name: cost, "all that may follow": left})

    def _timed(self, density: float, *, sparse_mlp: bool = False) -> dict[str, float]:
        """Return the median time of each kind of step, and the time of measuring it."""
        maker = self._maker
        count = len(TIMED_ACTIONS)
        name = f"times, {density:g} of the columns{', sparse MLPs' * sparse_mlp}"
        title = f"steps with {density:.0%} of the columns{' and sparse MLPs' * sparse_mlp}"
        self._prepare(name, count / (maker.steps - self.uncalled_steps))
        if name not in self._store.measured:
            schedule = {"actions": list(TIMED_ACTIONS)}
            graphs = self.cuda_graphs
            changes = {"schedule": schedule, "attention.density": density, "cuda_graphs": graphs}
            config = with_sparse_mlp(self.config, sparse_mlp).override(changes)
            sample = self.experiment.samples[0]
            arguments = maker.arguments(sample.prompt)
            arguments["num_inference_steps"] = count + self.uncalled_steps
            with (
                maker.progress.working(name),
                patched(self.warmed_pipe(), config, parallel=self._parallel) as report,
                maker.progress.denoising(title, count, plain_lines=1) as display,
            ):
                steps = time_steps(
                    self.warmed_pipe(),
                    arguments,
                    seed=sample.seed,
                    display=display,
                    report=report,
                )
            made = {"seconds": sum(step.seconds for step in steps)}
            for kind in ("refresh", "sparse", "skip"):
                made[kind] = statistics.median(
                    step.seconds
                    for place, step in enumerate(steps[:-1])
                    if TIMED_ACTIONS[place] == TIMED_ACTIONS[place - 1] == kind
                )
            self._store.keep(name, lambda: made)
        timed: dict[str, float] = self._store.measured[name]
        dense = self._clip(self.experiment.dense_way, 0)
        self._used[name] = timed["seconds"] / dense.total_seconds
        return timed


def calibrated(parallel: Parallel | None) -> engine.Way:
    """Return the stock model, whose records keep the trajectory and the time of a step."""

    @contextmanager
    def apply(pipe: Pipeline) -> Iterator[engine.Applied]:
        with stock(pipe, parallel), watched_scheduler(pipe.scheduler) as watched:

            def facts(made: Generation) -> dict[str, Any]:
                trajectory = watched()
                if trajectory.steps != len(made.steps):
                    raise UserError(
                        f"{type(pipe).__name__} calls its scheduler {trajectory.steps} times for "
                        f"{len(made.steps)} steps; only schedulers of one call a step can be tuned "
                        "for",
                    )
                return {
                    "step_seconds": statistics.median(step.seconds for step in made.steps),
                    "trajectory": {name: x.tolist() for name, x in vars(trajectory).items()},
                }

            yield engine.Applied(facts=facts)

    return engine.Way(DENSE, apply, warm=False)

"""How long the denoising steps of a pipeline take, stock and at every action."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from chipsparse.cli.generation import denoise
from chipsparse.cli.generation.denoise import StepResult
from chipsparse.cli.generation.patching import patched
from chipsparse.cli.planning.planned import PlannedGeneration
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.ranks.joined import Joined
from chipsparse.cost_model.layer_times import as_of_many

PROMPT = "a red circle moves left over a blue gradient"
SEED = 0
STOCK_STEPS = 3  # before the patched ones, and again behind them
# Two of each that computes all, and six sparse ones: on a GPU the first is launched kernel by
# kernel, the second is captured where that may pay in the generation, and the others run as most
# of it do. The last step, which frees the caches, is not counted.
ACTIONS = ("dense", "dense", "refresh", "refresh", *["sparse"] * 7)
NOTHING_SPARSE = ("dense",) * 5


@dataclass(frozen=True)
class StepTimes:
    """Median seconds of a denoising step, all guidance branches together.

    Attributes:
        stock: of the pipeline as it was, all of its steps; on one device.
        stock_before: of those before the patched ones.
        stock_after: of those behind them; another time than before tells how even the machine is.
        patched: of each action.
        counts: how often a generation takes each action.
        attention_kept: mean share of the columns that the sparse steps computed, if any.
        mlp_kept: the same of neurons.
        stock_peak_bytes: most memory allocated on the (first) GPU; None on a CPU.
        patched_peak_bytes: likewise.
        fallbacks: what ran dense although the profile wants it sparse.
    """

    stock: float
    stock_before: float
    stock_after: float
    patched: dict[str, float]
    counts: dict[str, int]
    attention_kept: float | None
    mlp_kept: float | None
    stock_peak_bytes: int | None
    patched_peak_bytes: int | None
    backends: dict[str, str]
    fallbacks: list[str]
    also_in_json: ClassVar = ("stock_run", "patched_run", "speedup_run")

    @property
    def stock_run(self) -> float:
        """Seconds of all steps of a generation."""
        return self.stock * sum(self.counts.values())

    @property
    def patched_run(self) -> float | None:
        """The same with chipsparse; None where an action was not measured."""
        if any(action not in self.patched for action in self.counts):
            return None
        return sum(count * self.patched[action] for action, count in self.counts.items())

    @property
    def speedup_run(self) -> float | None:
        """Of a generation; None where an action was not measured."""
        return None if self.patched_run is None else self.stock_run / self.patched_run


def measure_steps(
    pipe: Any,
    planned: PlannedGeneration,
    dtype: torch.dtype,
    display: ProgressDisplay,
    process: Joined,
) -> StepTimes:
    """Runs a few steps of the stock pipeline and of the patched one; decodes nothing.

    Args:
        pipe: loaded, not patched.
        dtype: that the model computes in.
        process: this one, of those that share the patched steps.
    """
    call = planned.settings.pipeline_call(PROMPT)
    counts: dict[str, int] = defaultdict(int)
    for action in planned.plan.actions():
        counts[action.value] += 1
    actions = ACTIONS if "sparse" in counts else NOTHING_SPARSE
    if "skip" in counts:
        actions = (*actions[:-1], "skip", actions[-1])
    config = as_of_many(planned.plan.config, planned.plan, dtype).override(
        {"schedule.actions": list(actions)}
    )

    def run(name: str, steps: int, report: Any) -> tuple[list[StepResult], int | None]:
        arguments = {**call, "num_inference_steps": steps + planned.adapter.uncalled_steps}
        with display.stage(f"{name} steps: warming up"):
            denoise.warm_up(pipe, arguments, seed=SEED, report=report)
        with display.denoising(f"{name} steps", steps) as shown:
            return denoise.time_steps(pipe, arguments, seed=SEED, display=shown, report=report)

    before, stock_peak = run("stock", STOCK_STEPS, None)
    with patched(pipe, config, parallel=process.parallel) as report:
        steps, patched_peak = run("patched", len(actions), report)
        process.gather_fallbacks(report)
        backends, fallbacks = dict(report.backends), list(report.fallbacks)
    after, _ = run("stock", STOCK_STEPS, None)
    times: dict[str, list[float]] = defaultdict(list)
    for step in steps[:-1]:
        times[step.action].append(step.seconds)
    sparse = next((step for step in steps if step.action == "sparse"), None)
    return StepTimes(
        stock=_median([*before, *after]),
        stock_before=_median(before),
        stock_after=_median(after),
        patched={action: statistics.median(found) for action, found in times.items()},
        counts=dict(counts),
        attention_kept=None if sparse is None else sparse.attention_kept,
        mlp_kept=None if sparse is None else sparse.mlp_kept,
        stock_peak_bytes=stock_peak,
        patched_peak_bytes=patched_peak,
        backends=backends,
        fallbacks=fallbacks,
    )


def _median(steps: list[StepResult]) -> float:
    return statistics.median(step.seconds for step in steps)

"""Where skipped steps can be put right: at the scheduler of a pipeline's own call."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import diffusers

from chipsparse.plan import Action
from chipsparse.report.generation import GenerationReport
from chipsparse.schedule.correction import CorrectedSteps, Kind, Made
from chipsparse.schedule.wrapped_step import Step, wrapped_step

# Solvers of several steps, which keep what they need for the next one in lists.
MULTISTEP = ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler", "DEISMultistepScheduler")


@contextlib.contextmanager
def corrected_steps(scheduler: Any, report: GenerationReport) -> Iterator[None]:
    """Around a call of a pipeline: the steps that it skips are put right, where they can be.

    Args:
        scheduler: the pipeline's, or None.
        report: of the transformers that it calls; is told which steps were, or why none.
    """
    reason = why_not_corrected(scheduler)
    if reason is not None:
        yield
        if any(record.action is Action.SKIP for record in report.steps) and _wanted(report):
            report.note(f"skipped steps are not corrected: {reason}")
        return

    def wrap(owner: Any, step: Step) -> Step:
        return CorrectedSteps(owner, step, lambda: made_of(report), report.correct)

    with wrapped_step(scheduler, wrap, copies=True):
        yield


def why_not_corrected(scheduler: Any) -> str | None:
    """Why the solver cannot go over steps again: known are those of a straight flow."""
    name = type(scheduler).__name__
    config: Any = getattr(scheduler, "config", {})
    if isinstance(scheduler, diffusers.FlowMatchEulerDiscreteScheduler):
        return f"{name} adds noise" if config.stochastic_sampling else None
    known = tuple(getattr(diffusers, each) for each in MULTISTEP if hasattr(diffusers, each))
    if not isinstance(scheduler, known):
        return f"{name} is none of the solvers that can go over steps again"
    if config.prediction_type != "flow_prediction" or not config.get("use_flow_sigmas", False):
        return f"{name} does not follow a straight flow"
    if getattr(scheduler, "solver_p", None) is not None:
        return f"{name} has another solver in it"
    if "sde" in config.get("algorithm_type", ""):
        return f"{name} adds noise"
    return None


def made_of(report: GenerationReport) -> Made | None:
    """How the outputs of the step came about to which the transformers were called last."""
    if not _wanted(report):
        return None
    step = report.steps[-1].step
    records = list(itertools.takewhile(lambda each: each.step == step, reversed(report.steps)))
    kind = _kind({record.action for record in records})
    return None if kind is None else Made(step, kind, frozenset(each.branch for each in records))


def _wanted(report: GenerationReport) -> bool:
    """Whether the plan of the last call skips steps, and is to correct them."""
    plan = report.plans.get(report.steps[-1].transformer) if report.steps else None
    return plan is not None and plan.config.schedule.correct and plan.schedule.skips_any


def _kind(actions: set[Action]) -> Kind | None:
    """None where a branch is skipped and another one is not."""
    if Action.SKIP in actions:
        return "reused" if len(actions) == 1 else None
    return "sparse" if Action.SPARSE in actions else "full"

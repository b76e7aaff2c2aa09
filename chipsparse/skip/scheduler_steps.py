"""Skipped steps at the schedulers that run an enabled transformer: corrected, or clean samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from chipsparse.report.generation import GenerationReport, StepRecord
from chipsparse.skip.clean_samples import NoisySteps, step_parameters
from chipsparse.skip.correction import SOLVERS, CorrectedSteps, Kind, Made, solver_class
from chipsparse.skip.patched_step import wrap_step
from chipsparse.sparse.plan import Action

INSTEAD = "a sampler without noise comes closer, as do more full steps"
NOT_STEPPED = "the loop does not step its scheduler as pipelines do"


@dataclass(frozen=True)
class _Followed:
    """A scheduler whose steps are wrapped."""

    noisy: NoisySteps
    corrected: CorrectedSteps | None  # None where skipped steps cannot be put right
    undo: Callable[[], None]

    def drop(self) -> None:
        self.noisy.drop()
        if self.corrected is not None:
            self.corrected.drop()


class StepCorrection:
    """Wraps the steps of the schedulers of one enabled pipeline.

    Steps of an unknown loop with one of these schedulers stay as they are. In the pipeline's own
    loop deep copies of a scheduler are the pipeline's, for another kind of latents.

    Args:
        report: the report of the pipeline's transformers.
        loop: gives the kind of the running loop: "pipeline", "generation" or "unknown".
    """

    def __init__(self, report: GenerationReport, loop: Callable[[], str]) -> None:
        self._report = report
        self._loop = loop
        self._wanted: list[Any] = []
        self._followed: dict[int, _Followed] = {}
        self._stepped: StepRecord | None = None  # the last call that a wrapped step came after
        self._over: StepRecord | None = None  # the last call of the last generation

    def follow(self, schedulers: Iterable[Any]) -> None:
        """Wraps the steps of these schedulers, and of no others."""
        wanted = {id(scheduler): scheduler for scheduler in schedulers if scheduler is not None}
        for number in self._followed.keys() - wanted.keys():
            self._followed.pop(number).undo()
        for scheduler in wanted.values():
            self._wrap(scheduler)
        self._wanted = list(wanted.values())

    def _wrap(self, scheduler: Any) -> None:
        if id(scheduler) in self._followed or not callable(getattr(scheduler, "step", None)):
            return
        parameters = step_parameters(scheduler)
        corrected: CorrectedSteps | None = None
        noisy: NoisySteps

        def wrap(step: Callable[..., Any]) -> NoisySteps:
            nonlocal corrected, noisy
            if why_not_corrected(scheduler) is None:
                step = corrected = CorrectedSteps(
                    scheduler,
                    step,
                    lambda: None if noisy.adds_noise else self._corrected_origin(),
                    self._report.correct,
                )
            noisy = NoisySteps(scheduler, step, parameters, self._origin, self._note_noise)
            return noisy

        undo = wrap_step(scheduler, wrap, self._copied)
        self._followed[id(scheduler)] = _Followed(noisy, corrected, undo)

    def _note_noise(self, scheduler: Any, is_known: bool) -> None:
        """Says what a sampler that adds noise costs, and what would cost nothing."""
        name = type(scheduler).__name__
        quality = self._report.quality
        what = "this config" if quality is None else f"quality {quality}"
        if is_known:
            reused = (
                f"skipped steps reuse the clean sample, and {what} comes out further from the "
                "dense result than elsewhere"
            )
        else:
            reused = (
                "its clean sample is not known, so what skipped steps reuse points at noise that "
                "is gone, and the result may be far from the dense one"
            )
        self._report.warn_of_quality(f"{name} adds noise at its steps: {reused}; {INSTEAD}")

    def _copied(self, scheduler: Any) -> None:
        if self._loop() == "pipeline":
            self._wrap(scheduler)

    @property
    def is_on(self) -> bool:
        return bool(self._wanted)

    def follows(self, scheduler: Any) -> bool:
        return any(scheduler is wanted for wanted in self._wanted)

    def note_uncorrected(self, reason: str | None, step: int | None = None) -> None:
        """Notes where a skipped step cannot be put right, once nothing more comes of it.

        `reason` is why the loop's scheduler cannot put steps right, if so. `step` is that of the
        call that comes next, None behind the last one.
        """
        last = self._report.steps[-1] if self._report.steps else None
        if last is not None and last.action is Action.SKIP and last.step != step:
            wanted = last.plan is not None and last.plan.config.schedule.correct
            placed = all(
                each.corrected.is_placed for each in self._followed.values() if each.corrected
            )
            adds_noise = any(each.noisy.adds_noise for each in self._followed.values())
            if wanted and not adds_noise and not (self._stepped is last and placed):
                self._report.note(f"skipped steps are not corrected: {reason or NOT_STEPPED}")
        if step is None:
            self.follow(self._wanted)  # and no copies any more
            self._over = last
            for each in self._followed.values():
                each.drop()

    def _last(self) -> StepRecord | None:
        """The last call, if it is of a generation with skipped steps that is not over."""
        last = self._report.steps[-1] if self._report.steps else None
        if last is None or last is self._over or last.plan is None or self._loop() == "unknown":
            return None
        return last if last.plan.schedule.skips_any else None

    def _corrected_origin(self) -> Made | None:
        """The origin of the outputs of a step, where skipped ones are to be put right."""
        last = self._last()
        if last is None or last.plan is None or not last.plan.corrects_any:
            return None
        self._stepped = last
        return self._origin()

    def _origin(self) -> Made | None:
        """The origin of the outputs of the step to which the transformers were called last."""
        last = self._last()
        if last is None:
            return None
        records = itertools.takewhile(
            lambda record: record.place == last.place,
            reversed(self._report.steps),
        )
        actions, branches, restarted = zip(
            *((record.action, record.branch, record.restarted) for record in records),
            strict=True,
        )
        kind = _kind({*actions})
        return None if kind is None else Made(last.step, kind, frozenset(branches), any(restarted))


def why_not_corrected(scheduler: Any) -> str | None:
    """Return why steps of a scheduler cannot be put right: known are solvers of a straight flow."""
    name = type(scheduler).__name__
    config = getattr(scheduler, "config", {})
    known = solver_class(scheduler)
    if scheduler is None:
        return "the pipeline has no scheduler"
    if known is None:
        return f"{name} is none of the solvers that can go over steps again"
    if config.get("stochastic_sampling") or "sde" in (config.get("algorithm_type") or ""):
        return f"{name} adds noise"
    if known.__name__ == SOLVERS[0]:
        return None
    if config.get("prediction_type") != "flow_prediction" or not config.get("use_flow_sigmas"):
        return f"{name} does not follow a straight flow"
    if getattr(scheduler, "solver_p", None) is not None:
        return f"{name} has another solver in it"
    return f"{name} clips what is predicted" if config.get("thresholding") else None


def shift_of(scheduler: Any) -> float:
    """The flow shift with which a schedule would have its middle level; 1 where it has none."""
    sigmas = getattr(scheduler, "sigmas", None)
    if sigmas is None or len(sigmas) < 2:
        return 1.0
    level = float(sigmas[(len(sigmas) - 1) // 2])
    level = 1 - level if scheduler.config.get("invert_sigmas") else level
    return level / (1 - level) if level < 1 else 1.0


def _kind(actions: set[Action]) -> Kind | None:
    """None where a branch is skipped and another one is not."""
    if Action.SKIP in actions:
        return "reused" if len(actions) == 1 else None
    return "sparse" if Action.SPARSE in actions else "full"

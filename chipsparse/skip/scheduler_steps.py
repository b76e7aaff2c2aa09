"""Skipped steps at the schedulers that run an enabled transformer: corrected, or clean samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from chipsparse.reasons.calls import not_corrected, sampler_adds_noise
from chipsparse.reasons.reason import Reason
from chipsparse.skip.clean_samples import NoisySteps, step_parameters
from chipsparse.skip.correction import SOLVERS, CorrectedSteps, solver_class
from chipsparse.skip.patched_step import Step, wrap_step
from chipsparse.skip.scheduler import Scheduler
from chipsparse.skip.step_log import LoggedCall, StepLog, StepOrigin

NOT_STEPPED = "the loop does not step its scheduler as pipelines do"


class Report(Protocol):
    """The report of a generation, as far as it is told of schedulers' steps."""

    quality: str | None  # the name of the config in its profile, where it has one

    def correct(self, steps: range, /) -> None:
        """Note that the skipped steps among these were corrected."""

    def add(self, reason: Reason, /) -> None:
        """Note once what the user may want to know, and warn of what costs quality."""


class _FollowedScheduler:
    """A scheduler whose steps are wrapped.

    Reused clean samples are outermost, so the corrector and the scheduler are given their outputs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        origin: Callable[[], StepOrigin | None],
        origin_to_correct: Callable[[], StepOrigin | None],
        report: Report,
        copied: Callable[[Any], None],
    ) -> None:
        self.noisy: NoisySteps
        self.corrected: CorrectedSteps | None = None  # None if the scheduler cannot correct steps
        self._scheduler = scheduler
        self._parameters = step_parameters(scheduler)
        self._origin = origin
        self._origin_to_correct = origin_to_correct
        self._report = report
        self.undo = wrap_step(scheduler, self._wrapped, copied)

    def _wrapped(self, step: Step) -> Step:
        scheduler = self._scheduler
        if why_not_corrected(scheduler) is None:
            correct = self._report.correct
            step = self.corrected = CorrectedSteps(scheduler, step, self._without_noise, correct)
        self.noisy = NoisySteps(scheduler, step, self._parameters, self._origin, self._note_noise)
        return self.noisy

    def _without_noise(self) -> StepOrigin | None:
        """Return the origin of a step that is to be corrected: solvers must add no noise."""
        return None if self.noisy.adds_noise else self._origin_to_correct()

    def _note_noise(self, scheduler: Scheduler, is_known: bool) -> None:
        """Say what skipped steps cost with a sampler that adds noise, and what would cost less."""
        quality = self._report.quality
        config = "this config" if quality is None else f"quality {quality}"
        name = type(scheduler).__name__
        self._report.add(sampler_adds_noise(name, config=config, is_known=is_known))

    def drop(self) -> None:
        """Free what is kept over skipped steps."""
        self.noisy.drop()
        if self.corrected is not None:
            self.corrected.drop()


class StepCorrection:
    """Wraps the steps of the schedulers of one enabled pipeline.

    Steps of an unknown loop with one of these schedulers stay as they are. In the pipeline's own
    loop deep copies of a scheduler are the pipeline's, for another kind of latents.

    Args:
        report: the report of the pipeline's transformers.
        log: the finished calls of these transformers.
        loop: gives the kind of the running loop: "pipeline", "generation" or "unknown".
    """

    def __init__(self, report: Report, log: StepLog, loop: Callable[[], str]) -> None:
        self._report = report
        self._log = log
        self._loop = loop
        self._wanted: list[Any] = []
        self._followed: dict[int, _FollowedScheduler] = {}
        self._stepped: LoggedCall | None = None  # the last call that a wrapped step came after

    def follow(self, schedulers: Iterable[Any]) -> None:
        """Wrap the steps of these schedulers, and of no others."""
        wanted = {id(scheduler): scheduler for scheduler in schedulers if scheduler is not None}
        for number in self._followed.keys() - wanted.keys():
            self._followed.pop(number).undo()
        for scheduler in wanted.values():
            self._wrap(scheduler)
        self._wanted = list(wanted.values())

    def _wrap(self, scheduler: Scheduler) -> None:
        if id(scheduler) in self._followed or not callable(getattr(scheduler, "step", None)):
            return
        self._followed[id(scheduler)] = _FollowedScheduler(
            scheduler,
            self._origin,
            self._origin_to_correct,
            self._report,
            self._copied,
        )

    def _copied(self, scheduler: Scheduler) -> None:
        if self._loop() == "pipeline":
            self._wrap(scheduler)

    @property
    def is_on(self) -> bool:
        """True if any scheduler is followed."""
        return bool(self._wanted)

    def follows(self, scheduler: Scheduler) -> bool:
        """Return True for a scheduler that `follow` was given."""
        return any(scheduler is wanted for wanted in self._wanted)

    def note_uncorrected(self, reason: str | None, step: int | None = None) -> None:
        """Note that skipped steps stay uncorrected, once nothing can correct them any more.

        Args:
            reason: why the loop's scheduler cannot correct steps; None if it can.
            step: the step of the next call; None after the last one, which frees what is kept.
        """
        last = self._log.last
        if last is not None and last.is_skipped and last.step != step:
            located = all(
                each.corrected.is_located for each in self._followed.values() if each.corrected
            )
            adds_noise = any(each.noisy.adds_noise for each in self._followed.values())
            stepped = self._stepped is last and located
            if last.wants_correction and not adds_noise and not stepped:
                self._report.add(not_corrected(reason or NOT_STEPPED))
        if step is None:
            self.follow(self._wanted)  # and no copies any more
            self._log.clear()
            self._stepped = None
            for each in self._followed.values():
                each.drop()

    def _origin(self) -> StepOrigin | None:
        """Return the origin of a step's outputs; None if the generation skips no step."""
        last = self._log.last
        if last is None or not last.skips_any or self._loop() == "unknown":
            return None
        return self._log.origin()

    def _origin_to_correct(self) -> StepOrigin | None:
        """Return the origin of a step's outputs; None if the generation corrects no step."""
        last = self._log.last
        if last is None or not last.corrects or self._loop() == "unknown":
            return None
        self._stepped = last
        return self._log.origin()


def why_not_corrected(scheduler: Scheduler) -> str | None:
    """Return why a scheduler's steps cannot be corrected: solvers of a straight flow's can be."""
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


def shift_of(scheduler: Scheduler) -> float:
    """Return the flow shift that would give a schedule its middle sigma; 1 for short schedules."""
    sigmas = getattr(scheduler, "sigmas", None)
    if sigmas is None or len(sigmas) < 2:
        return 1.0
    sigma = float(sigmas[(len(sigmas) - 1) // 2])
    sigma = 1 - sigma if scheduler.config.get("invert_sigmas") else sigma
    return sigma / (1 - sigma) if sigma < 1 else 1.0

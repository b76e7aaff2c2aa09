"""The calls of one transformer in a generation: which are skipped, and what those return.

The session knows calls, steps, guidance branches and tensors. It knows no layer, so it serves a
model whatever is inside.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from chipsparse.config import Action
from chipsparse.skip.conditions import Conditions
from chipsparse.skip.outputs import HeldOutputs
from chipsparse.skip.position import Place
from chipsparse.skip.step_log import LoggedCall, StepLog
from chipsparse.skip.timetable import Schedule


@dataclass(frozen=True)
class CallForm:
    """The part of two calls that must be equal for one to reuse the output of the other."""

    shared: Hashable  # equal for all calls of a generation, whatever their branch
    own: Hashable  # equal for all calls of one guidance branch


@dataclass
class BranchProgress:
    """The progress of one guidance branch in a generation."""

    form: CallForm
    called_at: int = -1  # the step of its last call; -1 before the first
    has_computed: bool = False  # since the generation began, or the branch was dropped
    conditions: Conditions | None = None  # of its last call, where they are known


@dataclass(frozen=True)
class Decision:
    """The session's answer to a call that begins."""

    place: Place
    starts: bool  # a generation begins with it: nothing from before is reused
    restarts: bool  # likewise, in the middle of the pipeline's generation
    # The condition that changed since the last call of the branch, by name: nothing of the branch
    # from before is reused. None: none did.
    changed: str | None
    # The result of a skipped call, in new tensors; None: the call is computed.
    output: Any
    is_forecast: bool = False  # the output extrapolates the last two

    @property
    def is_skipped(self) -> bool:
        """True where nothing of the model runs."""
        return self.output is not None


@dataclass
class _Generation:
    """The generation in progress."""

    number: int = 0  # from 1; 0 before the first
    branches: dict[str, BranchProgress] = field(default_factory=dict)
    outputs: HeldOutputs = field(default_factory=HeldOutputs)


class SkipSession:
    """Decides for each call of one transformer whether it is skipped, and makes its output.

    Every call runs between `begin` and `end`. Whoever opens a call resets the session if the call
    raises.
    """

    def __init__(self, log: StepLog | None = None) -> None:
        # Of finished calls; the pipeline's, which its experts share.
        self._log = StepLog() if log is None else log
        self._generation = _Generation()

    def reset(self) -> None:
        """Forget everything: the next call starts a generation."""
        self._generation = _Generation()

    def begin(
        self,
        place: Place,
        form: CallForm,
        schedule: Schedule,
        conditions: Conditions | None,
    ) -> Decision:
        """Open a call and decide whether it is skipped.

        Args:
            place: the position of the call in the denoising loop.
            form: the form of the call. A call of another form starts the generation anew.
            schedule: the steps that are to be skipped.
            conditions: what the output depends on besides latents and timestep. A change since the
                last call of the branch starts the branch anew. None: it is not known.

        Returns:
            The decision, which `end` is given.
        """
        starts = not self._continues(place, form)
        restarts = starts and place.generation == self._generation.number
        if starts:
            self._generation = _Generation(place.generation)
        progress = self._generation.branches.setdefault(place.branch, BranchProgress(form))
        before = progress.conditions
        progress.conditions = conditions
        changed = None if conditions is None else conditions.change(before)
        if changed is not None:
            self.drop(place.branch)
        output = None
        extrapolation = 0.0
        outputs = self._generation.outputs
        is_planned = schedule.timetable.action(place.branch, place.step) is Action.SKIP
        if is_planned and place.branch in outputs:
            fraction = schedule.forecast(place.step)
            if fraction:
                extrapolation = fraction * outputs.reach(place.branch, place.time)
            output = outputs.output(place.branch, extrapolation)
        return Decision(place, starts, restarts, changed, output, extrapolation != 0.0)

    def end(
        self,
        decision: Decision,
        schedule: Schedule,
        action: Action,
        output: object,
        *,
        is_last_branch: bool = False,
    ) -> tuple[str, ...]:
        """Close a call.

        Args:
            decision: the answer of `begin`.
            schedule: the one that `begin` was given.
            action: what the call did.
            output: what the call returns.
            is_last_branch: whether no other branch follows in this generation.

        Returns:
            The branches that are over, by name. Nothing of them is kept.
        """
        place = decision.place
        self._append_to_log(decision, schedule, action)
        branches = self._generation.branches
        progress = branches[place.branch]
        progress.called_at = place.step
        if not decision.is_skipped:
            progress.has_computed = True
        if place.steps is not None and place.step == place.steps - 1:
            finished = [
                name
                for name, other in branches.items()
                if other is progress or _is_over(other, place.step, is_last=is_last_branch)
            ]
            for name in finished:
                self.drop(name)
                branches[name].conditions = None
            return tuple(finished)
        if schedule.skips_any and not decision.is_skipped:
            both = schedule.forecasts_any
            self._generation.outputs.hold(place.branch, place.time, output, both=both)
        return ()

    def _append_to_log(self, decision: Decision, schedule: Schedule, action: Action) -> None:
        place = decision.place
        wants_correction = schedule.config.correct
        call = LoggedCall(
            place.generation,
            place.step,
            place.branch,
            action,
            restarted=decision.restarts or decision.changed is not None,
            skips_any=schedule.skips_any,
            wants_correction=wants_correction,
            corrects=place.corrects and wants_correction and schedule.skips_any,
        )
        self._log.append(call)

    def drop(self, branch: str) -> None:
        """Forget the outputs of a branch, so that its next call is computed."""
        self._generation.outputs.drop(branch)
        self._generation.branches[branch].has_computed = False

    def _continues(self, place: Place, form: CallForm) -> bool:
        """Return whether a call belongs to the generation in progress."""
        branches = self._generation.branches
        known = branches.get(place.branch)
        return (
            place.generation == self._generation.number
            and (known is None or known.form.own == form.own)
            and all(other.form.shared == form.shared for other in branches.values())
        )


def _is_over(branch: BranchProgress, step: int, *, is_last: bool) -> bool:
    """Return whether a branch ended before the last step: guidance may end early."""
    is_absent = branch.called_at < step - 1
    return branch.has_computed and (is_last or is_absent)

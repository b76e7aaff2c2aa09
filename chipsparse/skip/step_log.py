"""The log of the transformer calls of the current step: how its outputs came about.

Whoever finishes a call appends it. The wrapped ``step`` of a scheduler reads it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from chipsparse.config import Action


class StepKind(str, enum.Enum):
    """The way in which the outputs of a step were computed."""

    FULL = "full"  # by all branches in full
    SPARSE = "sparse"  # by some branch sparsely
    REUSED = "reused"  # by none: they were made from outputs of earlier steps


@dataclass(frozen=True)
class StepOrigin:
    """The origin of a denoising step's outputs."""

    step: int  # its index
    kind: StepKind
    branches: frozenset[str]  # the guidance branches that were called
    restarted: bool = False  # a branch changed so that its earlier outputs do not predict this one


@dataclass(frozen=True)
class LoggedCall:
    """One finished transformer call."""

    generation: int
    step: int
    branch: str
    action: Action
    restarted: bool = False  # see `StepOrigin`
    # Facts of the generation's schedule. All are false if the call ran as without chipsparse.
    skips_any: bool = False  # some of its steps are skipped
    wants_correction: bool = False  # its config asks for correction
    corrects: bool = False  # some of its steps are skipped, and its scheduler can correct them

    @property
    def is_skipped(self) -> bool:
        """True if the call reused outputs of earlier steps."""
        return self.action is Action.SKIP

    def is_at_step_of(self, other: LoggedCall) -> bool:
        """Return True for a call of the same step, of whatever branch or transformer."""
        return (self.generation, self.step) == (other.generation, other.step)


class StepLog:
    """The calls of the current step, shared by all transformers of a pipeline."""

    def __init__(self) -> None:
        self._calls: list[LoggedCall] = []

    def append(self, call: LoggedCall) -> None:
        """Add a finished call; the first call of a step replaces those of the step before."""
        if self._calls and not call.is_at_step_of(self._calls[-1]):
            self._calls.clear()
        self._calls.append(call)

    def clear(self) -> None:
        """Forget all calls: the generation is over."""
        self._calls.clear()

    @property
    def last(self) -> LoggedCall | None:
        """The last call of the current generation; None before its first one."""
        return self._calls[-1] if self._calls else None

    def origin(self) -> StepOrigin | None:
        """Return the origin of the current step's outputs.

        None before the first call, and for a step that only some of its branches skipped.
        """
        kind = _kind({call.action for call in self._calls})
        if kind is None:
            return None
        return StepOrigin(
            self._calls[-1].step,
            kind,
            frozenset(call.branch for call in self._calls),
            restarted=any(call.restarted for call in self._calls),
        )


def _kind(actions: set[Action]) -> StepKind | None:
    if not actions:
        return None
    if actions == {Action.SKIP}:
        return StepKind.REUSED
    if Action.SKIP in actions:
        return None
    return StepKind.SPARSE if Action.SPARSE in actions else StepKind.FULL

"""The display and the processes of experiments, for commands to implement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from chipsparse.parallel.degrees import Parallel
    from chipsparse.report.generation import GenerationReport

Value = TypeVar("Value")
# Shows that a step, from 0, is finished: takes its number, its action, and the latents behind it.
StepDone = Callable[[int, str, Any], None]


class Progress:
    """The display of a command that makes many clips; this one shows nothing."""

    def plan(self, work: Mapping[str, float]) -> None:
        """Replaces the planned work: names with costs in dense generations."""

    def working(
        self,
        name: str,
        *,
        step_costs: Sequence[float] = (),
    ) -> AbstractContextManager[None]:
        """The time in which a planned work is done."""
        return nullcontext()

    def stage(self, text: str) -> AbstractContextManager[None]:
        """The time in which something of unknown length is done."""
        return nullcontext()

    def denoising(
        self,
        title: str,
        steps: int,
        *,
        plain_lines: int = 5,
    ) -> AbstractContextManager[StepDone]:
        """The time of one denoising loop, with at most so many lines where there is no bar."""
        return nullcontext(lambda step, action, latents: None)

    def tell(self, text: str) -> None:
        """Shows a line that stays."""

    def check(self) -> None:
        """Raises where the work is to be stopped; called between steps that are not shown."""


class Ranks:
    """The processes that make each clip together; this one is alone.

    The first process compares and writes.
    """

    @property
    def writes(self) -> bool:
        """True where this process is the first."""
        return True

    @property
    def parallel(self) -> Parallel | None:
        """The degrees by which they share a generation; None for one process."""
        return None

    def first(self, make: Callable[[], Value]) -> Value | None:
        """The JSON value that the first process makes, in all of them."""
        return make()

    def gather_fallbacks(self, report: GenerationReport | None) -> None:
        """Adds to the first process's report what ran dense on others alone."""

"""One pipeline that makes the clips of a command, each shown and timed while it is made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from chipsparse.cli.generation import denoise
from chipsparse.cli.progress import PLAIN_LINES_PER_GENERATION
from chipsparse.cli.work_progress import WorkProgress
from chipsparse.report.generation import GenerationReport


class Generator:
    """Makes clips, dense or patched, whose times can be compared.

    Args:
        load: loads the pipeline; called when it is needed first.
        steps: of a denoising loop.
        progress: shows what goes on.
        plain_lines: see `ProgressDisplay.denoising`.
    """

    def __init__(
        self,
        load: Callable[[], Any],
        steps: int,
        progress: WorkProgress,
        *,
        plain_lines: int = PLAIN_LINES_PER_GENERATION,
    ) -> None:
        self._load, self._steps, self._lines = load, steps, plain_lines
        self._warm: set[str] = set()
        self.progress = progress

    @functools.cached_property
    def pipe(self) -> Any:
        """The pipeline; whoever patches it restores it."""
        with self.progress.stage("loading the model"):
            return self._load()

    def make(
        self,
        arguments: dict[str, Any],
        *,
        seed: int,
        title: str,
        report: GenerationReport | None = None,
        way: str | None = None,
        work: str = "",
        step_costs: Sequence[float] = (),
    ) -> denoise.Generation:
        """One clip.

        Args:
            arguments: see `denoise.generate`.
            seed: likewise.
            title: what the user reads of it.
            report: of the patched pipeline; None where it is not patched.
            way: a name of how it generates, which is warmed up before its first clip; None: it is
                not.
            work: what the progress calls it, if it was planned.
            step_costs: see `WorkProgress.working`.
        """
        pipe = self.pipe
        if way is not None and way not in self._warm:
            with self.progress.stage(f"{title}: warming up"):
                denoise.warm_up(pipe, arguments, seed=seed, report=report)
        with (
            self.progress.working(work, step_costs=step_costs),
            self.progress.denoising(title, self._steps, plain_lines=self._lines) as display,
        ):
            made = denoise.generate(pipe, arguments, seed=seed, display=display, report=report)
        if way is not None and made.host_bytes == 0:  # else patching takes and pins memory anew
            self._warm.add(way)
        return made

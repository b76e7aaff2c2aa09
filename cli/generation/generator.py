"""One pipeline that makes the clips of a command, each shown and timed while it is made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from chipsparse.cli.generation import denoise
from chipsparse.cli.progress import PLAIN_LINES_PER_GENERATION
from chipsparse.cli.settings import GenerationSettings
from chipsparse.cli.work_progress import WorkProgress
from chipsparse.report.generation import GenerationReport

Way = TypeVar("Way")


@dataclass
class Generator:
    """Makes clips, dense or patched, whose times can be compared.

    Attributes:
        load: loads the pipeline; called when it is needed first.
        also: further arguments of the pipeline's call.
        steps: of a denoising loop; None for those of the settings.
        plain_lines: see `ProgressDisplay.denoising`.
    """

    load: Callable[[], Any]
    settings: GenerationSettings
    progress: WorkProgress
    negative_prompt: str | None = None
    also: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    plain_lines: int = PLAIN_LINES_PER_GENERATION
    _warm: set[str] = field(default_factory=set, init=False)

    @functools.cached_property
    def pipe(self) -> Any:
        """The pipeline; whoever patches it restores it."""
        with self.progress.stage("loading the model"):
            return self.load()

    def arguments(self, prompt: str) -> dict[str, Any]:
        """What the pipeline is called with for a prompt; see `denoise.generate`."""
        call = self.settings.pipeline_call(prompt, negative_prompt=self.negative_prompt)
        return {**call, **self.also}

    def make(
        self,
        prompt: str,
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
            report: of the patched pipeline; None where it is not patched.
            way: names how it generates, which is warmed up before its first clip; None: it is not.
            work: what the progress calls it, if it was planned.
            step_costs: see `WorkProgress.working`.
        """
        pipe, arguments = self.pipe, self.arguments(prompt)
        steps = self.steps or self.settings.num_inference_steps
        if way is not None and way not in self._warm:
            with self.progress.stage(f"{title}: warming up"):
                denoise.warm_up(
                    pipe, arguments, seed=seed, report=report, check=self.progress.display.check
                )
        with (
            self.progress.working(work, step_costs=step_costs),
            self.progress.denoising(title, steps, plain_lines=self.plain_lines) as display,
        ):
            made = denoise.generate(pipe, arguments, seed=seed, display=display, report=report)
        if way is not None and made.host_bytes == 0:  # else patching takes and pins memory anew
            self._warm.add(way)
        return made


def in_turn(ways: Sequence[Way], index: int) -> list[Way]:
    """The ways to generate a prompt, with another one first for each prompt.

    So a machine that slows down or warms up favours none.
    """
    first = index % len(ways)
    return [*ways[first:], *ways[:first]]

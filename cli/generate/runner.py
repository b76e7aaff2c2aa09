"""One loaded pipeline that makes the pictures of a series, dense and sparse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from chipsparse.cli.errors import user_errors
from chipsparse.cli.generation import denoise
from chipsparse.cli.generation.patching import REFUSED, patched
from chipsparse.cli.work_progress import WorkProgress
from chipsparse.profiles.profile import Profile
from chipsparse.report.generation import GenerationReport

ReportSource = Callable[[], GenerationReport | None]


class Runner:
    """A context manager: the pipeline is as it was before, once it ends.

    Args:
        pipe: loaded, not patched.
        profile: what is computed; None where nothing is to run sparse.
        progress: told what goes on.
        steps: of the denoising loop.
        step_costs: of the sparse ones, relative to each other; none: all the same.
        strict: see `chipsparse.enable`.
        layer_times: likewise.
        paired: whether times are compared: then each side is warmed up first, and the pipeline is
            patched for each sparse generation anew, because dense ones run between them.
    """

    def __init__(
        self,
        pipe: Any,
        profile: Profile | None,
        progress: WorkProgress,
        *,
        steps: int,
        step_costs: Sequence[float],
        strict: bool,
        layer_times: bool,
        paired: bool,
    ) -> None:
        self._pipe, self._profile, self.progress = pipe, profile, progress
        self._steps, self._costs = steps, step_costs
        self._strict, self._layer_times, self._paired = strict, layer_times, paired
        self._warm: set[str] = set()
        self._stack = ExitStack()
        self._held: GenerationReport | None = None
        self.report: GenerationReport | None = None

    def __enter__(self) -> Runner:
        if self._profile is not None and not self._paired:
            # Held, so that a series takes and pins host memory once.
            self._held = self._stack.enter_context(self._patch())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def dense(self, arguments: dict[str, Any], *, seed: int, label: str) -> denoise.Generation:
        """A generation of the pipeline as it was."""
        return self._make("dense", arguments, seed, label, lambda: None)

    def sparse(self, arguments: dict[str, Any], *, seed: int, label: str) -> denoise.Generation:
        """A patched one; `report` is its report from when it begins."""
        with self._report() as report, user_errors(*REFUSED):
            before, self.report = report.generation, None
            try:
                return self._make("sparse", arguments, seed, label, lambda: report)
            finally:
                # One that failed before its first step leaves the report of the one before.
                begun = report.generation != before
                self.report = report if begun else _empty(report)

    def _report(self) -> AbstractContextManager[GenerationReport]:
        return self._patch() if self._held is None else nullcontext(self._held)

    def _patch(self) -> AbstractContextManager[GenerationReport]:
        assert self._profile is not None
        return patched(
            self._pipe, self._profile, strict=self._strict, layer_times=self._layer_times
        )

    def _make(
        self, name: str, arguments: dict[str, Any], seed: int, label: str, report: ReportSource
    ) -> denoise.Generation:
        text = f"{label}: {name} run" if label else f"{name} run"
        if self._paired and name not in self._warm:
            with self.progress.stage(f"{text}: warming up"):
                denoise.warm_up(self._pipe, arguments, seed=seed, report=report)
        with (
            self.progress.working(
                work_name(name, label), step_costs=self._costs if name == "sparse" else ()
            ),
            self.progress.denoising(text, self._steps) as steps,
        ):
            made = denoise.generate(self._pipe, arguments, seed=seed, display=steps, report=report)
        if made.host_bytes == 0:  # else each patching takes and pins host memory anew
            self._warm.add(name)
        return made


def work_name(name: str, label: str) -> str:
    """What the progress calls a generation: "dense" and "sparse" are its kinds of work."""
    return f"{name}, {label}"


def _empty(report: GenerationReport) -> GenerationReport:
    """The report of a generation of the same pipeline that did not begin."""
    return GenerationReport(
        strict=report.strict,
        layer_times=report.layer_times,
        pipeline=report.pipeline,
        config=report.config,
    )

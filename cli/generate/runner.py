"""One loaded pipeline that makes the clips of a series, dense and sparse."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

from chipsparse.cli.errors import user_errors
from chipsparse.cli.generate.prepared import Job
from chipsparse.cli.generate.series import Item
from chipsparse.cli.generation.denoise import Generation
from chipsparse.cli.generation.generator import Generator
from chipsparse.cli.generation.patching import patched
from chipsparse.cli.ranks.joined import Joined
from chipsparse.config import ConfigError
from chipsparse.report.generation import GenerationReport


@dataclass
class Runner:
    """A context manager: the pipeline is as it was before, once it ends.

    Where times are compared, each side is warmed up first, and the pipeline is patched for each
    sparse generation anew, because dense ones run between them.

    Attributes:
        generator: has the pipeline, not patched.
        process: this one, of those that make the sparse ones together.
        report: of the latest sparse generation, from when it begins.
    """

    job: Job
    generator: Generator
    process: Joined = Joined()
    report: GenerationReport | None = field(default=None, init=False)
    _held: GenerationReport | None = field(default=None, init=False)
    _stack: ExitStack = field(default_factory=ExitStack, init=False)

    def __enter__(self) -> Runner:
        if self.job.options.mode == "sparse":
            # Held, so that a series takes and pins host memory once.
            self._held = self._stack.enter_context(self._patch())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def dense(self, item: Item) -> Generation:
        """A generation of the pipeline as it was."""
        return self._make("dense", item, None)

    def sparse(self, item: Item) -> Generation:
        """A patched one."""
        with self._report() as report, user_errors(ConfigError):
            before, self.report = report.generation, None
            try:
                return self._make("sparse", item, report)
            finally:
                # One that failed before its first step leaves the report of the one before.
                begun = report.generation != before
                self.report = report if begun else _empty(report)

    def _report(self) -> AbstractContextManager[GenerationReport]:
        return self._patch() if self._held is None else nullcontext(self._held)

    def _patch(self) -> AbstractContextManager[GenerationReport]:
        assert self.job.profile is not None
        options = self.job.options
        return patched(
            self.generator.pipe,
            self.job.profile,
            strict=options.strict,
            layer_times=options.report is not None,
            parallel=self.process.parallel,
        )

    def _make(self, name: str, item: Item, report: GenerationReport | None) -> Generation:
        return self.generator.make(
            item.prompt,
            seed=item.seed,
            title=f"{item.label}: {name} run" if item.label else f"{name} run",
            report=report,
            way=name if self.job.options.compare else None,
            work=work_name(name, item.label),
            step_costs=() if report is None else self.job.step_costs,
        )


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

"""The report of a generation, filled during its calls: reasons are noted, and warned of.

A report has reasons, each a sentence with a code. *Fallbacks* are what runs dense, or denser than
asked, although the config wants it sparse; a strict report raises the first one. *Notes* are
whatever else is worth knowing: slower copies, a cache that lives elsewhere than planned. A
generation in which nothing at all is sparse or skipped has a sentence of its own, and the user is
warned.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from pydantic import TypeAdapter

from chipsparse.common.machine import package_version
from chipsparse.common.user_warnings import warn_user
from chipsparse.common.version import __version__
from chipsparse.config import (
    Action,
    ByCost,
    DenseWarning,
    FallbackError,
    Part,
    QualityWarning,
    SparsityConfig,
)
from chipsparse.kernels.dispatch import Choice
from chipsparse.reasons.reason import Level, Reason, nothing_sparse
from chipsparse.report.nothing_sparse import wants_sparse, why_nothing
from chipsparse.report.records import GenerationRecord, InMemory, PlannedSteps, StepRecord, mean
from chipsparse.report.summary import as_html, as_text, facts
from chipsparse.sparse.plan import CACHED, SparsityPlan


@dataclass
class GenerationReport(GenerationRecord):
    """The record of the current or last call of the pipeline, with all its sections.

    In an explicit loop (`Handle.generation`) it is that of one generation. Calls from other loops
    have no records: a fallback says that they ran dense.
    """

    _warned: InMemory[set[type[Warning]]] = field(default_factory=set, repr=False)
    _begun: InMemory[bool] = field(default=False, repr=False)

    def begin(self, generation: int, record: StepRecord) -> None:
        """Add a record; the first of a call, or of another loop's generation, clears others."""
        if generation != self.generation:
            if not self._begun:
                self._clear()
            self.generation = generation
            self._begun = self.in_call
        record.generation = generation
        self.steps.append(record)

    def begin_call(self) -> None:
        """Clear the report for a call of which something is to be noted before its first record."""
        self._clear()
        self._begun = True

    def end_call(self, *, finished: bool) -> None:
        """Set `nothing_sparse` after a call of the pipeline, and warn of it."""
        self._begun = False
        if any(record.used_caches for record in self.steps):
            self.nothing_sparse = None
        elif finished and self.steps and self.nothing_sparse is None:
            reason = self._why_nothing_was_sparse()
            if reason is not None:
                self.nothing_sparse = reason.text
                self._warn(reason, DenseWarning)

    def _why_nothing_was_sparse(self) -> Reason | None:
        if not any(record.action is Action.SPARSE for record in self.steps):
            steps = 1 + max(record.step for record in self.steps)
            for plan in self.plans.values():
                reason = why_nothing(replace(plan, steps=steps))
                if reason is not None:
                    return reason
        return self.why_all_dense()

    def _clear(self) -> None:
        empty = GenerationReport()
        for name in (
            "plans",
            "steps",
            "reasons",
            "nothing_sparse",
            "error",
            "device",
            "dtype",
            "backends",
            "passed_over",
            "cache_bytes",
            "host_bytes",
        ):
            setattr(self, name, getattr(empty, name))

    def why_all_dense(self, others: Iterable[Reason] = ()) -> Reason | None:
        """Return that nothing runs sparse for the fallbacks and other reasons; None without any."""
        texts = [*self.fallbacks, *(reason.text for reason in others)]
        return nothing_sparse("layers.all_dense", "; ".join(texts)) if texts else None

    def look_ahead(self, plan: SparsityPlan, record: StepRecord) -> None:
        """Warn at a transformer's first call, or raise if strict, where no step will be sparse."""
        for before in self.steps[:-1]:
            if before.transformer == record.transformer or before.action in CACHED:
                return
        reason = why_nothing(plan, record.step, record.transformer)
        if reason is not None:
            self.add(reason)

    def add(self, reason: Reason) -> None:
        """Note a reason once, and warn as its level has it.

        Raises:
            FallbackError: if the run is strict, and the reason says that something runs denser
                than asked.
        """
        if reason.level is Level.NOTHING:
            self._add_nothing_sparse(reason)
            return
        if reason not in self.reasons:
            self.reasons.append(reason)
        if reason.level is Level.QUALITY:
            self._warn(reason, QualityWarning)
        if reason.level is Level.FALLBACK and self.strict:
            raise FallbackError(reason.text)

    def add_dense_calls(self, calls: Reason, nothing: Reason) -> None:
        """Note calls that run dense, and unless others were sparse that nothing is.

        Raises:
            FallbackError: if the run is strict.
        """
        self.add(calls)
        if not any(record.used_caches for record in self.steps):
            self.add(nothing)

    def add_unknown_call(self, calls: Reason, nothing: Reason) -> None:
        """Note and warn of a call at no known step, which runs dense without a record.

        Raises:
            FallbackError: if the run is strict.
        """
        if self.config is not None and not wants_sparse(self.config):
            return
        if self.in_call and not self._begun:
            self.begin_call()
        self.add_dense_calls(calls, nothing)
        self._warn(calls, DenseWarning)

    def _add_nothing_sparse(self, reason: Reason) -> None:
        if self.config is not None and not wants_sparse(self.config):
            return
        self.nothing_sparse = reason.text
        if self.strict:
            raise FallbackError(reason.text)
        self._warn(reason, DenseWarning)

    def _warn(self, reason: Reason, category: type[Warning]) -> None:
        """Warn once in the life of a report: a user makes one image after another."""
        if category not in self._warned:
            self._warned.add(category)
            warn_user(reason.text, category)

    def correct(self, steps: range) -> None:
        """Note which of the skipped steps in this range were corrected."""
        for record in reversed(self.steps):
            if record.generation != self.generation or record.step < steps.start:
                break
            record.corrected |= record.step in steps and record.action is Action.SKIP

    def fail(self, error: BaseException) -> None:
        """Note the error that ended the generation."""
        self.error = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])

    def run_on(self, choices: Mapping[str, Choice]) -> None:
        """Note the backend of each op, and why the ones before it were rejected."""
        for op, choice in choices.items():
            names = self.backends[op].split(", ") if op in self.backends else []
            self.backends[op] = ", ".join(dict.fromkeys([*names, choice.backend.name]))
            self.passed_over.setdefault(op, {}).update(choice.rejected)

    def backend_reasons(self) -> list[str]:
        """Return why backends were passed over, one line for all ops with the same reasons."""
        ops: dict[str, list[str]] = {}
        for op, reasons in self.passed_over.items():
            text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            if text:
                ops.setdefault(text, []).append(op)
        return [f"{', '.join(names)} not on {text}" for text, names in ops.items()]

    def __repr__(self) -> str:
        steps = ", ".join(f"{count} {action}" for action, count in self.actions().most_common())
        return f"<GenerationReport: {steps or 'no steps'}; {len(self.fallbacks)} fallbacks>"

    def summary(self) -> str:
        """Return a few lines for people: the steps, the gain, and why anything ran dense.

        May be called at any time, as may `to_dict`; waits for a device that has not yet finished.
        """
        return as_text(facts(self))

    def _repr_html_(self) -> str:
        """Return `summary` as a table for notebooks."""
        return as_html(facts(self))

    @property
    def config_taken(self) -> SparsityConfig | None:
        """The config with the schedule that the last generation had; before one, as asked for."""
        plan = next(iter(self.plans.values()), None)
        if plan is None:
            return self.config
        form = plan.config.schedule.form
        if not isinstance(form, ByCost):
            return plan.config
        schedule = replace(plan.config.schedule, form=form.taken(plan.sparse_cost))
        return replace(plan.config, schedule=schedule)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it in types of JSON, as files have it, with versions, plans and sums."""
        planned = {name: PlannedSteps.of(plan) for name, plan in self.plans.items()}
        config = self.config_taken
        written: dict[str, Any] = TypeAdapter(GenerationReport).dump_python(
            replace(self, versions=versions(), transformers=planned),
            mode="json",
            by_alias=True,
        )
        asked = None if config is None else config.words()
        written["config"] = TypeAdapter(Any).dump_python(asked, mode="json")
        written["fallbacks"] = self.fallbacks
        written["notes"] = self.notes
        return {"kind": "report", **written, "totals": self._totals()}

    def _totals(self) -> dict[str, Any]:
        by_action: dict[str, float] = {}
        for step in self.steps:
            by_action[step.action.value] = by_action.get(step.action.value, 0.0) + step.seconds
        times: dict[Part, float | None] = {"attention": None, "mlp": None}
        for layer in (layer for step in self.steps for layer in step.layers):
            if layer.seconds is not None:
                times[layer.part] = (times[layer.part] or 0.0) + layer.seconds
        return {
            "steps": dict(self.actions()),
            "calls": len(self.steps),
            "seconds": sum(step.seconds for step in self.steps),
            "seconds_by_action": by_action,
            "attention_seconds": times["attention"],
            "mlp_seconds": times["mlp"],
            "attention_kept": mean(step.attention_kept for step in self.steps),
            "mlp_kept": mean(step.mlp_kept for step in self.steps),
            "bytes_to_device": sum(step.bytes_to_device for step in self.steps),
            "bytes_to_host": sum(step.bytes_to_host for step in self.steps),
        }


def versions() -> dict[str, str | None]:
    """Return the versions that numbers depend on; None for what is not installed."""
    return {
        "chipsparse": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: package_version(name) for name in ("triton", "diffusers")},
    }

"""The report of a generation as a record: what `to_dict`, files and pages have.

Times are in seconds, sizes in bytes, shares between 0 and 1; None is not known.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from chipsparse.common.bounded import Count, Index, Number
from chipsparse.common.machine import package_version
from chipsparse.common.version import __version__
from chipsparse.config import ActionName, Part
from chipsparse.report.generation import GenerationReport, LayerRecord, StepRecord


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class Layer(_Record):
    """A layer's attention or MLP in one transformer call.

    Attributes:
        reason: why it ran dense whatever the step did.
        kept: the share of columns or neurons that was computed.
        backend: the name of a kernel backend, "library" or "model".
        seconds: with the wait for its caches; None unless layer times are measured.
        bytes_to_device: bytes of its caches that came from host memory in this call.
        bytes_to_host: bytes of its caches that went there.
    """

    layer: Index
    part: Part
    action: ActionName
    reason: str | None = None
    kept: Number
    backend: str = "model"
    seconds: Number | None = None
    bytes_to_device: Count = 0
    bytes_to_host: Count = 0


class Call(_Record):
    """A transformer call; see `StepRecord`.

    Attributes:
        seconds: None where the call was skipped or broken off.
        attention_kept: the mean over the layers that ran sparse.
        mlp_kept: the mean over the layers that ran sparse.
    """

    generation: Index = 0
    step: Index
    steps_total: Index | None = None
    branch: str = ""
    transformer: str = ""
    action: ActionName
    finished: bool = False
    replayed: bool = False
    forecast: bool = False
    corrected: bool = False
    restarted: bool = False
    seconds: Number | None = None
    attention_kept: Number | None = None
    mlp_kept: Number | None = None
    bytes_to_device: Count = 0
    bytes_to_host: Count = 0
    cache_bytes: Count | None = None
    host_bytes: Count | None = None
    allocated_bytes: Count | None = None
    peak_allocated_bytes: Count | None = None
    layers: Sequence[Layer] = ()


class Transformer(_Record):
    """A transformer that was called.

    Attributes:
        schedule: the schedule in words.
        actions: the planned action of every step; None where the number of steps is not known.
        layout: the `ModelLayout` of its last call, with tokens and layers.
    """

    class_name: str | None = None
    schedule: str = ""
    actions: Sequence[ActionName] | None = None
    layout: Mapping[str, Any] = {}


class Pipeline(_Record):
    """The pipeline's class, and the folder or hub name that it was loaded from."""

    class_name: str | None = None
    location: str | None = None


class Device(_Record):
    """The type ("cuda", "cpu") and the name of a device."""

    type: str = ""
    name: str = ""


class Totals(_Record):
    """Sums over all calls.

    Attributes:
        steps: the number of calls by action.
        attention_seconds: None unless layer times are measured; mlp_seconds likewise.
        cache_bytes: the most at a time; host_bytes likewise.
    """

    steps: Mapping[str, Count] = {}
    calls: Count = 0
    seconds: Number = 0.0
    seconds_by_action: Mapping[str, Number] = {}
    attention_seconds: Number | None = None
    mlp_seconds: Number | None = None
    attention_kept: Number | None = None
    mlp_kept: Number | None = None
    bytes_to_device: Count = 0
    bytes_to_host: Count = 0
    cache_bytes: Count = 0
    host_bytes: Count = 0


class ReportRecord(_Record):
    """The record of a generation.

    Attributes:
        versions: of chipsparse, python, torch, triton and diffusers.
        dtype: of the hidden states, such as "bfloat16".
        config: the whole `SparsityConfig`, nested as in a profile.
        quality: the config's name among the qualities of a profile.
        transformers: those that were called, by the pipeline's name for each.
        generation: the number of the last generation since the pipeline was patched.
        error: the exception that ended it.
        steps: one entry per transformer call.
        fallbacks: sentences: what ran dense, or denser than asked, and why.
        notes: sentences: what else is worth knowing.
        nothing_sparse: why no step was sparse or skipped although the config asks for some.
        backends: the backends of each operation.
        passed_over: for each operation the faster backends that did not run, with the reason.
        kept_columns: what layers kept when `Handle.kept_columns` was last asked.
    """

    kind: Literal["report"] = "report"
    versions: Mapping[str, str | None] = {}
    device: Device | None = None
    dtype: str | None = None
    pipeline: Pipeline = Pipeline()
    config: Mapping[str, Any] | None = None
    quality: str | None = None
    transformers: Mapping[str, Transformer] = {}
    generation: Count = 0
    error: str | None = None
    steps: Sequence[Call] = ()
    fallbacks: Sequence[str] = ()
    notes: Sequence[str] = ()
    nothing_sparse: str | None = None
    backends: Mapping[str, str] = {}
    passed_over: Mapping[str, Mapping[str, str]] = {}
    kept_columns: Sequence[Mapping[str, Any]] = ()
    totals: Totals = Totals()


def record_of(report: GenerationReport) -> ReportRecord:
    """Return the record of a report; waits for a device that has not yet finished."""
    facts = report.pipeline
    config = next((plan.config for plan in report.plans.values()), report.config)
    transformers = {
        name: Transformer(
            class_name=None if facts is None else facts.transformers.get(name),
            schedule=plan.describe(),
            actions=None if plan.steps is None else [action.value for action in plan.actions()],
            layout={
                **dataclasses.asdict(plan.layout),
                "tokens": plan.layout.tokens,
                "layers": plan.layout.layers,
            },
        )
        for name, plan in report.plans.items()
    }
    own = {name: value for name, value in vars(report).items() if name in ReportRecord.model_fields}
    pipeline = Pipeline()
    if facts is not None:
        pipeline = Pipeline(class_name=facts.pipeline_class, location=facts.location)
    changed = {
        "versions": versions(),
        "device": None if report.device is None else _device(report.device),
        "dtype": None if report.dtype is None else str(report.dtype).removeprefix("torch."),
        "pipeline": pipeline,
        "config": None if config is None else dataclasses.asdict(config),
        "transformers": transformers,
        "steps": [_call(step) for step in report.steps],
        "kept_columns": [dataclasses.asdict(kept) for kept in report.kept_columns],
        "totals": _totals(report),
    }
    return ReportRecord(**{**own, **changed})


def versions() -> dict[str, str | None]:
    """Return the versions that numbers depend on; None for what is not installed."""
    return {
        "chipsparse": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: package_version(name) for name in ("triton", "diffusers")},
    }


def _device(device: torch.device) -> Device:
    cpu = platform.processor() or platform.machine()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    return Device(type=device.type, name=name)


def _call(step: StepRecord) -> Call:
    timed = step.timer is not None and step.finished
    own = {name: getattr(step, name) for name in Call.model_fields if name != "layers"}
    changed = {"action": step.action.value, "seconds": step.seconds if timed else None}
    return Call(**{**own, **changed}, layers=[_layer(layer) for layer in step.layers])


def _layer(layer: LayerRecord) -> Layer:
    values = {name: getattr(layer, name) for name in Layer.model_fields}
    return Layer(**{**values, "action": layer.action.value})


def _totals(report: GenerationReport) -> Totals:
    by_action: dict[str, float] = {}
    for step in report.steps:
        by_action[step.action.value] = by_action.get(step.action.value, 0.0) + step.seconds
    layers = [layer for step in report.steps for layer in step.layers]

    def part_seconds(part: Part) -> float | None:
        times = [layer.seconds for layer in layers if layer.part == part]
        measured = [time for time in times if time is not None]
        return sum(measured) if measured else None

    return Totals(
        steps=report.actions(),
        calls=len(report.steps),
        seconds=sum(step.seconds for step in report.steps),
        seconds_by_action=by_action,
        attention_seconds=part_seconds("attention"),
        mlp_seconds=part_seconds("mlp"),
        attention_kept=_mean(step.attention_kept for step in report.steps),
        mlp_kept=_mean(step.mlp_kept for step in report.steps),
        bytes_to_device=sum(step.bytes_to_device for step in report.steps),
        bytes_to_host=sum(step.bytes_to_host for step in report.steps),
        cache_bytes=report.cache_bytes,
        host_bytes=report.host_bytes,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None

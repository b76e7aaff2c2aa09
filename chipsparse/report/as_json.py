"""The report of a generation as JSON values.

Times are in seconds, sizes in bytes, shares between 0 and 1; what is not known is null.

::

    schema        1; goes up when a field changes its meaning or goes away
    versions      of chipsparse, python, torch, triton and diffusers
    device        type ("cuda", "cpu") and name
    dtype         of the hidden states, such as "bfloat16"
    pipeline      class and location
    config        the whole SparsityConfig, nested as in a profile
    quality       its name among the qualities of a profile, or null
    transformers  by the pipeline's name for each that was called:
        class, schedule (in words), actions (of every step, as planned)
        layout    kinds (name, layers, intermediate_size, ...), heads, head_dim, batch, grids,
                  text_tokens, exact_text, tokens, layers, ... of the last call: see `ModelLayout`
    generation    number of the last one since the pipeline was patched
    error         what ended it, or null
    steps         one entry per transformer call:
        generation      its number; a call that denoises in sections has one for each of them
        step, steps_total, branch, transformer, action, finished
        seconds         null where skipped or broken off
        attention_kept, mlp_kept      mean over the layers that ran sparse
        bytes_to_device, bytes_to_host
        cache_bytes, host_bytes       what the caches held behind the call, and that part of it
                                      which is in host memory
        allocated_bytes, peak_allocated_bytes
                        on a CUDA device behind the call, and the most at a time until then
        layers          one entry for each attention and each MLP that ran:
            layer, part ("attention", "mlp"), action ("dense", "refresh", "sparse"), reason
            kept        share of the columns or neurons computed
            backend     a kernel backend's name, "library" or "model"
            seconds     null unless layer times are measured; with the wait for its caches, and
                        in parallel blocks (FLUX's single ones) the projection of both parts
            bytes_to_device, bytes_to_host
    fallbacks     sentences: what ran dense, or denser than asked, and why
    notes         sentences: what else is worth knowing
    nothing_sparse  why no step was sparse or skipped although the config asks for some, and what
                  would help; null where one was, or none was wanted
    backends      of each operation
    passed_over   for each operation, the faster backends that did not run, with the reason
    kept_columns  what layers kept when `Handle.kept_columns` was last asked: see `KeptColumns`
    totals        steps (by action), calls, seconds, seconds_by_action, attention_seconds and
                  mlp_seconds (null unless measured), attention_kept, mlp_kept, bytes_to_device,
                  bytes_to_host, cache_bytes (the most at a time), host_bytes (likewise)

Further fields of a `StepRecord` stand in its entry under their own names. The file of ``chipsparse
generate --report`` has beside all this ``request``, as ``--json`` tells it, and of a run that came
to its end ``files``, ``denoising_seconds`` of each run, and ``comparison`` with dense, or null.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import platform
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from chipsparse.common.machine import package_version
from chipsparse.common.version import __version__
from chipsparse.config import Part
from chipsparse.plan import SparsityPlan
from chipsparse.report.generation import GenerationReport, LayerRecord, StepRecord

SCHEMA = 1


def to_dict(report: GenerationReport) -> dict[str, Any]:
    """The report as dicts, lists, texts, numbers, booleans and None."""
    pipeline = report.pipeline
    classes = {} if pipeline is None else pipeline.transformers
    config = next((plan.config for plan in report.plans.values()), report.config)
    content = {
        "schema": SCHEMA,
        "versions": versions(),
        "device": _device(report.device),
        "dtype": report.dtype,
        "pipeline": {
            "class": None if pipeline is None else pipeline.pipeline_class,
            "location": None if pipeline is None else pipeline.location,
        },
        "config": None if config is None else dataclasses.asdict(config),
        "quality": report.quality,
        "transformers": {
            name: {"class": classes.get(name), **_plan(plan)} for name, plan in report.plans.items()
        },
        "generation": report.generation,
        "error": report.error,
        "steps": [_step(record) for record in report.steps],
        "fallbacks": report.fallbacks,
        "notes": report.notes,
        "nothing_sparse": report.nothing_sparse,
        "backends": report.backends,
        "passed_over": report.passed_over,
        "kept_columns": [dataclasses.asdict(each) for each in report.kept_columns],
        "totals": _totals(report),
    }
    plain: dict[str, Any] = _plain(content)
    return plain


def versions() -> dict[str, str | None]:
    """What the numbers depend on; None for what is not installed."""
    return {
        "chipsparse": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: package_version(name) for name in ("triton", "diffusers")},
    }


def _device(device: torch.device | None) -> dict[str, str] | None:
    if device is None:
        return None
    cpu = platform.processor() or platform.machine()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    return {"type": device.type, "name": name}


def _plan(plan: SparsityPlan) -> dict[str, Any]:
    layout = plan.layout
    return {
        "schedule": plan.describe(),
        "actions": None if plan.steps is None else plan.actions(),
        "layout": {**dataclasses.asdict(layout), "tokens": layout.tokens, "layers": layout.layers},
    }


def _step(record: StepRecord) -> dict[str, Any]:
    timed = record.timer is not None and record.finished
    return {
        **_fields(record, without=("timer", "layers", "plan")),
        "seconds": record.seconds if timed else None,
        "attention_kept": record.attention_kept,
        "mlp_kept": record.mlp_kept,
        "layers": [_layer(layer) for layer in record.layers],
    }


def _layer(record: LayerRecord) -> dict[str, Any]:
    return {
        **_fields(record, without=("timer", "computed")),
        "kept": record.kept,
        "seconds": record.seconds,
    }


def _totals(report: GenerationReport) -> dict[str, Any]:
    by_action: dict[str, float] = {}
    for record in report.steps:
        name = record.action.value
        by_action[name] = by_action.get(name, 0.0) + record.seconds
    layers = [layer for record in report.steps for layer in record.layers]

    def part_seconds(part: Part) -> float | None:
        times = [layer.seconds for layer in layers if layer.part == part]
        measured = [time for time in times if time is not None]
        return sum(measured) if measured else None

    return {
        "steps": dict(report.actions()),
        "calls": len(report.steps),
        "seconds": sum(record.seconds for record in report.steps),
        "seconds_by_action": by_action,
        "attention_seconds": part_seconds("attention"),
        "mlp_seconds": part_seconds("mlp"),
        "attention_kept": _mean(record.attention_kept for record in report.steps),
        "mlp_kept": _mean(record.mlp_kept for record in report.steps),
        "bytes_to_device": sum(record.bytes_to_device for record in report.steps),
        "bytes_to_host": sum(record.bytes_to_host for record in report.steps),
        "cache_bytes": report.cache_bytes,
        "host_bytes": report.host_bytes,
    }


def _fields(record: Any, *, without: tuple[str, ...]) -> dict[str, Any]:
    names = [item.name for item in dataclasses.fields(record) if item.name not in without]
    return {name: getattr(record, name) for name in names}


def _mean(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def _plain(value: Any) -> Any:
    """The same in types of JSON, which knows no infinity."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value

"""What `chipsparse bench` measured, as one JSON object."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from chipsparse.cli.benchmark import Benchmark
from chipsparse.cli.step_times import StepTimes


def to_json(found: Benchmark) -> str:
    """One JSON object; times of layers in milliseconds, of steps in seconds, sizes in bytes."""
    layout = found.planned.plan.layout
    content = {
        "model": found.model.location,
        "transformer_class": found.model.transformer_class,
        "profile": found.profile.source,
        "quality": found.profile.quality,
        "random_weights": found.random_weights,
        "device": str(found.device),
        "device_name": found.device_name,
        "dtype": str(found.dtype).removeprefix("torch."),
        "threads": found.threads,
        "versions": found.versions,
        "settings": dataclasses.asdict(found.planned.settings),
        "tokens": layout.tokens,
        "heads": layout.heads,
        "head_dim": layout.head_dim,
        "branches": found.planned.branches,
        "layers": [{**dataclasses.asdict(each), "speedup": each.speedup} for each in found.layers],
        "dense": found.dense,
        "steps": None if found.steps is None else _steps_json(found.steps),
        "command": found.command,
    }
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)


def _steps_json(steps: StepTimes) -> dict[str, Any]:
    run = steps.patched_run
    return {
        **dataclasses.asdict(steps),
        "stock_run": steps.stock_run,
        "patched_run": run,
        "speedup_run": None if run is None else steps.stock_run / run,
    }

"""The work of `chipsparse bench`: one layer's operations, then whole denoising steps."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

import torch

from chipsparse.cache.kinds import PARTS, Part
from chipsparse.cli.bench import BenchOptions
from chipsparse.cli.command_line import command_words
from chipsparse.cli.errors import UserError
from chipsparse.cli.layer_budgets import kept
from chipsparse.cli.model import (
    ModelDescription,
    load_pipeline,
    quiet_libraries,
)
from chipsparse.cli.planned import PlannedGeneration, plan_generation
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.random_pipeline import random_pipeline
from chipsparse.cli.request import (
    check_prompt_is_enough,
    device_and_dtype,
    look_up,
    required_profile,
)
from chipsparse.cli.step_times import StepTimes, measure_steps
from chipsparse.common.machine import device_name, package_version
from chipsparse.measure.layer_times import PartTimes, attention_times, mlp_times
from chipsparse.plan import SparsityPlan
from chipsparse.profiles.profile import Profile

MEASURES = {"attention": attention_times, "mlp": mlp_times}
PACKAGES = ("chipsparse", "torch", "triton", "diffusers")


@dataclass(frozen=True)
class Benchmark:
    """Everything that `chipsparse bench` measured.

    Attributes:
        model: what the model's files say.
        profile: what is computed.
        planned: sizes, settings and plan of the generation.
        device: where it ran.
        device_name: as results quote it.
        dtype: of weights and hidden states.
        threads: of PyTorch on a CPU; None on a GPU.
        versions: of the packages that matter; None of those that are not installed.
        layers: times of one layer of each kind.
        dense: why a part of a kind of layers has no sparse step to time, one sentence each.
        steps: times of denoising steps; None where only kernels were asked for.
        random_weights: whether the steps ran on random weights.
        command: runs the same again.
    """

    model: ModelDescription
    profile: Profile
    planned: PlannedGeneration
    device: torch.device
    device_name: str
    dtype: torch.dtype
    threads: int | None
    versions: dict[str, str | None]
    layers: list[PartTimes]
    dense: list[str]
    steps: StepTimes | None
    random_weights: bool
    command: str


def run_benchmark(options: BenchOptions) -> Benchmark:
    """Checks all that is cheap to check, then measures."""
    device, dtype = device_and_dtype(options)
    with ProgressDisplay() as display, quiet_libraries(debug=options.debug):
        model = look_up(options, display)
        profile = required_profile(options, model)
        planned = plan_generation(options, model, profile)
        if not options.kernels:
            check_prompt_is_enough(model, "--kernels measures its layers without a call")
        layers, dense = _measure_layers(planned, device, dtype, display)
        steps = None
        if not options.kernels:
            pipe = _pipeline(options, model, device, dtype, display)
            steps = measure_steps(pipe, planned, display)
    return Benchmark(
        model=model,
        profile=profile,
        planned=planned,
        device=device,
        device_name=device_name(device),
        dtype=dtype,
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        versions={name: package_version(name) for name in PACKAGES},
        layers=layers,
        dense=dense,
        steps=steps,
        random_weights=options.random_weights,
        command=_command(options, planned, device, dtype),
    )


def _measure_layers(
    planned: PlannedGeneration, device: torch.device, dtype: torch.dtype, display: ProgressDisplay
) -> tuple[list[PartTimes], list[str]]:
    """One layer of each kind, and why some have nothing to measure."""
    measured, dense = [], []
    first = 0
    for kind in planned.plan.layout.kinds:
        layers = range(first, first + kind.layers)
        first += kind.layers
        for part in PARTS:
            layer = None if part in planned.never else typical_layer(planned.plan, layers, part)
            if layer is None:
                why = planned.never.get(part) or planned.plan.why_dense(layers[0], part)
                dense.append(f"{part} of {kind.name} layers: {why}")
                continue
            with display.stage(f"measuring {part} of layer {layer} ({kind.name})"):
                measured.append(MEASURES[part](planned.plan, layer, device=device, dtype=dtype))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return measured, dense


def typical_layer(plan: SparsityPlan, layers: range, part: Part) -> int | None:
    """Of the layers that have this part sparse, the one in the middle by what it keeps."""
    sparse = [layer for layer in layers if plan.is_sparse(layer, part)]
    ordered = sorted(sparse, key=lambda layer: kept(plan, layer, part) or 0)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def _pipeline(
    options: BenchOptions,
    model: ModelDescription,
    device: torch.device,
    dtype: torch.dtype,
    display: ProgressDisplay,
) -> Any:
    if options.random_weights:
        with display.stage("making random weights"):
            return random_pipeline(model, device=device, dtype=dtype)
    with display.stage("loading the model"):
        try:
            return load_pipeline(model, device=device, dtype=dtype)
        except UserError as error:
            raise UserError(f"{error}; --random-weights needs none, --kernels no model") from error


def _command(
    options: BenchOptions, planned: PlannedGeneration, device: torch.device, dtype: torch.dtype
) -> str:
    """The command with everything that the options left to the profile and the machine."""
    settings = planned.settings
    settled = {
        "height": settings.height,
        "width": settings.width,
        "frames": settings.num_frames,
        "steps": settings.num_inference_steps,
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
    }
    return shlex.join(command_words("bench", options, settled))

"""The work of `chipsparse bench`: one layer's operations, then whole denoising steps."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any

import torch

from chipsparse.cache.kinds import PARTS, Part
from chipsparse.cli.bench.layer_times import PartTimes, attention_times, mlp_times
from chipsparse.cli.bench.step_times import StepTimes, measure_steps
from chipsparse.cli.command_line import command_words, settled_values
from chipsparse.cli.commands.bench import BenchOptions
from chipsparse.cli.errors import UserError
from chipsparse.cli.model.dense_layers import fp8_weights
from chipsparse.cli.model.description import ModelDescription, load_pipeline
from chipsparse.cli.model.random_pipeline import random_pipeline
from chipsparse.cli.planning.layer_budgets import kept
from chipsparse.cli.planning.planned import PlannedGeneration, plan_generation
from chipsparse.cli.planning.request import check_prompt_is_enough, requested, required_profile
from chipsparse.cli.planning.settings import GenerationSettings
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.ranks.joined import Joined
from chipsparse.cli.ranks.several import met
from chipsparse.cli.results import NO_JSON, fields_json
from chipsparse.common.machine import device_name, package_version
from chipsparse.parallel.degrees import Parallel
from chipsparse.plan import SparsityPlan

MEASURES = {"attention": attention_times, "mlp": mlp_times}
PACKAGES = ("chipsparse", "torch", "triton", "diffusers")


@dataclass(frozen=True)
class Benchmark:
    """Everything that `chipsparse bench` measured.

    Attributes:
        model: its folder or hub name.
        profile: what is computed: a file.
        quality: which one of that profile, if it has some.
        dtype: of weights and hidden states.
        threads: of PyTorch on a CPU; None on a GPU.
        versions: of the packages that matter; None of those that are not installed.
        tokens: of a call of the transformer, those of the text included.
        branches: transformer calls per step.
        layers: times of one layer of each kind.
        dense: why a part of a kind of layers has no sparse step to time, one sentence each.
        steps: times of denoising steps; None where only kernels were asked for.
        parallel: the processes that share the patched steps; None for one.
    """

    model: str
    transformer_class: str
    profile: str
    quality: str | None
    random_weights: bool
    device: torch.device
    device_name: str
    dtype: torch.dtype
    threads: int | None
    versions: dict[str, str | None]
    settings: GenerationSettings
    tokens: int
    heads: int
    head_dim: int
    branches: int
    layers: list[PartTimes]
    dense: list[str]
    steps: StepTimes | None
    parallel: Parallel | None
    command: str
    pixels: tuple[int, int] = field(metadata=NO_JSON)

    def to_json(self) -> dict[str, Any]:
        """Times of layers in milliseconds, of steps in seconds, sizes in bytes."""
        layers = [{**fields_json(each), "speedup": each.speedup} for each in self.layers]
        return {**fields_json(self), "layers": layers}


def run_benchmark(options: BenchOptions, process: Joined) -> Benchmark:
    """Checks all that is cheap to check, then measures.

    Args:
        process: this one, of those that share the patched steps. Of several, each measures the
            stock ones by itself, and none a single layer.
    """
    with requested(options, process) as request:
        model, device, dtype, display = request
        profile = required_profile(options, model)
        planned = plan_generation(options, model, profile)
        if not options.kernels:
            check_prompt_is_enough(model, "--kernels measures its layers without a call")
        process = met(process, options, request, [profile])
        layers: list[PartTimes] = []
        dense: list[str] = []
        if process.parallel is None:
            layers, dense = _measure_layers(planned, model, device, dtype, display)
        steps = None
        if not options.kernels:
            pipe = _pipeline(options, model, device, dtype, display)
            steps = measure_steps(pipe, planned, dtype, display, process)
    layout = planned.plan.layout
    settled = settled_values(planned.settings, device, dtype, options.gpus)
    return Benchmark(
        model=model.location,
        transformer_class=model.transformer_class,
        profile=profile.source,
        quality=profile.quality,
        random_weights=options.random_weights,
        device=device,
        device_name=device_name(device),
        dtype=dtype,
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        versions={name: package_version(name) for name in PACKAGES},
        settings=planned.settings,
        tokens=layout.tokens,
        heads=layout.heads,
        head_dim=layout.head_dim,
        branches=planned.branches,
        layers=layers,
        dense=dense,
        steps=steps,
        parallel=process.parallel,
        command=shlex.join(command_words("bench", options, settled)),
        pixels=planned.pixels,
    )


def _measure_layers(
    planned: PlannedGeneration,
    model: ModelDescription,
    device: torch.device,
    dtype: torch.dtype,
    display: ProgressDisplay,
) -> tuple[list[PartTimes], list[str]]:
    """One layer of each kind, and why some have nothing to measure."""
    measured, dense, never = [], [], dict(planned.never)
    if fp8_weights(model) is not None:
        never.setdefault("mlp", "its weights are in FP8, which whole steps alone measure")
    first = 0
    for kind in planned.plan.layout.kinds:
        layers = range(first, first + kind.layers)
        first += kind.layers
        for part in PARTS:
            layer = None if part in never else typical_layer(planned.plan, layers, part)
            if layer is None:
                why = never.get(part) or planned.plan.why_dense(layers[0], part)
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

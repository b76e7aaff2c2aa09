"""One generation, watched: frames, action and time of each step, and memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from chipsparse.cli.errors import UserError
from chipsparse.cli.model.modular import call_pipeline
from chipsparse.cli.planning.work_share import work_share
from chipsparse.cli.progress import StepDisplay
from chipsparse.cli.results import fields_json
from chipsparse.pipelines.stacked_caches import transformers_of
from chipsparse.report.generation import GenerationReport, StepRecord

WARM_UP_DENSE_STEPS = 2
OPTIONAL_PACKAGES = ("ftfy",)  # that pipelines of diffusers call by these names
# What may help where a model computes numbers that are none.
WAYS_OUT = {
    torch.float16: "use --dtype bfloat16 or float32",
    torch.bfloat16: "use --dtype float32, or a lower --guidance-scale",
    torch.float32: "a lower --guidance-scale may help; if it does not, the weights are damaged",
}


@dataclass(frozen=True)
class StepResult:
    """One denoising step, all its guidance branches together.

    Attributes:
        step: from 0; of a pipeline that denoises in sections, from 0 in each of them.
        action: "dense", "refresh", "sparse" or "skip"; joined by "+" where branches differ.
        seconds: from the end of the step before to the end of this one, what shows the steps left
            out.
        attention_kept: mean share of attention columns computed; None where nothing ran sparse.
        mlp_kept: the same of MLP neurons.
        section: from 0.
    """

    step: int
    action: str
    seconds: float
    attention_kept: float | None
    mlp_kept: float | None
    section: int = 0


@dataclass(frozen=True)
class Generation:
    """A finished generation.

    Attributes:
        frames: `[F, H, W, 3]` uint8.
        denoising_seconds: from just before the first transformer call to the end of the last step.
        total_seconds: with text encoding and decoding.
        peak_gpu_bytes: largest amount of memory allocated on the GPU; None on a CPU.
        cache_bytes: largest size of the caches; 0 when dense.
        host_bytes: how much of it was in host memory beside a GPU.
        backends: the kernel backend of each op.
        backend_reasons: one line for every set of backends passed over, and why.
        fallbacks: one sentence for everything that ran dense although the profile asks otherwise.
        notes: one sentence for whatever else is worth knowing.
        nothing_sparse: why nothing ran sparse although the profile wants it, and what would help.
        work_share: estimated operations over those of a dense generation; None where not known.
    """

    frames: np.ndarray
    steps: list[StepResult]
    denoising_seconds: float
    total_seconds: float
    peak_gpu_bytes: int | None
    cache_bytes: int
    host_bytes: int
    backends: dict[str, str]
    backend_reasons: list[str]
    fallbacks: list[str]
    notes: list[str]
    nothing_sparse: str | None = None
    work_share: float | None = None
    also_in_json: ClassVar = ("height", "width")

    @property
    def height(self) -> int:
        """Of the frames, in pixels."""
        return int(self.frames.shape[1])

    @property
    def width(self) -> int:
        """Of the frames, in pixels."""
        return int(self.frames.shape[2])

    def to_json(self) -> dict[str, Any]:
        """Everything but the pixels."""
        return {**fields_json(self), "frames": len(self.frames)}


def generate(
    pipe: Any,
    arguments: dict[str, Any],
    *,
    seed: int,
    display: StepDisplay,
    report: GenerationReport | None,
) -> Generation:
    """Runs the pipeline once.

    Args:
        arguments: what to call it with, without generator, callback and output type.
        seed: of the noise, drawn on the CPU so that it is the same on every device.
        display: gets each finished step; its own time is nobody's.
        report: of the patched pipeline; None where it is not patched.
    """
    run = _run(pipe, arguments, seed, display, report, output_type="np")
    dtype = next((module.dtype for module in transformers_of(pipe)), torch.float32)
    return Generation(
        frames=_as_frames(run.result, dtype),
        steps=run.steps,
        denoising_seconds=sum(step.seconds for step in run.steps),
        total_seconds=run.total_seconds,
        peak_gpu_bytes=run.peak_gpu_bytes,
        cache_bytes=report.cache_bytes if report else 0,
        host_bytes=report.host_bytes if report else 0,
        backends=dict(report.backends) if report else {},
        backend_reasons=report.backend_reasons() if report else [],
        fallbacks=list(report.fallbacks) if report else [],
        notes=list(report.notes) if report else [],
        nothing_sparse=report.nothing_sparse if report else None,
        work_share=work_share(report) if report else None,
    )


def time_steps(
    pipe: Any,
    arguments: dict[str, Any],
    *,
    seed: int,
    display: StepDisplay,
    report: GenerationReport | None,
) -> tuple[list[StepResult], int | None]:
    """As `generate`, but decodes nothing.

    Returns:
        The denoising steps, and the largest amount of memory allocated on the GPU.
    """
    run = _run(pipe, arguments, seed, display, report, output_type="latent")
    return run.steps, run.peak_gpu_bytes


@dataclass(frozen=True)
class _Call:
    """What a call of the pipeline gave, and how long it took."""

    result: Any
    steps: list[StepResult]
    total_seconds: float
    peak_gpu_bytes: int | None


def _run(
    pipe: Any,
    arguments: dict[str, Any],
    seed: int,
    display: StepDisplay,
    report: GenerationReport | None,
    *,
    output_type: str,
) -> _Call:
    device: torch.device = pipe._execution_device
    on_cuda = device.type == "cuda"
    begun: list[float] = []  # when the first transformer call began
    steps: list[int] = []  # the pipeline's number of each step,
    ends: list[float] = []  # when it ended,
    shown: list[float] = []  # and when it had been shown

    def now() -> float:
        """The time at which all was computed that was queued."""
        if on_cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def before_call(*_: Any) -> None:
        if not begun:
            begun.append(now())

    def on_step_end(step: int, latents: torch.Tensor | None) -> bool:
        ends.append(now())
        steps.append(step)
        display.done(step, _action_of(_records(report, len(steps) - 1)), latents)
        shown.append(time.perf_counter())
        return False

    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    with ExitStack() as hooks, _wanted_packages(type(pipe).__name__):
        for module in transformers_of(pipe):
            hooks.enter_context(module.register_forward_pre_hook(before_call))
        result = call_pipeline(
            pipe,
            arguments,
            generator=torch.Generator("cpu").manual_seed(seed),
            output_type=output_type,
            on_step_end=on_step_end,
        )
    total_seconds = now() - start - (sum(shown) - sum(ends))
    if not ends:
        raise RuntimeError(f"{type(pipe).__name__} made no denoising step")
    # Where no step was computed at all, the first one counts from the start of the call.
    starts = [begun[0] if begun else start, *shown]
    peak = torch.cuda.max_memory_allocated(device) if on_cuda else None
    results = _step_results(report, steps, starts, ends)
    return _Call(result, results, total_seconds, peak)


def warm_up(
    pipe: Any,
    arguments: dict[str, Any],
    *,
    seed: int,
    report: GenerationReport | None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Runs the first steps only, so that a timed run pays for no compilation and no allocation.

    Stops after the first sparse step, or after two steps where none is to come; or where
    ``check``, which is asked after each, raises.
    """

    def on_step_end(step: int, _: torch.Tensor | None) -> bool:
        check()
        if report is None or all(plan.is_dense() for plan in report.plans.values()):
            return step + 1 >= WARM_UP_DENSE_STEPS
        return "sparse" in report.actions()

    call_pipeline(
        pipe,
        arguments,
        generator=torch.Generator("cpu").manual_seed(seed),
        output_type="latent",
        on_step_end=on_step_end,
    )


def peak_process_bytes() -> int | None:
    """Largest resident size that this process ever had; None where the system cannot tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def _wanted_packages(pipeline: str) -> Iterator[None]:
    """Names a package that is missing: diffusers uses some that it imports only where they are."""
    try:
        yield
    except NameError as error:
        if error.name is None or error.name not in OPTIONAL_PACKAGES:
            raise
        raise UserError(
            f"{pipeline} needs the Python package {error.name}; install it with pip install "
            f"{error.name}"
        ) from error


def _records(report: GenerationReport | None, count: int) -> list[StepRecord] | None:
    """Of the step that the loop made behind `count` others; None where nothing is patched.

    The scheduler's own count begins later where the pipeline starts from an image, and again with
    each section.
    """
    if report is None:
        return None
    places = list(dict.fromkeys(record.place for record in report.steps))
    return [record for record in report.steps if record.place in places[count : count + 1]]


def _action_of(records: list[StepRecord] | None) -> str:
    if records is None:
        return "dense"
    return "+".join(dict.fromkeys(record.action.value for record in records))


def _step_results(
    report: GenerationReport | None, steps: list[int], starts: list[float], ends: list[float]
) -> list[StepResult]:
    results: list[StepResult] = []
    for count, (step, start, end) in enumerate(zip(steps, starts, ends, strict=False)):
        records = _records(report, count)
        is_new = bool(results) and step <= results[-1].step
        results.append(
            StepResult(
                step=step,
                action=_action_of(records),
                seconds=end - start,
                attention_kept=_mean([record.attention_kept for record in records or ()]),
                mlp_kept=_mean([record.mlp_kept for record in records or ()]),
                section=results[-1].section + is_new if results else 0,
            )
        )
    return results


def _as_frames(result: Any, dtype: torch.dtype) -> np.ndarray:
    """The first clip or image of a pipeline's output as `[F, H, W, 3]` uint8."""
    output = result.frames if hasattr(result, "frames") else result.images
    frames = np.asarray(output[0], dtype=np.float32)
    if frames.ndim == 3:
        frames = frames[None]
    if not np.isfinite(frames).all():
        way_out = WAYS_OUT.get(dtype, WAYS_OUT[torch.float32])
        raise UserError(f"the model produced values that are not finite; {way_out}")
    return np.rint(frames.clip(0, 1) * 255).astype(np.uint8)


def _mean(values: list[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None

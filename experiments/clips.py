"""Clips that a pipeline makes, watched: frames, action and time of each step, and memory."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from chipsparse.api import enable
from chipsparse.common.errors import UserError, user_errors
from chipsparse.config import PARTS, Action, ConfigError, SparsityConfig
from chipsparse.experiments.progress import Progress, StepDone
from chipsparse.experiments.records import StepResult
from chipsparse.parallel.degrees import Parallel
from chipsparse.pipelines.call import call_pipeline
from chipsparse.pipelines.diffusers_hooks import transformers_of
from chipsparse.profiles.profile import Profile
from chipsparse.report.generation import GenerationReport
from chipsparse.report.records import StepRecord, mean
from chipsparse.sparse.cost_model.layer_times import LayerTime, Rates, layer_time
from chipsparse.sparse.cost_model.run_times import DenseParts
from chipsparse.sparse.plan import SparsityPlan

if TYPE_CHECKING:
    from diffusers.utils import BaseOutput

    from chipsparse.pipelines.call import Pipeline

WARM_UP_DENSE_STEPS = 2
# The way out where a model computes numbers that are none.
WAYS_OUT = {
    torch.float16: "use --dtype bfloat16 or float32",
    torch.bfloat16: "use --dtype float32, or a lower --guidance-scale",
    torch.float32: "a lower --guidance-scale may help; if it does not, the weights are damaged",
}
# Every step in full, over nothing that could be cut in fewer pieces than there are tokens.
IN_FULL = SparsityConfig().override(
    {
        "attention.density": "dense",
        "mlp.density": "dense",
        "schedule.actions": ["dense"],
        "tile": None,
    },
)


@dataclass(frozen=True)
class Generation:
    """A finished generation."""

    frames: np.ndarray  # uint8 `[F, H, W, 3]`
    steps: list[StepResult]
    denoising_seconds: float  # from the first transformer call to the end of the last step
    total_seconds: float  # with text encoding and decoding
    peak_gpu_bytes: int | None  # None on a CPU
    cache_bytes: int  # at most; 0 when dense
    host_bytes: int  # of the caches, in host memory beside a GPU
    backends: dict[str, str]  # by op
    backend_reasons: list[str]  # a line for each set of backends passed over, and why
    fallbacks: list[str]  # a sentence for what ran dense although the profile asks otherwise
    notes: list[str]  # a sentence for whatever else is worth knowing
    nothing_sparse: str | None = None  # why not, although the profile wants it, and what would help
    # Operations over those of a dense generation; None where not known.
    work_share: float | None = None

    @property
    def height(self) -> int:
        """Rows of pixels."""
        return int(self.frames.shape[1])

    @property
    def width(self) -> int:
        """Columns of pixels."""
        return int(self.frames.shape[2])


@dataclass
class ClipMaker:
    """Makes clips of one pipeline, dense or patched, whose times can be compared."""

    load: Callable[[], Any]  # loads the pipeline; called once, when it is needed first
    arguments: Callable[[str], dict[str, Any]]  # of the pipeline's call for a prompt
    steps: int  # of a clip
    progress: Progress = field(default_factory=Progress)
    plain_lines: int = 5  # of a clip, where the progress has no bar
    _warm: set[str] = field(default_factory=set, init=False)

    @functools.cached_property
    def pipe(self) -> Pipeline:
        """The pipeline; whoever patches it restores it."""
        with self.progress.stage("loading the model"):
            return self.load()

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
    ) -> Generation:
        """Makes one clip; ``report``: of the patched pipeline.

        Each named ``way`` to generate is warmed up before its first clip. ``work`` is the name in
        the plan of the progress, and ``step_costs`` are relative times (none: all alike).
        """
        pipe = self.pipe
        arguments = self.arguments(prompt)
        if way is not None and way not in self._warm:
            with self.progress.stage(f"{title}: warming up"):
                warm_up(pipe, arguments, seed=seed, report=report, check=self.progress.check)
        with (
            self.progress.working(work, step_costs=step_costs),
            self.progress.denoising(title, self.steps, plain_lines=self.plain_lines) as display,
        ):
            made = generate(pipe, arguments, seed=seed, display=display, report=report)
        if way is not None and made.host_bytes == 0:  # else patching takes and pins memory anew
            self._warm.add(way)
        return made


@contextmanager
def patched(
    pipe: Pipeline,
    config: SparsityConfig | Profile,
    *,
    strict: bool = False,
    layer_times: bool = False,
    parallel: Parallel | None = None,
) -> Iterator[GenerationReport]:
    """Patches a pipeline for the time being; raises `UserError` where it cannot run so."""
    with user_errors(ValueError):
        handle = enable(pipe, config, strict=strict, layer_times=layer_times, parallel=parallel)
    with handle, user_errors(ConfigError):
        yield handle.report


def stock(pipe: Pipeline, parallel: Parallel | None) -> AbstractContextManager[object]:
    """The stock pipeline: as it is, or computed in full by several processes together."""
    return nullcontext() if parallel is None else patched(pipe, IN_FULL, parallel=parallel)


def generate(
    pipe: Pipeline,
    arguments: dict[str, Any],
    *,
    seed: int,
    display: StepDone,
    report: GenerationReport | None,
) -> Generation:
    """Makes one clip with one call of the pipeline; the display's own time is not counted.

    The noise of a seed is drawn on the CPU, so that it is the same on every device.
    """
    device: torch.device = pipe._execution_device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    result, steps, seconds = _run(pipe, arguments, seed, display, report, output_type="np")
    dtype = next((module.dtype for module in transformers_of(pipe)), torch.float32)
    return Generation(
        frames=_as_frames(result, dtype),
        steps=steps,
        denoising_seconds=sum(step.seconds for step in steps),
        total_seconds=seconds,
        peak_gpu_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
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
    pipe: Pipeline,
    arguments: dict[str, Any],
    *,
    seed: int,
    display: StepDone,
    report: GenerationReport | None,
) -> list[StepResult]:
    """Runs the pipeline once without decoding, and returns its denoising steps."""
    return _run(pipe, arguments, seed, display, report, output_type="latent")[1]


def _run(
    pipe: Pipeline,
    arguments: dict[str, Any],
    seed: int,
    display: StepDone,
    report: GenerationReport | None,
    *,
    output_type: str,
) -> tuple[Any, list[StepResult], float]:
    """The output of one call of the pipeline, its steps, and its seconds in all."""
    device: torch.device = pipe._execution_device
    steps: list[StepResult] = []
    begun: list[float] = []  # when the latest step began
    shown = 0.0  # seconds that the display took

    def now() -> float:
        """The time at which all was computed that was queued."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def before_call(*_: Any) -> None:
        if not begun:
            begun.append(now())

    def on_step_end(step: int, latents: torch.Tensor | None) -> bool:
        nonlocal shown
        end = now()
        # A step in which no transformer was called counts from the start of the call.
        seconds = end - (begun[-1] if begun else start)
        steps.append(_step_result(step, seconds, steps, report))
        display(step, steps[-1].action, latents)
        begun.append(time.perf_counter())
        shown += begun[-1] - end
        return False

    start = time.perf_counter()
    with ExitStack() as hooks:
        for module in transformers_of(pipe):
            hooks.enter_context(module.register_forward_pre_hook(before_call))
        try:
            result = call_pipeline(
                pipe,
                arguments,
                generator=torch.Generator("cpu").manual_seed(seed),
                output_type=output_type,
                on_step_end=on_step_end,
            )
        except NameError as error:  # diffusers imports this package only where it is installed
            if error.name != "ftfy":
                raise
            raise UserError(
                f"{type(pipe).__name__} needs the Python package ftfy; install it with pip install "
                "ftfy",
            ) from error
    seconds = now() - start - shown
    if not steps:
        raise RuntimeError(f"{type(pipe).__name__} made no denoising step")
    return result, steps, seconds


def _step_result(
    step: int,
    seconds: float,
    before: Sequence[StepResult],
    report: GenerationReport | None,
) -> StepResult:
    """The step behind those before; its number begins anew with each section."""
    records: list[StepRecord] = []
    if report is not None:
        # The scheduler's own count begins later where the pipeline starts from an image.
        places = list(dict.fromkeys(record.place for record in report.steps))
        place = places[len(before) : len(before) + 1]
        records = [record for record in report.steps if record.place in place]
    actions = dict.fromkeys(record.action.value for record in records)
    section = 0
    if before:
        section = before[-1].section
        if step <= before[-1].step:
            section += 1
    return StepResult(
        step=step,
        action="dense" if report is None else "+".join(actions),
        seconds=seconds,
        attention_kept=mean(record.attention_kept for record in records),
        mlp_kept=mean(record.mlp_kept for record in records),
        section=section,
    )


def warm_up(
    pipe: Pipeline,
    arguments: dict[str, Any],
    *,
    seed: int,
    report: GenerationReport | None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Runs the first steps only, so that a timed run pays for no compilation and no allocation.

    Stops after the first sparse step, or after two steps where none is to come; or where
    ``check``, which is called after each, raises.
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


def _as_frames(result: BaseOutput, dtype: torch.dtype) -> np.ndarray:
    """The first clip or image of a pipeline's output as `[F, H, W, 3]` uint8."""
    output = result.frames if hasattr(result, "frames") else result.images
    frames = np.asarray(output[0], dtype=np.float32)
    if frames.ndim == 3:
        frames = frames[None]
    if not np.isfinite(frames).all():
        way_out = WAYS_OUT.get(dtype, WAYS_OUT[torch.float32])
        raise UserError(f"the model produced values that are not finite; {way_out}")
    return np.rint(frames.clip(0, 1) * 255).astype(np.uint8)


# The share of a dense generation's arithmetic, where no dense one was timed.

# Rates under which the seconds of the cost model are operations.
OPERATIONS = Rates(
    device="operations",
    attention=1.0,
    linear=1.0,
    memory=math.inf,
    sparse_attention=1.0,
    sparse_mlp=1.0,
    refresh_attention=1.0,
    refresh_seconds=0.0,
    launch_seconds=0.0,
)


def work_share(report: GenerationReport) -> float | None:
    """Operations of all transformer calls over those of the same calls dense; None without plans.

    Counts attention, feed-forward layers and projections, not the choice of columns and neurons.
    """
    done = whole = 0.0
    for record in report.steps:
        if record.plan is None:
            return None
        dense = _layer_costs(record.plan, Action.DENSE, {})
        step = sum(layer.total for layer in dense)
        whole += step
        if record.action is not Action.SKIP:
            done += step - sum(
                (1.0 - layer.kept) * getattr(dense[layer.layer], layer.part)
                for layer in record.layers
                if layer.action is Action.SPARSE
            )
    return done / whole if whole else None


def step_costs(plan: SparsityPlan, *, first: int = 0) -> list[float]:
    """Operations of each step of a plan from ``first`` on, as far as known beforehand."""
    costs = _action_costs(plan, {})
    return [costs[action] for action in plan.actions(first)]


def planned_share(plan: SparsityPlan, dense: DenseParts) -> float:
    """Operations of a whole generation over those of a dense one, as far as known beforehand."""
    costs = _action_costs(plan, dense)
    actions = plan.actions()
    return sum(costs[action] for action in actions) / (len(actions) * costs[Action.DENSE])


def _action_costs(plan: SparsityPlan, dense: DenseParts) -> dict[Action, float]:
    return {
        action: sum(layer.total for layer in _layer_costs(plan, action, dense)) for action in Action
    }


def _layer_costs(plan: SparsityPlan, action: Action, dense: DenseParts) -> list[LayerTime]:
    """Operations of each layer; ``dense`` has those that run dense whatever the plan says."""
    return [
        layer_time(
            layer,
            action,
            plan=plan,
            rates=OPERATIONS,
            dtype=torch.float32,
            dense_parts=[part for part in PARTS if layer in dense.get(part, {})],
        )
        for layer in range(plan.layout.layers)
    ]

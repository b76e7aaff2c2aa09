"""The denoising loop of a running pipeline: its scheduler, branches and position."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from diffusers import ModularPipeline, SchedulerMixin
from diffusers.guiders import BaseGuidance
from diffusers.modular_pipelines import LoopSequentialPipelineBlocks

from chipsparse.pipelines.diffusers_hooks import why_not_cached
from chipsparse.pipelines.patches import Patches
from chipsparse.report.generation import GenerationReport
from chipsparse.skip.scheduler_steps import StepCorrection, shift_of, why_not_corrected
from chipsparse.skip.step_log import StepLog
from chipsparse.skip.timetable import Schedule

# The pipeline's own loop, an explicit one (`Handle.generation`), or any other: of another pipeline
# with the transformer, of the user's, or within a callback.
LoopKind: TypeAlias = Literal["pipeline", "generation", "unknown"]


class DenoisingLoop:
    """The loop that calls the transformers of a plain pipeline: a part of its ``__call__``.

    An explicit loop (`Handle.generation`) is known as well, with its scheduler. Calls from any
    other loop are at no step, unless they name it themselves.
    """

    unnamed_branch = "call0"  # name of the first call of a step where nothing names its branch

    def __init__(self, pipe: Any, report: GenerationReport) -> None:
        self.pipe = pipe
        self.kind: LoopKind = "unknown"
        self.log = StepLog()  # of the transformers' calls
        self.correction = StepCorrection(report, self.log, lambda: self.kind)
        self._explicit_scheduler: Any = None
        self._not_corrected: str | None = None
        self._shift: tuple[Any, float] | None = None  # of the schedule with these levels
        self._arguments: Mapping[str, Any] | None = None
        # The last schedule that a call of an explicit loop did not follow.
        self._unfollowed: Any = None

    @property
    def scheduler(self) -> Any:
        """The scheduler of an explicit loop, else the pipeline's; None without any."""
        own = getattr(self.pipe, "scheduler", None)
        return own if self._explicit_scheduler is None else self._explicit_scheduler

    def follow_schedulers(self) -> None:
        """Let steps be corrected at the pipeline's present schedulers: sound may have its own."""
        parts = getattr(self.pipe, "components", {}).values()
        own = [part for part in parts if isinstance(part, SchedulerMixin)]
        self.correction.follow([self.scheduler, *own])

    @property
    def runs(self) -> bool:
        """True within the pipeline's own call and in an explicit loop."""
        return self.kind != "unknown"

    @property
    def is_suspended(self) -> bool:
        """True within a callback of the pipeline's own call, which goes on after it."""
        return self.kind == "unknown" and self._arguments is not None

    @property
    def is_undisturbed(self) -> bool:
        """True if no code of the user runs between the calls of the transformer.

        That is the pipeline's own loop, where its call was given no callback.
        """
        given = self._arguments or {}
        called = [value for name, value in given.items() if "callback" in name and callable(value)]
        return self.kind == "pipeline" and not called

    def corrects(self, schedule: Schedule) -> bool:
        """Return whether skipped steps of a schedule are corrected, asked once in a generation."""
        scheduler = self.scheduler
        self._not_corrected = why_not_corrected(scheduler)
        if self._not_corrected is None:
            sigmas = scheduler.sigmas
            if self._shift is None or self._shift[0] is not sigmas:  # a wait for the device
                self._shift = sigmas, shift_of(scheduler)
            self._not_corrected = schedule.why_not_corrected(self._shift[1])
        return self._not_corrected is None

    def note_uncorrected(self, step: int | None = None) -> None:
        """Note why the last skipped steps are not corrected, if so, before this step or the end."""
        self.correction.note_uncorrected(self._not_corrected, step)

    @property
    def arguments(self) -> Mapping[str, Any] | None:
        """The arguments of the pipeline's call, by name; None outside of it.

        A plain container of components is never called: its loops have no arguments.
        """
        return self._arguments if callable(self.pipe) else {}

    @contextlib.contextmanager
    def watched(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Within: a call of the pipeline with these arguments."""
        outer = self._arguments
        self._arguments = arguments
        with self._running("pipeline"):
            self.follow_schedulers()
            try:
                yield
            finally:
                self._arguments = outer

    @contextlib.contextmanager
    def explicit(self, scheduler: Any) -> Iterator[None]:
        """Within: a loop of the user's, by this scheduler or, with None, the pipeline's."""
        if self.kind == "generation" or self._arguments is not None:
            raise RuntimeError(
                "a generation is going on, and another one would end it; call "
                "handle.generation() after it, and not in a callback",
            )
        self._unfollowed = None
        try:
            with self._running("generation", scheduler):
                yield
        finally:
            if self.correction.is_on:  # the handle may be used up since
                self.follow_schedulers()

    def suspended(self) -> contextlib.AbstractContextManager[None]:
        """Within: what the user does in the middle of a call, such as calling other pipelines."""
        return self._running("unknown")

    @contextlib.contextmanager
    def _running(self, kind: LoopKind, scheduler: Any = None) -> Iterator[None]:
        outer = self.kind, self._explicit_scheduler
        self.kind = kind
        self._explicit_scheduler = scheduler
        try:
            yield
        finally:
            self.kind, self._explicit_scheduler = outer

    def is_scheduled(self, read: Callable[[Any], float]) -> bool:
        """Return whether the scheduler runs this call of the transformer.

        In an explicit loop the call must be at the timestep that the scheduler has next. After one
        that is not, no call of this schedule counts: schedules may have timesteps in common.

        Args:
            read: gives the call's timestep as a value of the schedule that it gets, or as another
                number where the schedule has no such value; may wait for the device.
        """
        if self.kind != "generation":
            return self.kind == "pipeline"
        scheduler = self.scheduler
        if scheduler is None:
            return True
        schedule = getattr(scheduler, "timesteps", None)
        if schedule is None or schedule is self._unfollowed:
            return False
        if was_set(scheduler) and has_next(scheduler, read):
            return True
        self._unfollowed = schedule
        return False

    def branch(self) -> str | None:
        """The guidance branch that is next, where ``cache_context`` does not name it."""
        return None

    def timestep(self) -> float | None:
        """The scheduler's timestep of the step where the loop tells it; may wait for a device."""
        return None

    def why_not_cached(self, model: torch.nn.Module) -> str | None:
        """The change of a model by a guider for this call, which so runs dense; or None."""
        guided = isinstance(getattr(self.pipe, "guider", None), BaseGuidance)
        return why_not_cached(model) if guided else None

    def branches(self) -> int | None:
        """Guidance branches of the step, each a call of its own; None where no guider tells."""
        return None


class ModularLoop(DenoisingLoop):
    """The loop of a modular pipeline: a block, which has any number of guiders.

    A guider makes a batch of inputs for each branch of a step, and the loop writes the prediction
    into each as it is computed. The current branch is the first one without a prediction.
    """

    unnamed_branch = "cond"  # without a guider there is no other
    _timestep: Any = None
    _batches: Sequence[Any] = ()

    @contextlib.contextmanager
    def watched(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Around a call of the pipeline. Guiders and blocks may be exchanged between calls."""
        patches = Patches()
        components = self.pipe.components
        guiders = [part for part in components.values() if isinstance(part, BaseGuidance)]
        try:
            for guider in guiders:
                for name in ("prepare_inputs", "prepare_inputs_from_block_state"):
                    own = getattr(guider, name)
                    patches.set_attribute(guider, name, self._noting_batches(own))
            for block in denoising_loops(self.pipe._blocks):
                patches.set_attribute(block, "loop_step", self._noting_step(block.loop_step))
            with super().watched(arguments):
                yield
        except BaseException:  # what they had put on the model for the call would stay there
            for guider, model in itertools.product(guiders, components.values()):
                if why_not_cached(model) is not None:
                    guider.cleanup_models(model)
            raise
        finally:
            patches.undo()
            self._timestep = None
            self._batches = ()

    def _noting_batches(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepared(*args: Any, **kwargs: Any) -> Any:
            self._batches = prepare(*args, **kwargs)
            return self._batches

        return prepared

    def _noting_step(self, loop_step: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self._timestep = kwargs.get("t")
            self._batches = ()
            return loop_step(*args, **kwargs)

        return step

    @property
    def is_undisturbed(self) -> bool:
        """Never: blocks of a modular pipeline may be the user's."""
        return False

    def branch(self) -> str | None:
        """The first of the guider's inputs that has no prediction yet; None without a guider."""
        for batch in self._batches:
            if not hasattr(batch, "noise_pred"):
                return str(getattr(batch, BaseGuidance._identifier_key))
        return None

    def timestep(self) -> float | None:
        """The timestep of the running block; None outside of it."""
        return None if self._timestep is None else float(torch.as_tensor(self._timestep))

    def why_not_cached(self, model: torch.nn.Module) -> str | None:
        """The change that a guider made to a model; a guider may have any name."""
        return why_not_cached(model)

    def branches(self) -> int:
        """The inputs that the guider made for this step, one at least."""
        return max(1, len(self._batches))


def is_modular(pipe: Any) -> bool:
    """Return whether a pipeline is a modular one."""
    return isinstance(pipe, ModularPipeline)


def loop_of(pipe: Any, report: GenerationReport) -> DenoisingLoop:
    """The denoising loop of a pipeline of either kind, whose transformers have this report."""
    return (ModularLoop if is_modular(pipe) else DenoisingLoop)(pipe, report)


def check_denoises(pipe: Any) -> None:
    """Refuses a modular pipeline that has no denoising loop, or no model for it yet."""
    if not is_modular(pipe):
        return
    if not denoising_loops(pipe._blocks):
        names = ", ".join(pipe._blocks.sub_blocks) or type(pipe._blocks).__name__
        raise ValueError(
            f"this {type(pipe).__name__} has no denoising loop (its blocks: {names}); enable "
            "chipsparse on the pipeline whose blocks denoise",
        )
    models = {name: item for name, item in pipe.components.items() if "transformer" in name}
    if all(item is None for item in models.values()):
        raise ValueError(
            f"this {type(pipe).__name__} has not loaded its {' and '.join(models)} yet; call "
            "load_components() or update_components() on it first",
        )


def denoising_loops(blocks: Any) -> list[Any]:
    """Return the blocks of a modular pipeline that loop over one that calls a transformer."""
    return [
        block
        for block in _all_blocks(blocks)
        if isinstance(block, LoopSequentialPipelineBlocks)
        and any("transformer" in spec.name for spec in block.expected_components)
    ]


def _all_blocks(block: Any) -> Iterator[Any]:
    yield block
    for inner in (getattr(block, "sub_blocks", None) or {}).values():
        yield from _all_blocks(inner)


def scheduler_step(scheduler: Any) -> int | None:
    """The step that a scheduler says is next, or None where it does not say.

    It knows after its first step, and before it where the pipeline set where it begins.
    """
    for name in ("step_index", "begin_index"):
        step = getattr(scheduler, name, None)
        if isinstance(step, int):
            return step if 0 <= step < len(scheduler.timesteps) else None
    return None


ROUNDING = 2**-7  # relative, of a timestep that users round to bfloat16 twice


def was_set(scheduler: Any) -> bool:
    """Return whether a scheduler has timesteps to denoise by, not those of its training."""
    if getattr(scheduler, "num_inference_steps", None) is not None:
        return True
    trained = getattr(getattr(scheduler, "config", None), "num_train_timesteps", None)
    return len(scheduler.timesteps) != trained


def has_next(scheduler: Any, read: Callable[[Any], float]) -> bool:
    """Return whether a call is at the step that a scheduler, with its timesteps set, has next.

    A scheduler may tell its step always, or from its first step on. One that never does has any of
    its timesteps next. For `read` see `DenoisingLoop.is_scheduled`.
    """
    values = torch.as_tensor(scheduler.timesteps)
    step = scheduler_step(scheduler)
    if step is not None:
        values = values[step : step + 1]
    elif isinstance(getattr(scheduler, "step_index", None), int):
        return False  # it is done
    called = abs(read(None))
    timestep = read(values)
    return any(
        timestep == value or abs(called - value) <= ROUNDING * abs(value)
        for value in values.tolist()
    )


def check_scheduler(scheduler: Any) -> None:
    """Refuses a scheduler that calls the transformer several times per step, as Heun's method does.

    Such calls alternate between points of the trajectory and points beside it, and what one records
    is not what the next one needs. Multistep solvers call it once. The ``order`` of a scheduler of
    diffusers is its calls per step.
    """
    calls = getattr(scheduler, "order", 1)
    if isinstance(calls, int) and calls > 1:
        raise ValueError(
            f"{type(scheduler).__name__} calls the transformer {calls} times per denoising step, "
            "which chipsparse does not support; use a scheduler that calls it once, such as "
            "FlowMatchEulerDiscreteScheduler or UniPCMultistepScheduler",
        )


def value_passed_as(
    timestep: Any,
    schedule: Any,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda v: v,
) -> float | None:
    """The only value of a schedule that a pipeline passes as this timestep; waits for the device.

    None where no value gives this timestep, or several do. A tensor counts by its largest number.
    `change` is what the pipeline makes of the values, in the timestep's dtype.
    """
    if schedule is None:
        return None
    called = torch.as_tensor(timestep).max().cpu()
    values = torch.as_tensor(schedule).cpu()
    (places,) = torch.nonzero(change(values.to(called.dtype)) == called, as_tuple=True)
    return float(values[places[0]]) if places.numel() == 1 else None


def largest(timestep: Any) -> float:
    """The largest of a timestep for each sample or token, or its only one; waits for the device."""
    return float(torch.as_tensor(timestep).max())

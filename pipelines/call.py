"""Calling a pipeline of diffusers, plain or modular, with its steps watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from chipsparse.pipelines.denoising_loop import is_modular

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModularPipeline

Pipeline: TypeAlias = "DiffusionPipeline | ModularPipeline"
# Called at the end of each step with its number, from 0, and the latents that it made, None where
# the pipeline does not give them; where it returns True, the loop ends.
OnStepEnd = Callable[[int, "torch.Tensor | None"], bool]
GUIDANCE = "guidance_scale"
RESULTS = {"videos": "frames", "images": "images"}  # and what plain pipelines call them


def guider_specs(blocks: Any) -> list[Any]:
    """The guiders that modular blocks expect."""
    return [spec for spec in blocks.expected_components if spec.name.startswith("guider")]


def call_pipeline(
    pipe: Any,
    arguments: dict[str, Any],
    *,
    generator: torch.Generator,
    output_type: str,
    on_step_end: OnStepEnd,
) -> Any:
    """Calls a pipeline of either kind with the arguments that a plain one takes.

    A guidance scale that a modular one takes from its guiders is given to those. The output type is
    "np", or "latent" for what is not to be decoded. The result has ``frames`` or ``images``, if
    they were decoded and the loop was not ended.
    """
    options = {**arguments, "generator": generator, "output_type": output_type}
    if not is_modular(pipe):

        def callback(pipe: Any, step: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if on_step_end(step, tensors.get("latents")):
                pipe._interrupt = True  # diffusers' own switch: the rest is passed over
            return tensors

        return pipe(**options, callback_on_step_end=callback)
    inputs = {declared.name for declared in pipe._blocks.inputs}
    if GUIDANCE in options and GUIDANCE not in inputs:
        for spec in guider_specs(pipe._blocks):
            guider = getattr(pipe, spec.name)
            if guider.guidance_scale != options[GUIDANCE]:
                guider = guider.new(guidance_scale=options[GUIDANCE])
                pipe.update_components(**{spec.name: guider})
    try:
        with _steps_watched(pipe.scheduler, on_step_end):
            state = pipe(**{name: value for name, value in options.items() if name in inputs})
    except _Ended:
        return None
    results = {plain: state.get(name) for name, plain in RESULTS.items()}
    return SimpleNamespace(**{name: item for name, item in results.items() if item is not None})


class _Ended(BaseException):
    """Ends a denoising loop; no `Exception`, of which the blocks on the way out write traces."""


@contextmanager
def _steps_watched(scheduler: Any, on_step_end: OnStepEnd) -> Iterator[None]:
    """Tells of each call of the scheduler's ``step``: there is one at the end of each step."""
    own = scheduler.step
    done = 0

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        result = own(*args, **kwargs)
        done += 1
        if on_step_end(done - 1, result[0]):  # a tuple, or what diffusers makes like one
            raise _Ended
        return result

    scheduler.step = step
    try:
        yield
    finally:
        del scheduler.step

"""A dense generation watched where the pipeline hands the transformer's output to its scheduler.

There the guidance branches are one output already, in the form that every diffusers scheduler
knows, so that one place serves all models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from chipsparse.skip.correction import STEP_ARGUMENTS
from chipsparse.skip.patched_step import Step, wrap_step
from chipsparse.skip.scheduler import Scheduler
from chipsparse.tuning.jump_costs import Trajectory

CHUNK = 1 << 20  # numbers of each output that are multiplied at a time, in float64


@contextmanager
def watched_scheduler(scheduler: Scheduler) -> Iterator[Callable[[], Trajectory]]:
    """Keep in host memory what a scheduler is given, and yield a function that sums it up.

    The pipeline calls it once a step. The function takes N^2 products of the outputs of N steps.
    Copies that the pipeline makes of its scheduler, for sound, are not watched.
    """
    outputs: list[torch.Tensor] = []
    facts: list[tuple[float, float]] = []  # the effect and the time of each step

    def watched(inner: Step) -> Step:
        def step(*args: Any, **kwargs: Any) -> object:
            given = {**dict(zip(STEP_ARGUMENTS, args, strict=False)), **kwargs}
            names = ("model_output", "sample")
            output, sample = (given[name].detach().to("cpu", copy=True) for name in names)
            stepped = inner(*args, **kwargs)
            outputs.append(output)
            after = stepped[0].detach().cpu()
            facts.append((effect(sample, output, after), float(given["timestep"])))
            return stepped

        return step

    def trajectory() -> Trajectory:
        flat = torch.stack(outputs).flatten(1)
        products = torch.zeros(len(flat), len(flat), dtype=torch.float64)
        for chunk in flat.split(CHUNK, dim=1):
            wide = chunk.double()
            products += wide @ wide.T
        effects, times = np.array(facts).T
        return Trajectory(products.numpy(), effects, times)

    restore = wrap_step(scheduler, watched)
    try:
        yield trajectory
    finally:
        restore()


def effect(sample: torch.Tensor, output: torch.Tensor, after: torch.Tensor) -> float:
    """Return how far a step moves the latents along the output: b of the best fit y = a x + b v.

    Here x are the latents before the step, v the output, and y the latents behind the step. It is
    exact for schedulers such as Euler's and DDIM; those of several steps also use older outputs.
    """
    x, v, y = (tensor.double().flatten() for tensor in (sample, output, after))
    xx, xv, vv, xy, vy = (float(a @ b) for a, b in ((x, x), (x, v), (v, v), (x, y), (v, y)))
    determinant = xx * vv - xv * xv
    return (xx * vy - xv * xy) / determinant if determinant else 0.0

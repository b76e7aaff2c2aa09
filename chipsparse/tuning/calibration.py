"""A dense generation watched where the pipeline hands the transformer's output to its scheduler.

There the guidance branches are one output already, in the form that every diffusers scheduler
knows, so that one place serves all models.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
import torch

from chipsparse.schedule.correction import GIVEN
from chipsparse.schedule.wrapped_step import Step, wrap_step
from chipsparse.tuning.jump_costs import Trajectory

# Numbers of each output that are multiplied at a time, in float64.
CHUNK = 1 << 20


class SchedulerTap:
    """Keeps what the scheduler of a pipeline is given, in host memory; a context manager.

    Of copies that the pipeline makes of its scheduler, for sound, it keeps nothing.

    Args:
        scheduler: of a pipeline that calls it once a step.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._outputs: list[torch.Tensor] = []
        self._facts: list[tuple[float, float]] = []  # the effect and the time of each step

    def _watched(self, inner: Step) -> Step:
        def step(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(GIVEN, args, strict=False)), **kwargs}
            names = ("model_output", "sample")
            output, sample = (given[name].detach().to("cpu", copy=True) for name in names)
            stepped = inner(*args, **kwargs)
            self._outputs.append(output)
            after = stepped[0].detach().cpu()
            self._facts.append((effect(sample, output, after), float(given["timestep"])))
            return stepped

        return step

    def __enter__(self) -> SchedulerTap:
        self._undo = wrap_step(self._scheduler, self._watched)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo()

    def trajectory(self) -> Trajectory:
        """The trajectory of the generation; takes N^2 products of outputs."""
        outputs = torch.stack(self._outputs).flatten(1)
        products = torch.zeros(len(outputs), len(outputs), dtype=torch.float64)
        for chunk in outputs.split(CHUNK, dim=1):
            wide = chunk.double()
            products += wide @ wide.T
        effects, times = np.array(self._facts).T
        return Trajectory(products.numpy(), effects, times)


def effect(sample: torch.Tensor, output: torch.Tensor, after: torch.Tensor) -> float:
    """How far a step moves the latents along the output: b of the best fit after = a x + b v.

    Exact for schedulers such as Euler's and DDIM; those of several steps also use older outputs.

    Args:
        sample: the latents x before the step, of any shape.
        output: the model's output v, of the same shape.
        after: the latents behind the step, likewise.
    """
    x, v, y = (tensor.double().flatten() for tensor in (sample, output, after))
    xx, xv, vv, xy, vy = (float(a @ b) for a, b in ((x, x), (x, v), (v, v), (x, y), (v, y)))
    determinant = xx * vv - xv * xv
    return (xx * vy - xv * xy) / determinant if determinant else 0.0

"""The expected time of a generation's steps, with caches in host memory, on several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from chipsparse.config import PARTS, Action, Part
from chipsparse.sparse.cost_model.exchanges import Sharing
from chipsparse.sparse.cost_model.layer_times import Rates, layer_time
from chipsparse.sparse.plan import SparsityPlan

SLOTS = 2  # for tensors that come from host memory: one layer loads while another computes

# Bytes that a part of a layer brings from host memory in a step, and that it writes there.
Moved = Callable[[int, Part, Action], tuple[int, int]]
DenseParts = Mapping[Part, Mapping[int, str]]  # layers that never run sparse, and why


@dataclass(frozen=True)
class RunEstimate:
    """Seconds and bytes of denoising steps, all guidance branches of a process together."""

    rates: Rates
    stock: float  # a step of the model without chipsparse, on one device
    steps: Mapping[Action, float]  # a step, transfers and exchanges included
    exchanging: Mapping[Action, float]  # the exchanges between processes in it
    computing: float  # the computation of a sparse step alone
    moving: float  # the transfers of a sparse step alone
    to_device: int  # bytes that a sparse step brings from host memory
    to_host: int  # bytes that it writes back
    stock_run: float  # all steps without chipsparse, on one device
    run: float  # all steps

    @property
    def speedup_run(self) -> float:
        """All steps without chipsparse over all steps with it; of the denoising alone."""
        return self.stock_run / self.run

    @property
    def hidden(self) -> float:
        """The share of a sparse step's transfers that takes no time of its own."""
        waiting = self.steps[Action.SPARSE] - self.exchanging[Action.SPARSE] - self.computing
        return 1.0 if self.moving == 0 else max(0.0, 1 - waiting / self.moving)


@dataclass(frozen=True)
class Load:
    """The computation and transfers of a piece of a layer."""

    seconds: float  # its computation
    part: Part = "attention"  # whose slots it uses
    to_device: int = 0  # bytes that must have arrived before
    to_host: int = 0  # bytes that leave behind it


def estimate_run(
    plan: SparsityPlan,  # of several processes it is that of the largest share
    *,
    moved: Moved,  # of one guidance branch
    captured: bool,  # sparse steps are replays of a CUDA graph
    dense_parts: DenseParts,
    dtype: torch.dtype,
    branches: int,  # calls per step; at a refresh the first of them chooses the columns
    rates: Rates,
    sharing: Sharing | None = None,  # of several processes
) -> RunEstimate:
    """Return the estimate of a generation whose number of steps the plan knows."""
    assert plan.steps is not None
    calls = branches if sharing is None else sharing.calls
    layers = range(plan.layout.layers)
    timed = partial(layer_time, rates=rates, dtype=dtype)
    launched = {Action.REFRESH} if captured else {Action.REFRESH, Action.SPARSE}

    def loads(action: Action, chooses: bool = True) -> list[Load]:
        pieces: list[Load] = []
        for layer in layers:
            dense = [part for part in PARTS if layer in dense_parts[part]]
            time = timed(layer, action, plan=plan, dense_parts=dense, chooses=chooses)
            is_launched = action in launched and len(dense) < len(PARTS)
            waiting = rates.launch_seconds - time.total if is_launched else 0.0
            pieces += [
                Load(time.attention, "attention", *moved(layer, "attention", action)),
                Load(time.rest + max(0.0, waiting)),
                Load(time.mlp, "mlp", *moved(layer, "mlp", action)),
            ]
        return pieces

    sparse = loads(Action.SPARSE)
    up = sum(load.to_device for load in sparse)
    down = sum(load.to_host for load in sparse)
    exchanging = {
        action: 0.0 if sharing is None else sharing.seconds(action, rates) for action in Action
    }
    steps = {
        action: exchanging[action]
        + step_seconds(loads(action), rates)
        + (calls - 1) * step_seconds(loads(action, chooses=False), rates)
        for action in Action
    }
    config = plan.config.override({"attention.precision": "model"})
    alone = replace(plan, config=config, layout=replace(plan.layout, share=None))
    stock = branches * sum(
        timed(layer, Action.DENSE, plan=alone, dense_parts=PARTS).total for layer in layers
    )
    return RunEstimate(
        rates=rates,
        stock=stock,
        steps=steps,
        exchanging=exchanging,
        computing=calls * sum(load.seconds for load in sparse),
        moving=calls * max(up, down) / rates.link_rate(up, down),
        to_device=calls * up,
        to_host=calls * down,
        stock_run=plan.steps * stock,
        run=sum(steps[action] for action in plan.actions()),
    )


def step_seconds(loads: Iterable[Load], rates: Rates) -> float:
    """The time of pieces that run one behind the other while the link fetches ahead.

    A piece's tensors are fetched from when the one before that uses the same slots begins, into the
    slot that was emptied longest ago; what changed goes back in the other direction of the link.
    """
    loads = list(loads)
    up = sum(load.to_device for load in loads)
    down = sum(load.to_host for load in loads)
    link = rates.link_rate(up, down)
    end = fetched = written = 0.0
    asked: dict[Part, float] = {}
    emptied: dict[Part, list[float]] = {}  # when each of the two slots was free again
    for load in loads:
        start = end
        free = emptied.setdefault(load.part, [0.0] * SLOTS)
        moves = load.to_device > 0 or load.to_host > 0
        if moves:
            fetched = max(fetched, asked.get(load.part, 0.0), free[0])
            fetched += load.to_device / link
            start = asked[load.part] = max(end, fetched)
        end = start + load.seconds
        if load.to_host:
            written = max(written, end) + load.to_host / link
        if moves:
            emptied[load.part] = [*free[1:], written if load.to_host else end]
    return end

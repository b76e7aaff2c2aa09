"""Whether sparse calls gain by being captured as CUDA graphs: they wait for the host otherwise.

A replay takes the host next to nothing, and a capture about one call more. So what counts is how
long the device computes, which the cost model estimates; how long a call really takes, and how
long the host takes to launch it, which are measured; and how many sparse calls are still to come.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from chipsparse.cache.kinds import PARTS, Part
from chipsparse.config import SparsityConfig
from chipsparse.measure.cost_model import Rates, layer_time
from chipsparse.measure.step_seconds import estimated_seconds
from chipsparse.plan import Action, SparsityPlan

# Sparse calls of a branch that run as usual first: what the second takes is measured, since the
# first one may compile.
CALLS_BEFORE = 2
# The host is what a call waits for where launching takes this share of it.
HOST_SHARE = 0.75
# What the host takes for a capture beside launching: 119 ms where a step of FLUX.1 takes 85.
CAPTURE_CALLS = 1.5
# Before a call was measured: where the device computes this much longer than the host is expected
# to launch, it never waits.
LIKELY = 2.0


def may_capture(plan: SparsityPlan, dtype: torch.dtype, rates: Rates | None = None) -> bool:
    """Whether sparse calls are captured, or may turn out to gain by it: their graphs need room.

    Args:
        plan: has sizes and steps.
        dtype: of the hidden states.
        rates: of the device; by default those of an H200.
    """
    if not plan.captures_steps():
        return False
    if plan.config.cuda_graphs == "always":
        return True
    if plan.sparse_steps_from(0) <= CALLS_BEFORE:
        return False
    rates = Rates() if rates is None else rates
    return device_seconds(plan, dtype, rates) < LIKELY * plan.layout.layers * rates.launch_seconds


def device_seconds(
    plan: SparsityPlan,
    dtype: torch.dtype,
    rates: Rates | None = None,
    dense: Collection[tuple[int, Part]] = (),
) -> float:
    """How long a device computes a sparse call of one guidance branch: an estimate.

    Args:
        plan: has sizes and shares.
        dtype: of the hidden states.
        rates: of the device; by default those of an H200.
        dense: (layer, part) of what runs dense although the plan has it sparse.
    """
    rates = Rates() if rates is None else rates
    seconds = 0.0
    for layer in range(plan.layout.layers):
        left = [part for part in PARTS if (layer, part) in dense]
        time = layer_time(
            layer, Action.SPARSE, plan=plan, rates=rates, dtype=dtype, dense_parts=left
        )
        seconds += time.rest
        for part in PARTS:
            if plan.is_sparse(layer, part) and part not in left:
                seconds += estimated_seconds(plan, layer, part, dtype=dtype, rates=rates).sparse
            else:
                seconds += getattr(time, part)
    return seconds


def capture_pays(*, host: float, call: float, device: float, calls: int) -> bool:
    """Whether to capture the next one of some calls that are alike.

    Args:
        host: seconds that the host took to launch the last one.
        call: seconds that it took on the device, waits for the host included.
        device: seconds that the device computes, as estimated.
        calls: how many are to come.
    """
    return host >= HOST_SHARE * call and (call - device) * calls > CAPTURE_CALLS * host


def as_of_many(config: SparsityConfig, plan: SparsityPlan, dtype: torch.dtype) -> SparsityConfig:
    """The config with which a few sparse steps run as those of a whole generation do.

    Args:
        config: of a run of a few steps.
        plan: of the generation.
        dtype: of the hidden states.
    """
    return config.override({"cuda_graphs": "always" if may_capture(plan, dtype) else "never"})

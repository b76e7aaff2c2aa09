"""The parts of a model's layers that a sparse step would not make faster on a GPU.

Attention or the feed-forward layer of a layer whose sparse step saves next to nothing of a dense
one is better left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from chipsparse.cache.kinds import PARTS, Part
from chipsparse.layers.mlp_weights import Fp8Form
from chipsparse.measure.capture_gain import may_capture
from chipsparse.measure.step_clock import StepClock
from chipsparse.measure.step_seconds import StepSeconds, estimated_seconds
from chipsparse.plan import SparsityPlan
from chipsparse.report.dense_layers import dense_notes

PartSeconds = Mapping[tuple[int, Part], StepSeconds]


def part_seconds(
    plan: SparsityPlan,
    device: torch.device,
    dtype: torch.dtype,
    clock: StepClock,
    *,
    dense: Collection[tuple[int, Part]] = (),
    fp8_mlps: Mapping[int, Fp8Form] | None = None,
    captures: bool = True,
) -> PartSeconds:
    """The times of what the plan has sparse.

    Nothing where a backend is forced, nor on a CPU: there sparse steps are for tests.

    Args:
        plan: what is sparse, for which sizes.
        device: where the model computes.
        dtype: that it computes in.
        clock: knows or measures them.
        dense: what cannot run sparse, so that its times do not matter.
        fp8_mlps: layers whose feed-forward weights are in FP8, which are estimated, and what their
            linears round.
        captures: whether steps can be captured, where that may pay.
    """
    config = plan.config
    if device.type != clock.device_type or config.backend != "auto" or plan.is_dense():
        return {}
    fp8_mlps, found = fp8_mlps or {}, {}
    captured = captures and may_capture(plan, dtype)
    for part in PARTS:
        layers = [
            layer
            for layer in range(plan.layout.layers)
            if plan.is_sparse(layer, part) and (layer, part) not in dense
        ]
        for layer in sorted(fp8_mlps.keys() & set(layers)) if part == "mlp" else ():
            layers.remove(layer)
            found[layer, part] = estimated_seconds(
                plan, layer, part, dtype=dtype, fp8=fp8_mlps[layer]
            )
        times = clock.seconds(plan, part, layers, device=device, dtype=dtype, captured=captured)
        found.update({(layer, part): seconds for layer, seconds in times.items()})
    return found


def slower_parts(plan: SparsityPlan, times: PartSeconds) -> dict[tuple[int, Part], str]:
    """What is left dense as it is faster so, and the reason in words.

    Nothing where ``where_slower`` is sparse.
    """
    if plan.config.where_slower == "sparse":
        return {}
    return {place: _reason(seconds) for place, seconds in times.items() if not seconds.pays}


def _reason(seconds: StepSeconds) -> str:
    verb, where = ("takes", "here") if seconds.measured else ("is estimated at", "on a GPU")
    return (
        f"a sparse step of it {verb} {milliseconds_text(seconds.sparse)} {where} and a dense one "
        f"{'' if seconds.measured else 'at '}{milliseconds_text(seconds.dense)}"
    )


def milliseconds_text(seconds: float) -> str:
    """Two digits that count: 0.0061 ms, 0.35 ms, 12 ms."""
    return f"{float(f'{1e3 * seconds:.2g}'):g} ms"


def notes_on(slower: Mapping[tuple[int, Part], str], layers: int) -> list[str]:
    """One sentence for each part and reason, of a model with so many layers."""
    sparse = " (where_slower: sparse would keep it sparse)"
    reasons = {place: reason + sparse for place, reason in slower.items()}
    return dense_notes(reasons, layers, since=", as it is faster so")

"""How long one layer's attention and MLP take, dense and at every action, on random tensors.

What is timed is what a generation runs, see `random_layers`. The baseline is PyTorch in the same
process, the faster of its times before and after the others. Before a sparse step is timed, its
result is compared with that of a dense one where the two must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from chipsparse.cli.bench.random_layers import RandomAttention, RandomMLP
from chipsparse.config import Part
from chipsparse.cost_model.layer_times import kept_columns
from chipsparse.experiments.timing import Call, time_call
from chipsparse.kernels.dispatch import Choice
from chipsparse.plan import SparsityPlan

# Largest ||sparse - dense|| / ||dense||, by dtype; a wrong kernel is off by more than a tenth.
ERROR_LIMIT = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}


class WrongResultError(RuntimeError):
    """A sparse step computes something else than it must, so its time means nothing."""


@dataclass(frozen=True)
class PartTimes:
    """One part of one layer, for one call of the transformer.

    Attributes:
        part: which.
        layer: number of the transformer block.
        kind: what the model calls blocks like it.
        kept: columns or neurons that a sparse step computes.
        total: of how many.
        baseline_ms: PyTorch without chipsparse.
        baseline: what of PyTorch.
        milliseconds: of what a dense, a refresh and a sparse step compute, by action. An MLP does
            the same at a dense step and at a refresh.
        error: relative difference from a dense step where there should be none but rounding.
        backends: what each operation ran on.
    """

    part: Part
    layer: int
    kind: str
    kept: int
    total: int
    baseline_ms: float
    baseline: str
    milliseconds: dict[str, float]
    error: float
    backends: dict[str, str]

    @property
    def speedup(self) -> float:
        """Of the sparse step over the baseline."""
        return self.baseline_ms / self.milliseconds["sparse"]


@torch.inference_mode()
def attention_times(
    plan: SparsityPlan, layer: int, *, device: torch.device, dtype: torch.dtype
) -> PartTimes:
    """Times the self-attention of a layer that the plan has sparse.

    Raises:
        WrongResultError: a sparse step right after the refresh does not give what that gave.
    """
    random = RandomAttention(plan, layer, device=device, dtype=dtype)

    def baselines() -> dict[str, float]:
        return _attention_baselines(random.query, random.key, random.value)

    error = _checked("attention", random.sparse(), random.dense(), layer)
    stock = baselines()
    times = {
        name: time_call(call, device).latency_ms
        for name, call in (
            ("dense", random.dense),
            ("refresh", random.refresh),
            ("sparse", random.sparse),
        )
    }
    for name, found in baselines().items():
        stock[name] = min(found, stock[name])
    fastest = min(stock, key=lambda name: stock[name])
    return PartTimes(
        part="attention",
        layer=layer,
        kind=plan.layout.kind(layer).name,
        kept=kept_columns(plan, layer),
        total=plan.layout.tokens,
        baseline_ms=stock[fastest],
        baseline=f"scaled_dot_product_attention{fastest}",
        milliseconds=times,
        error=error,
        backends=_names(random.choices),
    )


@torch.inference_mode()
def mlp_times(
    plan: SparsityPlan, layer: int, *, device: torch.device, dtype: torch.dtype
) -> PartTimes:
    """As `attention_times`, for the feed-forward layer; every sparse step chooses its neurons.

    Raises:
        WrongResultError: a sparse step that recomputes every neuron does not give what a dense one
            gives.
    """
    random = RandomMLP(plan, layer, device=device, dtype=dtype)
    error = _checked("the MLP", random.sparse(random.neurons), random.stock(), layer)
    random.record()
    first_ms, full_ms, sparse_ms, last_ms = (
        time_call(call, device).latency_ms
        for call in (random.stock, random.dense, random.sparse, random.stock)
    )
    return PartTimes(
        part="mlp",
        layer=layer,
        kind=plan.layout.kind(layer).name,
        kept=plan.mlp_keep_count(layer),
        total=random.neurons,
        baseline_ms=min(first_ms, last_ms),
        baseline="two linears and SiLU, gated" if random.gated else "two linears and GELU",
        milliseconds={"dense": full_ms, "refresh": full_ms, "sparse": sparse_ms},
        error=error,
        backends=_names(random.choices),
    )


def _names(choices: Mapping[str, Choice]) -> dict[str, str]:
    return {op: choice.backend.name for op, choice in choices.items()}


def _checked(what: str, sparse: torch.Tensor, dense: torch.Tensor, layer: int) -> float:
    difference = (sparse.float() - dense.float()).norm() / dense.float().norm()
    error, limit = difference.item(), ERROR_LIMIT.get(dense.dtype, 1e-3)
    if not error <= limit:
        raise WrongResultError(
            f"a sparse step of {what} of layer {layer} is off by {error:.1e} of the dense result, "
            f"more than {limit:.0e}; it was not timed"
        )
    return error


def _libraries(device: torch.device) -> dict[str, SDPBackend | None]:
    """What PyTorch's attention may run on; the fastest of them is the baseline."""
    if device.type != "cuda":
        return {"": None}
    return {
        "": None,
        " (cuDNN)": SDPBackend.CUDNN_ATTENTION,
        " (flash)": SDPBackend.FLASH_ATTENTION,
    }


def _attention_baselines(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> dict[str, float]:
    """Milliseconds of each of PyTorch's kernels that can run on these tensors."""
    times = {
        name: _milliseconds_with(
            backend, lambda: F.scaled_dot_product_attention(query, key, value), query.device
        )
        for name, backend in _libraries(query.device).items()
    }
    return {name: found for name, found in times.items() if found is not None}


def _milliseconds_with(
    backend: SDPBackend | None, call: Call, device: torch.device
) -> float | None:
    """The time of a call with one of PyTorch's kernels; None where it cannot run."""
    with nullcontext() if backend is None else sdpa_kernel(backend):
        try:
            return time_call(call, device).latency_ms
        except RuntimeError:
            if backend is None:
                raise
            return None

"""How long one layer's attention and MLP take, dense and at every action, on random tensors.

What is timed is what a generation runs: `layers.attention` and `layers.mlp` at the sizes and shares
of a plan, projections left out. The baseline is PyTorch in the same process, the faster
of its times before and after the others. Before a sparse step is timed, its result is compared with
that of a dense one where the two must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from chipsparse.cache.tensors import AttentionCache, MLPCache
from chipsparse.config import Part
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.layers import attention, mlp
from chipsparse.layers.column_budget import AttentionBudget, static_columns, static_count
from chipsparse.layers.exact_rows import apart, joined
from chipsparse.layers.mlp import MLPWeights
from chipsparse.measure.cost_model import kept_columns
from chipsparse.measure.timing import Call, time_call
from chipsparse.plan import SparsityPlan

# Largest ||sparse - dense|| / ||dense||, by dtype; a wrong kernel is off by more than a tenth.
ERROR_LIMIT = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
SEED = 0


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

    Args:
        plan: sizes and shares.
        layer: number of the transformer block.
        device: where it runs.
        dtype: of query, key and value.

    Raises:
        WrongResultError: a sparse step right after the refresh does not give what that gave.
    """
    layout, config = plan.layout, plan.config.attention
    shape = (3, layout.batch, layout.tokens, layout.heads, layout.head_dim)
    # As models have them: heads beside each other in a token's channels.
    whole, key, value = (
        each.transpose(1, 2) for each in _random(*shape, device=device, dtype=dtype)
    )
    query, exact = apart(whole, layout, 2)
    kernels = FastestKernel()
    budget = AttentionBudget(
        keep_count=plan.attention_keep_count(layer),
        random_count=plan.attention_random_count(),
        static_columns=static_columns(
            layout.tokens,
            config,
            text_tokens=layout.text_tokens,
            text_first=layout.text_first,
            rows=layout.query_rows,
            device=device,
        ),
        seed=SEED,
        static_count=static_count(layout.tokens, config, text_tokens=layout.text_tokens),
    )

    # Each call gets a cache of its own, which leaves the ones below as they are: what is recorded
    # in a call that is captured for a graph is computed later, or never.
    def dense(cache: AttentionCache | None = None) -> torch.Tensor:
        return attention.dense_step(
            cache or AttentionCache(), query, key, value, scale=None, backend=None, kernels=kernels
        )

    def with_exact_rows(compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        if exact is None:
            return compute

        def both() -> torch.Tensor:
            seen = F.scaled_dot_product_attention(exact, key, value)
            return joined(compute().transpose(1, 2), seen.transpose(1, 2), layout).transpose(1, 2)

        return both

    before = AttentionCache()
    expected = dense(before)

    def refresh(cache: AttentionCache | None = None) -> torch.Tensor:
        return attention.refresh_step(
            cache or copy(before),
            query,
            key,
            value,
            config=config,
            budget=budget,
            scale=None,
            backend=None,
        )

    choices = attention.backend_choices(
        query, key, value, block_size_q=config.block_size_q, backend=None
    )
    refreshed = copy(before)
    refresh(refreshed)

    def sparse() -> torch.Tensor:
        return attention.sparse_step(
            refreshed,
            query,
            key,
            value,
            config=config,
            scale=None,
            backend=None,
            choices=choices,
        )

    def baselines() -> dict[str, float]:
        return _attention_baselines(whole, key, value)

    error = _checked("attention", sparse(), expected, layer)
    stock = baselines()
    times = {
        name: time_call(with_exact_rows(call), device).latency_ms
        for name, call in (("dense", dense), ("refresh", refresh), ("sparse", sparse))
    }
    for name, found in baselines().items():
        stock[name] = min(found, stock[name])
    fastest = min(stock, key=lambda name: stock[name])
    return PartTimes(
        part="attention",
        layer=layer,
        kind=layout.kind(layer).name,
        kept=kept_columns(plan, layer),
        total=layout.tokens,
        baseline_ms=stock[fastest],
        baseline=f"scaled_dot_product_attention{fastest}",
        milliseconds=times,
        error=error,
        backends={op: choice.backend.name for op, choice in choices.items()},
    )


@torch.inference_mode()
def mlp_times(
    plan: SparsityPlan, layer: int, *, device: torch.device, dtype: torch.dtype
) -> PartTimes:
    """As `attention_times`, for the feed-forward layer; every sparse step chooses its neurons.

    The activation function is taken to be GELU, or SiLU where the layer is gated.

    Raises:
        WrongResultError: a sparse step that recomputes every neuron does not give what a dense one
            gives.
    """
    layout, config = plan.layout, plan.config.mlp
    kind = layout.kind(layer)
    tokens, width, channels = layout.mlp_tokens(layer), kind.intermediate_size, layout.width
    gated = kind.mlp_linears > 2

    def weight(rows: int, columns: int) -> torch.Tensor:
        return _random(rows, columns, device=device, dtype=dtype).div_(columns**0.5)

    up, down = weight((2 if gated else 1) * width, channels), weight(channels, width)
    up_bias, down_bias = (weight(1, len(each))[0] for each in (up, down))
    weights = MLPWeights.from_linears(
        up,
        up_bias,
        down,
        down_bias,
        "silu" if gated else "gelu-tanh",
        "second" if gated else "none",
    )
    before = _random(layout.batch, tokens, channels, device=device, dtype=dtype)
    after = before + 0.1 * _random(
        layout.batch, tokens, channels, device=device, dtype=dtype, seed=SEED + 1
    )
    cache = MLPCache()

    def dense(to: MLPCache | None = None) -> torch.Tensor:
        return mlp.dense_step(to or MLPCache(), before, weights, config=config, backend=None)

    def sparse(keep_count: int = plan.mlp_keep_count(layer)) -> torch.Tensor:
        return mlp.sparse_step(
            copy(cache),
            after,
            weights,
            config=config,
            keep_count=keep_count,
            backend=None,
            choices=choices,
        )

    def stock() -> torch.Tensor:
        hidden = F.linear(after, up, up_bias)
        if gated:
            hidden, gate = hidden.chunk(2, dim=-1)
            hidden = hidden * F.silu(gate)
        else:
            hidden = F.gelu(hidden, approximate="tanh")
        return F.linear(hidden, down, down_bias)

    dense(cache)
    choices = mlp.backend_choices(cache, after, weights, config=config, backend=None)
    error = _checked("the MLP", sparse(width), stock(), layer)
    dense(cache)
    first_ms, full_ms, sparse_ms, last_ms = (
        time_call(call, device).latency_ms for call in (stock, dense, sparse, stock)
    )
    return PartTimes(
        part="mlp",
        layer=layer,
        kind=kind.name,
        kept=plan.mlp_keep_count(layer),
        total=width,
        baseline_ms=min(first_ms, last_ms),
        baseline="two linears and SiLU, gated" if gated else "two linears and GELU",
        milliseconds={"dense": full_ms, "refresh": full_ms, "sparse": sparse_ms},
        error=error,
        backends={op: choice.backend.name for op, choice in choices.items()},
    )


def _random(
    *shape: int, device: torch.device, dtype: torch.dtype, seed: int = SEED
) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)


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
    with _only(backend):
        try:
            return time_call(call, device).latency_ms
        except RuntimeError:
            if backend is None:
                raise
            return None


@contextmanager
def _only(backend: SDPBackend | None) -> Iterator[None]:
    if backend is None:
        yield
        return
    with sdpa_kernel(backend):
        yield

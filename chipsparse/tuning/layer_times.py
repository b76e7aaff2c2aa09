"""How long one layer takes here: each action and a few budgets, on its own tensors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from chipsparse import attention, mlp
from chipsparse.attention import AttentionBudget
from chipsparse.cache import AttentionCache, MLPCache
from chipsparse.config import AttentionConfig, MLPConfig
from chipsparse.kernels.dense_attention.measure import FastestKernel, cuda_milliseconds
from chipsparse.mlp import MLPWeights

RUNS = 3

Times = dict[str, Any]


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median time of a call, after one that is not counted."""
    if device.type == "cuda":
        return cuda_milliseconds(run, device) / 1e3
    run()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def attention_times(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    config: AttentionConfig,
    budgets: Sequence[AttentionBudget],
    scale: float | None,
    backend: str | None,
    unpatched: Callable[[], object],
) -> Times:
    """Seconds of each action for ``[B, H, N, D]``.

    Args:
        query: as key and value.
        key: see above.
        value: see above.
        config: what is in force.
        budgets: those whose sparse steps are timed.
        scale: factor of the scores, None for ``D ** -0.5``.
        backend: forces one.
        unpatched: the attention of the model without chipsparse.

    Returns:
        ``plain``, ``dense``, ``refresh``, and ``sparse``, a list of pairs: share of the columns
        that a step computed, its seconds.
    """
    device, kernels = query.device, FastestKernel()

    def dense(cache: AttentionCache) -> None:
        attention.dense_step(
            cache, query, key, value, scale=scale, backend=backend, kernels=kernels
        )

    def refresh(cache: AttentionCache, budget: AttentionBudget) -> None:
        attention.refresh_step(
            cache,
            query,
            key,
            value,
            config=config,
            budget=budget,
            reselect=True,
            scale=scale,
            backend=backend,
            kernels=kernels,
        )

    def sparse(cache: AttentionCache) -> None:
        attention.sparse_step(cache, query, key, value, config=config, scale=scale, backend=backend)

    cache = AttentionCache()
    times: Times = {
        "plain": seconds(unpatched, device),
        "dense": seconds(lambda: dense(cache), device),
        "refresh": seconds(lambda: refresh(cache, budgets[0]), device),
        "sparse": [],
    }
    for budget in budgets:
        refresh(cache, budget)
        times["sparse"].append([float(cache.kept_fraction), seconds(lambda: sparse(cache), device)])
    return times


def mlp_times(
    hidden: torch.Tensor,
    weights: MLPWeights,
    *,
    config: MLPConfig,
    keep_counts: Sequence[int],
    backend: str | None,
) -> Times:
    """Seconds of each action for ``[B, N, C]``; keys and pairs as of `attention_times`."""
    device, cache = hidden.device, MLPCache()

    def dense(into: MLPCache | None) -> None:
        mlp.dense_step(into, hidden, weights, config=config, backend=backend)

    def sparse(keep_count: int) -> None:
        cache.age = None  # so that neurons are chosen anew, as they mostly are
        mlp.sparse_step(
            cache, hidden, weights, config=config, keep_count=keep_count, backend=backend
        )

    recorded = seconds(lambda: dense(cache), device)
    times: Times = {
        "plain": seconds(lambda: dense(None), device),
        "dense": recorded,
        "refresh": recorded,
        "sparse": [],
    }
    for count in keep_counts:
        share = count / weights.up.shape[0]
        times["sparse"].append([share, seconds(partial(sparse, count), device)])
    return times


def line(pairs: Sequence[Sequence[float]]) -> Mapping[str, float]:
    """Least squares: seconds as ``fixed + per_share * share``, neither below zero."""
    shares, times = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    mean_share, mean_time = statistics.fmean(shares), statistics.fmean(times)
    spread = sum((share - mean_share) ** 2 for share in shares)
    moved = sum((s - mean_share) * (t - mean_time) for s, t in zip(shares, times, strict=True))
    slope = max(0.0, moved / spread) if spread > 0 else 0.0
    return {"fixed": max(0.0, mean_time - slope * mean_share), "per_share": slope}

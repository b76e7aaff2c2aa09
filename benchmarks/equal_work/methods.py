"""What is compared. A *curve* is one method in one variant; its points are its settings.

Rivals get wide ranges of settings: which of them lie around the amounts of work that are compared
shows a short run on a prompt that is not compared (see `chosen`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from diffusers.hooks import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)

from benchmarks.equal_work.curves import DENSE, OURS, SKIPS
from chipsparse.config import SparsityConfig
from chipsparse.pipelines.diffusers_caches import Cache, CacheRun, sea_config
from chipsparse.profiles.profile import load_profile
from chipsparse.schedule.schedule import Action, Schedule

# Self-attention of FLUX's and Wan's blocks; TaylorSeer's defaults miss Wan's ``attn1``.
ATTENTION_NAMES = [r"blocks\.\d+\.attn1", r".*transformer_blocks\.\d+\.attn"]
# Shares of the dense steps.
FEWER_STEPS = (0.18, 0.24, 0.26, 0.32, 0.34, 0.4, 0.5)
MAG_LIMITS = ((0.2, 4), (0.2, 12), (0.1, 5), (0.1, 12))  # first share that is kept, most skipped
MAG_THRESHOLDS = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.0)
SEA_THRESHOLDS = (0.1, 0.2, 0.35, 0.6, 1.0, 1.6)
FIRST_BLOCK_THRESHOLDS = (0.02, 0.04, 0.07, 0.1, 0.15, 0.25, 0.4)
INTERVALS = (2, 3, 4, 6, 9)
# Timesteps, from 1000 down to 0, in which attention is reused: diffusers' choice, and almost all.
PYRAMID_TIMESTEPS = ((800, 100), (950, 0))
FASTER_TIMESTEPS = ((681, 0), (950, 0))


@dataclass(frozen=True)
class Entry:
    """One way to generate.

    Attributes:
        method: whose it is.
        variant: what tells its curves apart; empty where there is one.
        setting: a point of the curve.
        config: what chipsparse computes; None for a stock model.
        cache: of diffusers, on a stock model.
        steps: denoising steps, None for those of the dense generation.
        reuses_attention: whether the cache passes over attention and not over blocks.
    """

    method: str
    variant: str = ""
    setting: str = ""
    config: SparsityConfig | None = None
    cache: Cache | None = None
    steps: int | None = None
    reuses_attention: bool = False

    @property
    def curve(self) -> tuple[str, str]:
        """Method and variant."""
        return self.method, self.variant


def entries(steps: int, profiles: Sequence[Path]) -> list[Entry]:
    """All of them; dense is not among them.

    Args:
        steps: of the dense generation.
        profiles: files of ours; what computes nothing sparsely in so many steps counts as a list of
            skips, and each folder is a variant.
    """
    tenth, sixth = round(0.1 * steps), round(steps / 6)
    fewer = sorted({max(2, round(share * steps)) for share in FEWER_STEPS})
    sea = ((1, 1, 3), (1, tenth, 8), (0, 1, 3), (0, tenth, 8))
    taylor = ((3, 1), (sixth, 1), (sixth, 2))
    return [
        *(_ours(path, steps) for path in profiles),
        *(Entry("fewer steps", "", f"{count} steps", steps=count) for count in fewer),
        *(_mag(*limits, each) for limits, each in product(MAG_LIMITS, MAG_THRESHOLDS)),
        *(_sea(*limits, each) for limits, each in product(sea, SEA_THRESHOLDS)),
        *(_first_block(threshold) for threshold in FIRST_BLOCK_THRESHOLDS),
        *(_taylor_lite(*first, every) for first, every in product(taylor, INTERVALS)),
        *(_taylor_attention(every) for every in (2, 3, 5, 8)),
        *(_pyramid(at, every) for at, every in product(PYRAMID_TIMESTEPS, INTERVALS)),
        *(_faster(at, every) for at, every in product(FASTER_TIMESTEPS, INTERVALS)),
    ]


def dense() -> Entry:
    """The stock model."""
    return Entry(DENSE)


def _ours(path: Path, steps: int) -> Entry:
    config = load_profile(path).sparsity
    method = OURS if _is_sparse(config, steps) else SKIPS
    return Entry(method, path.parent.name, path.stem, config)


def _is_sparse(config: SparsityConfig, steps: int) -> bool:
    """Whether any of so many steps may compute a part sparsely."""
    schedule = Schedule(config.schedule, steps)
    planned = map(schedule.action, range(steps))
    return (config.attention.enabled or config.mlp.enabled) and Action.SPARSE in planned


def _mag(first: float, most: int, threshold: float) -> Entry:
    return _cached(
        "MagCache",
        f"first {first:.0%}, at most {most} skipped",
        f"threshold {threshold:g}",
        lambda run: MagCacheConfig(
            threshold=threshold,
            max_skip_steps=most,
            retention_ratio=first,
            num_inference_steps=run.steps,
            mag_ratios=list(run.ratios),
        ),
    )


def _sea(order: int, first: int, most: int, threshold: float) -> Entry:
    return _cached(
        "SeaCache",
        f"order {order}, first {first}, at most {most} skipped",
        f"threshold {threshold:g}",
        lambda _: sea_config(
            threshold=threshold,
            residual_order=order,
            retention_steps=first,
            max_consecutive_cached=most,
        ),
    )


def _first_block(threshold: float) -> Entry:
    setting = f"threshold {threshold:g}"
    return _cached(
        "FirstBlockCache", "", setting, lambda _: FirstBlockCacheConfig(threshold=threshold)
    )


def _taylor_lite(first: int, order: int, interval: int) -> Entry:
    variant = f"whole steps, first {first}, order {order}"
    return _taylor(variant, interval, first, order, use_lite_mode=True)


def _taylor_attention(interval: int) -> Entry:
    variant = "attention, first 3, order 1"
    return _taylor(variant, interval, 3, 1, cache_identifiers=ATTENTION_NAMES)


def _taylor(variant: str, interval: int, first: int, order: int, **settings: Any) -> Entry:
    return _cached(
        "TaylorSeer",
        variant,
        f"every {interval}",
        lambda _: TaylorSeerCacheConfig(
            cache_interval=interval,
            disable_cache_before_step=first,
            max_order=order,
            taylor_factors_dtype=torch.float32,
            **settings,
        ),
        reuses_attention="cache_identifiers" in settings,
    )


def _pyramid(timesteps: tuple[int, int], interval: int) -> Entry:
    return _attention_cache("PAB", PyramidAttentionBroadcastConfig, timesteps, interval)


def _faster(timesteps: tuple[int, int], interval: int) -> Entry:
    """Guidance is set as distilled: else it would split a batch that there is not."""
    make = partial(FasterCacheConfig, is_guidance_distilled=True)
    return _attention_cache("FasterCache", make, timesteps, interval)


def _attention_cache(
    method: str, config: Callable[..., Any], timesteps: tuple[int, int], interval: int
) -> Entry:
    """With a state for each guidance branch."""
    high, low = timesteps
    return _cached(
        method,
        f"timesteps {high} to {low}",
        f"every {interval}",
        lambda run: config(
            spatial_attention_block_skip_range=interval,
            spatial_attention_timestep_skip_range=(low or -1, high),
            current_timestep_callback=run.timestep,
        ),
        reuses_attention=True,
    )


def _cached(
    method: str,
    variant: str,
    setting: str,
    make: Callable[[CacheRun], Any],
    *,
    reuses_attention: bool = False,
) -> Entry:
    cache = Cache(method, setting, make, per_branch=reuses_attention)
    return Entry(method, variant, setting, cache=cache, reuses_attention=reuses_attention)

"""What is compared. A *curve* is one method in one variant; its points are its settings.

Rivals get wide ranges of settings: which of them lie around the amounts of work that are compared
shows a short run on a prompt that is not compared (see `chosen`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
# Timesteps, from 1000 down to 0, in which attention is reused: diffusers' choice, and almost all.
PYRAMID_TIMESTEPS = {"timesteps 800 to 100": (100, 800), "timesteps 950 to 0": (-1, 950)}
FASTER_TIMESTEPS = {"timesteps 681 to 0": (-1, 681), "timesteps 950 to 0": (-1, 950)}


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
    return [
        *(_ours(path, steps) for path in profiles),
        *_fewer_steps(steps),
        *_mag(),
        *_sea(steps),
        *_first_block(),
        *_taylor_seer(steps),
        *_attention_caches(),
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
    planned = (schedule.action(step) for step in range(steps) if not schedule.skips(step))
    return (config.attention.enabled or config.mlp.enabled) and Action.SPARSE in planned


def _fewer_steps(steps: int) -> Iterator[Entry]:
    for count in sorted({max(2, round(share * steps)) for share in FEWER_STEPS}):
        yield Entry("fewer steps", "", f"{count} steps", steps=count)


def _mag() -> Iterator[Entry]:
    for first, most in ((0.2, 4), (0.2, 12), (0.1, 5), (0.1, 12)):
        for threshold in (0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.0):
            yield _cached(
                "MagCache",
                f"first {first:.0%}, at most {most} skipped",
                f"threshold {threshold:g}",
                lambda run, first=first, most=most, threshold=threshold: MagCacheConfig(
                    threshold=threshold,
                    max_skip_steps=most,
                    retention_ratio=first,
                    num_inference_steps=run.steps,
                    mag_ratios=list(run.ratios),
                ),
            )


def _sea(steps: int) -> Iterator[Entry]:
    tenth = round(0.1 * steps)
    for order, first, most in ((1, 1, 3), (1, tenth, 8), (0, 1, 3), (0, tenth, 8)):
        for threshold in (0.1, 0.2, 0.35, 0.6, 1.0, 1.6):
            yield _cached(
                "SeaCache",
                f"order {order}, first {first}, at most {most} skipped",
                f"threshold {threshold:g}",
                lambda _, order=order, first=first, most=most, threshold=threshold: sea_config(
                    threshold=threshold,
                    residual_order=order,
                    retention_steps=first,
                    max_consecutive_cached=most,
                ),
            )


def _first_block() -> Iterator[Entry]:
    for threshold in (0.02, 0.04, 0.07, 0.1, 0.15, 0.25, 0.4):
        yield _cached(
            "FirstBlockCache",
            "",
            f"threshold {threshold:g}",
            lambda _, threshold=threshold: FirstBlockCacheConfig(threshold=threshold),
        )


def _taylor_seer(steps: int) -> Iterator[Entry]:
    sixth = round(steps / 6)

    def config(interval: int, first: int, order: int, **settings: Any) -> TaylorSeerCacheConfig:
        return TaylorSeerCacheConfig(
            cache_interval=interval,
            disable_cache_before_step=first,
            max_order=order,
            taylor_factors_dtype=torch.float32,
            **settings,
        )

    for first, order in ((3, 1), (sixth, 1), (sixth, 2)):
        for interval in (2, 3, 4, 6, 9):
            yield _cached(
                "TaylorSeer",
                f"whole steps, first {first}, order {order}",
                f"every {interval}",
                lambda _, interval=interval, first=first, order=order: config(
                    interval, first, order, use_lite_mode=True
                ),
            )
    for interval in (2, 3, 5, 8):
        yield _cached(
            "TaylorSeer",
            "attention, first 3, order 1",
            f"every {interval}",
            lambda _, interval=interval: config(interval, 3, 1, cache_identifiers=ATTENTION_NAMES),
            reuses_attention=True,
        )


def _attention_caches() -> Iterator[Entry]:
    """With a state for each guidance branch; FasterCache would split a batch that there is not."""
    for name, timesteps in PYRAMID_TIMESTEPS.items():
        for interval in (2, 3, 4, 6, 9):
            yield _cached(
                "PAB",
                name,
                f"every {interval}",
                lambda run, interval=interval, at=timesteps: PyramidAttentionBroadcastConfig(
                    spatial_attention_block_skip_range=interval,
                    spatial_attention_timestep_skip_range=at,
                    current_timestep_callback=run.timestep,
                ),
                reuses_attention=True,
            )
    for name, timesteps in FASTER_TIMESTEPS.items():
        for interval in (2, 3, 4, 6, 9):
            yield _cached(
                "FasterCache",
                name,
                f"every {interval}",
                lambda run, interval=interval, at=timesteps: FasterCacheConfig(
                    is_guidance_distilled=True,
                    spatial_attention_block_skip_range=interval,
                    spatial_attention_timestep_skip_range=at,
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

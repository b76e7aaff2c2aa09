"""The caches of diffusers that are compared, and their settings.

Each cache has a few settings, from its defaults on to faster ones. A cache that cannot run on a
model stays in the list: why it cannot is a result.
"""

from __future__ import annotations

import torch
from diffusers.hooks import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)

from chipsparse.pipelines.diffusers_caches import Cache, mag, sea

# Self-attention of FLUX's and Wan's blocks; TaylorSeer's defaults miss Wan's ``attn1``.
ATTENTION_NAMES = [r"blocks\.\d+\.attn1", r".*transformer_blocks\.\d+\.attn"]
# Those that chipsparse refuses where it skips steps: they count the transformer's calls.
COUNTING_METHODS = ("MagCache", "TaylorSeer", "TaylorSeer, lite")
ALMOST_ALL = (-1, 950)  # of the timesteps from 1000 down to 0


def first_block(threshold: float) -> Cache:
    return Cache(
        "FirstBlockCache",
        f"threshold {threshold:g}",
        lambda _: FirstBlockCacheConfig(threshold=threshold),
    )


def taylor_seer(interval: int, *, default_names: bool = False) -> Cache:
    return Cache(
        "TaylorSeer",
        f"{'default modules' if default_names else 'attention'}, every {interval}",
        lambda _: TaylorSeerCacheConfig(
            cache_interval=interval,
            disable_cache_before_step=3,
            cache_identifiers=None if default_names else ATTENTION_NAMES,
            taylor_factors_dtype=torch.float32,
        ),
    )


def taylor_seer_lite(interval: int) -> Cache:
    """Predicts the output of the last linear and passes over all blocks."""
    return Cache(
        "TaylorSeer, lite",
        f"every {interval}",
        lambda _: TaylorSeerCacheConfig(
            cache_interval=interval,
            disable_cache_before_step=3,
            use_lite_mode=True,
            taylor_factors_dtype=torch.float32,
        ),
    )


def pyramid(
    interval: int, timesteps: tuple[int, int] = (100, 800), *, per_branch: bool = True
) -> Cache:
    return Cache(
        "PAB" if per_branch else "PAB, one state as shipped",
        f"every {interval}, timesteps {_text(timesteps)}",
        lambda run: PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=interval,
            spatial_attention_timestep_skip_range=timesteps,
            current_timestep_callback=run.timestep,
        ),
        per_branch,
    )


def faster(
    interval: int,
    timesteps: tuple[int, int] = (-1, 681),
    *,
    distilled: bool = True,
    per_branch: bool = True,
) -> Cache:
    """FasterCache; only where it takes guidance for distilled it leaves the batch whole."""
    if not distilled:
        method = "FasterCache, splitting the batch"
    else:
        method = "FasterCache" if per_branch else "FasterCache, one state as shipped"
    return Cache(
        method,
        f"every {interval}, timesteps {_text(timesteps)}",
        lambda run: FasterCacheConfig(
            is_guidance_distilled=distilled,
            spatial_attention_block_skip_range=interval,
            spatial_attention_timestep_skip_range=timesteps,
            current_timestep_callback=run.timestep,
        ),
        per_branch,
    )


def _text(timesteps: tuple[int, int]) -> str:
    return f"{timesteps[1]} to {max(0, timesteps[0])}"


def caches(*, video: bool) -> list[Cache]:
    """Every cache at every setting.

    On images SeaCache has one setting, enough to see that it finds nothing to go by there, and on
    videos TaylorSeer has one with its own choice of modules, in which it finds none of Wan's.
    """
    return [
        *(first_block(threshold) for threshold in (0.05, 0.1, 0.2, 0.4)),
        *(taylor_seer_lite(interval) for interval in (2, 3, 5)),
        *(taylor_seer(interval) for interval in (2, 5)),
        *(mag(*setting) for setting in ((0.06, 3), (0.2, 4), (0.6, 6))),
        pyramid(2, per_branch=False),
        *(pyramid(*setting) for setting in ((2,), (2, ALMOST_ALL), (4, ALMOST_ALL))),
        faster(2, distilled=False, per_branch=False),
        faster(2, per_branch=False),
        *(faster(*setting) for setting in ((2,), (4, ALMOST_ALL))),
        sea(0.25, 2),
        *([sea(0.5, 3), sea(1.0, 6), taylor_seer(5, default_names=True)] if video else []),
    ]


def stackable(*, video: bool) -> list[Cache]:
    """Middle settings, to be put on top of sparse steps."""
    return [
        first_block(0.2),
        taylor_seer_lite(2),
        taylor_seer(2),
        mag(0.06, 3),
        pyramid(2, ALMOST_ALL),
        faster(2),
        *([sea(0.5, 3)] if video else []),
    ]

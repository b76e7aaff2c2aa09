"""diffusers' own caches: on a pipeline and off again, what they say meanwhile, and their settings.

Each cache has a few settings, from its defaults on to faster ones. A cache that cannot run on a
model stays in the list: why it cannot is a result.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from diffusers.hooks import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from diffusers.hooks.faster_cache import FasterCacheBlockHook
from diffusers.hooks.hooks import StateManager
from diffusers.hooks.pyramid_attention_broadcast import PyramidAttentionBroadcastHook

from chipsparse.pipelines.stacked_caches import hooks_of

# Self-attention of FLUX's and Wan's blocks; TaylorSeer's defaults miss Wan's ``attn1``.
ATTENTION_NAMES = [r"blocks\.\d+\.attn1", r".*transformer_blocks\.\d+\.attn"]
# Those that chipsparse refuses where it skips steps: they count the transformer's calls.
COUNTING_METHODS = ("MagCache", "TaylorSeer", "TaylorSeer, lite")
ALMOST_ALL = (-1, 950)  # of the timesteps from 1000 down to 0


@dataclass(frozen=True)
class CacheRun:
    """What a cache's config is made for.

    Attributes:
        pipe: the pipeline.
        steps: denoising steps.
        ratios: MagCache's, measured on this model (see `calibrated_ratios`).
    """

    pipe: Any
    steps: int
    ratios: tuple[float, ...] = ()

    def timestep(self) -> float:
        """The timestep in progress."""
        return float(self.pipe.current_timestep)


@dataclass(frozen=True)
class Cache:
    """One cache at one setting.

    Attributes:
        method: its name, as of a curve.
        setting: what tells it from the others of its name.
        make: makes diffusers' config.
        per_branch: gives its hooks one state for each guidance branch. As diffusers has them,
            those of pyramid attention broadcast and FasterCache have one for both, although its
            pipelines call the branches in turn.
    """

    method: str
    setting: str
    make: Callable[[CacheRun], Any]
    per_branch: bool = False


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


def mag(threshold: float, max_skips: int) -> Cache:
    return Cache(
        "MagCache",
        f"threshold {threshold:g}, at most {max_skips}",
        lambda run: MagCacheConfig(
            threshold=threshold,
            max_skip_steps=max_skips,
            num_inference_steps=run.steps,
            mag_ratios=list(run.ratios),
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


def sea(threshold: float, most: int) -> Cache:
    return Cache(
        "SeaCache",
        f"threshold {threshold:g}, at most {most}",
        partial(_sea_config, threshold=threshold, max_consecutive_cached=most),
    )


def _sea_config(_: CacheRun, **settings: Any) -> Any:
    from diffusers.hooks import SeaCacheConfig  # not in the oldest diffusers that we support

    return SeaCacheConfig(**settings)


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


@contextmanager
def cached(run: CacheRun | None, cache: Cache | None) -> Iterator[list[str]]:
    """Puts a cache on the pipeline's transformer for the time being.

    Yields what diffusers warns of meanwhile, each sentence once.
    """
    if run is None or cache is None:
        yield []
        return
    transformer = run.pipe.transformer
    with _warnings() as heard:
        transformer.enable_cache(cache.make(run))
        try:
            if cache.per_branch:
                _keep_states_apart(transformer)
            yield heard
        finally:
            transformer.disable_cache()


def calibrated_ratios(pipe: Any, steps: int, generate: Callable[[], object]) -> tuple[float, ...]:
    """MagCache's ratios of this model, from one generation with guidance's first branch.

    MagCache prints them, to be copied into its config; those of the other branch are not used.
    """
    calibration = Cache(
        "MagCache",
        "calibration",
        lambda _: MagCacheConfig(calibrate=True, num_inference_steps=steps),
    )
    printed = io.StringIO()
    with cached(CacheRun(pipe, steps), calibration), redirect_stdout(printed):
        generate()
    lists = [line for line in printed.getvalue().splitlines() if line.startswith("[1.0")]
    if not lists:
        raise ValueError(f"MagCache printed no ratios after {steps} steps: {printed.getvalue()!r}")
    return tuple(json.loads(lists[0]))


class _OfTheBranch:
    """Mixed into a hook with one ``state``: each guidance branch gets its own."""

    branches: StateManager

    @property
    def state(self) -> Any:
        return self.branches.get_state()

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        self.branches.reset()
        return module


class _PyramidOfTheBranch(_OfTheBranch, PyramidAttentionBroadcastHook):
    pass


class _FasterOfTheBranch(_OfTheBranch, FasterCacheBlockHook):
    pass


APART: dict[type, type] = {
    PyramidAttentionBroadcastHook: _PyramidOfTheBranch,
    FasterCacheBlockHook: _FasterOfTheBranch,
}


def _keep_states_apart(transformer: torch.nn.Module) -> None:
    """Hooks learn the branch from ``cache_context``, as those of the other caches do."""
    for hook in hooks_of(transformer):
        if (apart := APART.get(type(hook))) is not None:
            hook.branches = StateManager(type(hook.state))
            hook.__class__ = apart


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What diffusers logs as a warning, each sentence once."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (sentence := record.getMessage()) not in heard:
                heard.append(sentence)

    logger, ear = logging.getLogger("diffusers"), Ear(logging.WARNING)
    level = logger.level
    logger.addHandler(ear)
    logger.setLevel(min(level, logging.WARNING) or logging.WARNING)
    try:
        yield heard
    finally:
        logger.setLevel(level)
        logger.removeHandler(ear)

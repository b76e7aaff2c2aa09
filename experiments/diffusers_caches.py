"""diffusers' own caches: on a pipeline and off again, and what diffusers says meanwhile."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from diffusers.hooks import MagCacheConfig
from diffusers.hooks.faster_cache import FasterCacheBlockHook
from diffusers.hooks.hooks import StateManager
from diffusers.hooks.pyramid_attention_broadcast import PyramidAttentionBroadcastHook

from chipsparse.pipelines.diffusers_hooks import hooked_modules, hooks_of, hooks_on, transformers_of

if TYPE_CHECKING:
    from diffusers.hooks import SeaCacheConfig
    from diffusers.hooks.hooks import BaseState
    from diffusers.models.cache_utils import CacheMixin

    from chipsparse.pipelines.call import Pipeline


@dataclass(frozen=True)
class CacheRun:
    """The run that a cache's config is made for."""

    pipe: Any
    steps: int  # denoising steps
    ratios: tuple[float, ...] = ()  # MagCache's of this model, see `calibrated_ratios`

    def timestep(self) -> float:
        """Return the pipeline's timestep now, by which some caches begin and end."""
        return float(self.pipe.current_timestep)


@dataclass(frozen=True)
class Cache:
    """One cache at one setting."""

    method: str  # as of a curve
    setting: str
    make: Callable[[CacheRun], Any]  # makes diffusers' config
    # Its hooks get one state for each guidance branch. diffusers' own of pyramid attention
    # broadcast and FasterCache have one for both, although its pipelines call the branches in turn.
    per_branch: bool = False


def mag(threshold: float, max_skips: int) -> Cache:
    """MagCache; needs the ratios of the model."""
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


def sea(threshold: float, most: int) -> Cache:
    """SeaCache."""

    def make(_: CacheRun) -> SeaCacheConfig:
        from diffusers.hooks import SeaCacheConfig  # not in the oldest diffusers that we support

        return SeaCacheConfig(threshold=threshold, max_consecutive_cached=most)

    return Cache("SeaCache", f"threshold {threshold:g}, at most {most}", make)


@contextmanager
def cached(run: CacheRun, cache: Cache) -> Iterator[list[str]]:
    """Puts a cache on the pipeline's transformers for the time being.

    Yields what diffusers warns of meanwhile, each sentence once.
    """
    with _warnings() as warnings, ExitStack() as stack:
        for transformer in transformers_of(run.pipe):
            _enable(transformer, cache.make(run))
            stack.callback(transformer.disable_cache)
            if cache.per_branch:
                _keep_states_apart(transformer)
        yield warnings


def calibrated_ratios(
    pipe: Pipeline,
    steps: int,
    generate: Callable[[], object],
) -> tuple[float, ...]:
    """MagCache's ratios of this model, from one generation with guidance's first branch.

    MagCache prints them, to be copied into its config; those of the other branch are not used.
    Raises `ValueError` where it printed none, as where two transformers share the steps.
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


def _enable(transformer: CacheMixin, config: object) -> None:
    """``enable_cache`` that leaves no hook where it fails, as on blocks it does not know."""
    before = {(id(registry), name) for registry, name in _hook_names(transformer)}
    try:
        transformer.enable_cache(config)
    except Exception:
        for registry, name in [*_hook_names(transformer)]:
            if (id(registry), name) not in before:
                registry.remove_hook(name, recurse=False)
        raise


def _hook_names(transformer: torch.nn.Module) -> Iterator[tuple[Any, str]]:
    for module in hooked_modules(transformer):
        yield from ((module._diffusers_hook, name) for name in hooks_on(module))


class _OfTheBranch:
    """Mixed into a hook with one ``state``: each guidance branch gets its own."""

    branches: StateManager

    @property
    def state(self) -> BaseState:
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
    """The warnings of diffusers' hooks, each sentence once, instead of on the screen."""
    warnings: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (sentence := record.getMessage()) not in warnings:
                warnings.append(sentence)

    # Not all of diffusers: what its pipelines warn of may quote the prompt.
    logger = logging.getLogger("diffusers.hooks")
    ear = Ear(logging.WARNING)
    before = logger.level, logger.propagate
    logger.addHandler(ear)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield warnings
    finally:
        logger.setLevel(before[0])
        logger.propagate = before[1]
        logger.removeHandler(ear)

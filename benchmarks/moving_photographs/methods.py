"""The methods that are compared, each a way to generate: ours, fewer steps, diffusers' caches.

A method in one variant is a curve; its points are its settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.curves import DENSE, OURS, SKIPS
from benchmarks.moving_photographs.work import DenseWork, blocks_of
from benchmarks.records import Record, environment
from benchmarks.step_timing import attention_backend
from chipsparse.config import PARTS, Action, SparsityConfig
from chipsparse.profiles.profile import load_profile
from chipsparse.skip.timetable import Run, Schedule

# Settings about the published speed-ups of the other methods, and faster ones.
FEWER_STEPS = (0.14, 0.18, 0.24, 0.26, 0.32, 0.34, 0.4, 0.5)  # shares of the dense steps
# By the first share of the steps, which is kept, and the most steps skipped in a row.
MAG_THRESHOLDS: dict[tuple[float, int], Sequence[float]] = {
    (0.2, 4): (0.06, 0.12, 0.25),
    (0.1, 12): (0.25, 0.5, 1.0),
}
# By the order.
SEA_THRESHOLDS: dict[int, Sequence[float]] = {
    0: (0.2, 0.35),
    1: (0.2, 0.35, 0.6, 1.0),
}
SEA_MOST = 8  # steps skipped in a row
TAYLOR_FIRST = 3  # steps that are kept
TAYLOR_INTERVALS = (2, 3, 4, 6, 9)
SIZE = ("height", "width", "num_frames")
# The class of each cache's config in diffusers.
CACHES = {
    "MagCache": "MagCacheConfig",
    "SeaCache": "SeaCacheConfig",
    "TaylorSeer": "TaylorSeerCacheConfig",
}


@dataclass(frozen=True)
class Entry:
    """One way to generate.

    Attributes:
        method: whose it is.
        variant: what tells its curves apart; empty where there is one.
        setting: a point of the curve.
        config: of chipsparse; None for a stock model.
        cache: fields of the config of diffusers' cache on a stock model.
        steps: denoising steps, None for those of the dense generation.
        within: of a config: changes the patched pipeline for the time being.
    """

    method: str
    variant: str = ""
    setting: str = ""
    config: SparsityConfig | None = None
    cache: Mapping[str, Any] | None = None
    steps: int | None = None
    within: Callable[[Any], AbstractContextManager[object]] | None = None

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.method, self.variant, self.setting)))

    def cache_config(self, run: Any) -> Any:
        """The config of diffusers' cache for a `CacheRun`."""
        from diffusers import hooks

        fields = dict(self.cache or {})
        if self.method == "MagCache":
            fields |= {"num_inference_steps": run.steps, "mag_ratios": list(run.ratios)}
        return getattr(hooks, CACHES[self.method])(**fields)


def of_profile(path: Path, steps: int) -> Entry:
    """The way of a profile of ours; its folder is the variant.

    A config that computes nothing sparsely in so many steps counts as a list of skips.
    """
    config = load_profile(path).sparsity
    actions = Schedule(config.schedule, Run(steps)).actions()
    sparse = (config.attention.is_sparse or config.mlp.is_sparse) and Action.SPARSE in actions
    return Entry(OURS if sparse else SKIPS, path.parent.name, path.stem, config)


def rivals(steps: int) -> Iterator[Entry]:
    """Fewer steps, and diffusers' caches at all settings; `steps` are the dense generation's."""
    for count in sorted({max(2, round(share * steps)) for share in FEWER_STEPS}):
        yield Entry("fewer steps", "", f"{count} steps", steps=count)
    for (first, most), thresholds in MAG_THRESHOLDS.items():
        variant = f"first {first:.0%}, at most {most} skipped"
        for threshold in thresholds:
            fields = {"retention_ratio": first, "max_skip_steps": most, "threshold": threshold}
            yield Entry("MagCache", variant, f"threshold {threshold:g}", cache=fields)
    tenth = round(0.1 * steps)
    for order, thresholds in SEA_THRESHOLDS.items():
        variant = f"order {order}, first {tenth}, at most {SEA_MOST} skipped"
        for threshold in thresholds:
            fields = {
                "residual_order": order,
                "retention_steps": tenth,
                "threshold": threshold,
                "max_consecutive_cached": SEA_MOST,
            }
            yield Entry("SeaCache", variant, f"threshold {threshold:g}", cache=fields)
    for every in TAYLOR_INTERVALS:
        variant = f"whole steps, first {TAYLOR_FIRST}, order 1"
        taylor: dict[str, Any] = {
            "disable_cache_before_step": TAYLOR_FIRST,
            "max_order": 1,
            "use_lite_mode": True,
            "cache_interval": every,
            "taylor_factors_dtype": torch.float32,
        }
        yield Entry("TaylorSeer", variant, f"every {every}", cache=taylor)


@contextmanager
def with_cache(run: Any, entry: Entry, made: Counter[Any]) -> Iterator[list[str]]:
    """Puts an entry's cache on the transformer for the time being.

    Args:
        run: a `CacheRun`.
        entry: has a cache.
        made: gets how often each part of the transformer was computed.

    Yields:
        what diffusers warns of.
    """
    from chipsparse.experiments.diffusers_caches import Cache, cached

    def counted(module: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            made[module] += 1
            return forward(*args, **kwargs)

        return counting

    hooked = [*blocks_of(run.pipe.transformer), run.pipe.transformer.proj_out]
    try:
        for module in hooked:  # a hook takes the place of the forward, which is counted beneath it
            module.forward = counted(module, module.forward)
        with cached(run, Cache(entry.method, entry.setting, entry.cache_config)) as warnings:
            yield warnings
    finally:
        for module in hooked:
            vars(module).pop("forward", None)


def run_fields(op: str, model: str, settings: Mapping[str, Any], shift: float | None) -> Record:
    """The fields that all records of a run have."""
    size = [settings[name] for name in SIZE if name in settings]
    steps = settings["num_inference_steps"]
    return {"op": op, "model": model, "size": size, "steps": steps, "flow_shift": shift}


class Lab:
    """A pipeline that generates in all ways, through `chipsparse.experiments`.

    Args:
        pipe: on its device.
        settings: of its call, the number of steps among them.
        shared: fields of all records.
        samples: all prompts.
        calibrating: the one of MagCache's calibration.
        experiment: further fields of `Experiment`.
    """

    def __init__(
        self,
        pipe: Any,
        settings: Mapping[str, Any],
        shared: Record,
        samples: Sequence[Any],
        *,
        calibrating: Any,
        **experiment: Any,
    ) -> None:
        from chipsparse.experiments.clips import ClipMaker
        from chipsparse.experiments.engine import Experiment, plainly
        from chipsparse.experiments.store import Store

        self.pipe = pipe
        self._settings = dict(settings)
        self._run = shared
        self._device: torch.device = pipe._execution_device
        self.steps: int = settings["num_inference_steps"]
        self._samples = samples
        self._calibrating = calibrating
        self._store = Store()
        self._maker = ClipMaker(lambda: self.pipe, self._arguments, self.steps)
        self._experiment = Experiment(
            self._maker,
            samples,
            self._store,
            describe=plainly,
            **experiment,
        )

    def _arguments(self, prompt: str) -> dict[str, Any]:
        return {**self._settings, "prompt": prompt}

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Counts the dense work; on a GPU takes the fastest attention."""
        pipe = self.pipe
        transformer = self.pipe.transformer
        with ExitStack() as stack:
            if self._device.type == "cuda":
                stack.enter_context(attention_backend(transformer, "_native_cudnn"))
            arguments = self._arguments(self._samples[0].prompt) | {"num_inference_steps": 2}
            arguments["output_type"] = "latent"
            calls: list[int] = []
            with transformer.register_forward_pre_hook(lambda *_: calls.append(1)):
                self._work = DenseWork.measured(transformer, lambda: pipe(**arguments))
            self._dense = self.steps * len(calls) / 2 * self._work.call
            yield

    def records(self, known: Sequence[Entry], samples: Sequence[Any]) -> Iterator[Record]:
        """Yields the record of each clip as it is made, the dense one of each sample first."""
        ways = {self._way(entry): entry for entry in known}
        for clip in self._experiment.run(list(ways), samples):
            entry = ways.get(clip.way, Entry(DENSE))
            dense = self._experiment.record(self._experiment.dense_way, clip.sample)
            record: Record = {
                **self._run,
                "method": entry.method,
                "variant": entry.variant,
                "setting": entry.setting,
                "prompt": clip.sample.prompt,
                "seed": clip.sample.seed,
                "refused": clip.record.refused,
                **environment(self._device),
            }
            if clip.record.refused is None and dense is not None:
                if entry.config is None:
                    record["work"] = 1.0
                record |= {"psnr": clip.record.psnr_db, "ssim": clip.record.ssim}
                record |= {"seconds": clip.record.seconds, "dense_seconds": dense.seconds}
                record |= {**clip.record.facts, "remarks": clip.record.notes}
            text = clip.record.refused or f"{record['psnr']} dB"
            print(f"{clip.sample.seed} {entry}: {text}", flush=True)
            yield record

    def _way(self, entry: Entry) -> Any:
        """The way of an entry.

        Its facts are the calls of each action where it has a config, else the share of the work.
        """
        from chipsparse.experiments.clips import patched
        from chipsparse.experiments.diffusers_caches import CacheRun
        from chipsparse.experiments.engine import Applied, Way, run_digest
        from chipsparse.experiments.rivals import MagRatios

        steps = entry.steps or self.steps
        transformer = self.pipe.transformer

        @contextmanager
        def apply(pipe: Any) -> Iterator[Applied]:
            made: Counter[Any] = Counter()
            usual = self._settings
            begin = pipe.scheduler.set_timesteps
            ratios: tuple[float, ...] = ()
            if entry.method == "MagCache":
                ratios = MagRatios(self._maker, self._store, self._calibrating)()

            def begun(*args: Any, **kwargs: Any) -> Any:  # a warm-up counts for nothing
                made.clear()
                return begin(*args, **kwargs)

            def facts(_generation: Any) -> Mapping[str, Any]:
                calls = made.pop("calls")
                report = applied.report
                if report is not None:
                    actions = Counter(step.action.value for step in report.steps)
                    return {"calls": dict(actions), "sparse_layers": _sparse_layers(report)}
                parts = self._work.of_calls(made, calls) if entry.cache else calls * self._work.call
                return {"work": parts / self._dense}

            with ExitStack() as stack:
                stack.callback(setattr, self, "_settings", usual)
                self._settings = usual | {"num_inference_steps": steps}
                stack.callback(vars(pipe.scheduler).pop, "set_timesteps", None)
                pipe.scheduler.set_timesteps = begun
                count = transformer.register_forward_pre_hook(lambda *_: made.update(["calls"]))
                stack.callback(count.remove)
                if entry.config is not None:
                    applied = Applied(stack.enter_context(patched(pipe, entry.config)), facts=facts)
                    if entry.within is not None:
                        stack.enter_context(entry.within(pipe))
                elif entry.cache is not None:
                    on = with_cache(CacheRun(pipe, steps, ratios), entry, made)
                    warnings = stack.enter_context(on)
                    applied = Applied(notes=lambda: warnings, facts=facts)
                else:
                    applied = Applied(facts=facts)
                yield applied

        config = "" if entry.config is None else run_digest(entry.config)
        key = f"{entry} {config}".strip()
        return Way(str(entry), apply, key=key, method=entry.method, warm=False)


def _sparse_layers(report: Any) -> dict[str, int]:
    """The number of layers whose attention and MLP ran sparse in the last sparse call."""
    sparse = [step for step in report.steps if step.action is Action.SPARSE]
    return {part: len(sparse[-1].fractions(part)) for part in PARTS} if sparse else {}

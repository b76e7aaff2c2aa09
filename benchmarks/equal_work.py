"""``python -m benchmarks equal-work``: quality at equal work, against diffusers' caches.

A method in one variant is a curve; its points are its settings. ``--json`` is written clip by clip,
and ``--store`` keeps all that was made, so that a run that broke off goes on.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.curves import DENSE, OP, OURS, SKIPS, by_workload, quality_rows
from benchmarks.records import Record, Run, environment, table
from benchmarks.step_timing import COMPILE_OPTIONS, attention_backend
from benchmarks.work import DenseWork, attention_of, blocks_of
from chipsparse.config import PARTS, SparsityConfig
from chipsparse.profiles.profile import ASSETS, bundled_model, find_profile, load_profile
from chipsparse.skip import timetable
from chipsparse.sparse.plan import Action

FEWER_STEPS = (0.14, 0.18, 0.24, 0.26, 0.32, 0.34, 0.4, 0.5)  # shares of the dense steps
MAG_LIMITS = ((0.2, 4), (0.2, 12), (0.1, 5), (0.1, 12))  # first share that is kept, most skipped
MAG_THRESHOLDS = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0)
SEA_THRESHOLDS = (0.1, 0.2, 0.35, 0.6, 1.0)
FIRST_BLOCK_THRESHOLDS = (0.02, 0.04, 0.07, 0.1, 0.15, 0.25, 0.4)
INTERVALS = (2, 3, 4, 6, 9)
# Timesteps, from 1000 down to 0, in which attention is reused: diffusers' choice, and almost all.
PYRAMID_TIMESTEPS = ((800, 100), (950, -1))
FASTER_TIMESTEPS = ((681, -1), (950, -1))
# Blocks that a config or a cache changes are compiled apart.
COMPILATIONS: dict[str, Any] = {"recompile_limit": 256, "accumulated_recompile_limit": 1 << 20}
SIZE = ("height", "width", "num_frames")
TINY = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 8}
# The class of each cache's config in diffusers.
CACHES = {
    "MagCache": "MagCacheConfig",
    "SeaCache": "SeaCacheConfig",
    "FirstBlockCache": "FirstBlockCacheConfig",
    "TaylorSeer": "TaylorSeerCacheConfig",
    "PAB": "PyramidAttentionBroadcastConfig",
    "FasterCache": "FasterCacheConfig",
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

    @property
    def reuses_attention(self) -> bool:
        """True where a cache passes over attention and not over blocks."""
        return self.method in ("PAB", "FasterCache")

    def cache_config(self, run: Any) -> Any:
        """The config of diffusers' cache for a `CacheRun`."""
        from diffusers import hooks

        fields = dict(self.cache or {})
        if self.method == "MagCache":
            fields |= {"num_inference_steps": run.steps, "mag_ratios": list(run.ratios)}
        if self.reuses_attention:
            fields["current_timestep_callback"] = run.timestep
        return getattr(hooks, CACHES[self.method])(**fields)


def entries(steps: int, profiles: Sequence[Path]) -> list[Entry]:
    """All ways but dense.

    Args:
        steps: of the dense generation.
        profiles: files of ours; what computes nothing sparsely in so many steps counts as a list of
            skips, and each folder is a variant.
    """
    fewer = sorted({max(2, round(share * steps)) for share in FEWER_STEPS})
    return [
        *(_ours(path, steps) for path in profiles),
        *(Entry("fewer steps", "", f"{count} steps", steps=count) for count in fewer),
        *rivals(steps),
    ]


def _ours(path: Path, steps: int) -> Entry:
    config = load_profile(path).sparsity
    actions = timetable.Schedule(config.schedule, timetable.Run(steps)).actions()
    sparse = (config.attention.is_sparse or config.mlp.is_sparse) and Action.SPARSE in actions
    return Entry(OURS if sparse else SKIPS, path.parent.name, path.stem, config)


def rivals(steps: int) -> Iterator[Entry]:
    """diffusers' caches at all settings."""
    for (first, most), threshold in product(MAG_LIMITS, MAG_THRESHOLDS):
        variant = f"first {first:.0%}, at most {most} skipped"
        fields = {"retention_ratio": first, "max_skip_steps": most, "threshold": threshold}
        yield Entry("MagCache", variant, f"threshold {threshold:g}", cache=fields)
    tenth = round(0.1 * steps)
    sixth = round(steps / 6)
    for order, threshold in product((0, 1), SEA_THRESHOLDS):
        variant = f"order {order}, first {tenth}, at most 8 skipped"
        fields = {"residual_order": order, "retention_steps": tenth, "threshold": threshold}
        fields["max_consecutive_cached"] = 8
        yield Entry("SeaCache", variant, f"threshold {threshold:g}", cache=fields)
    for threshold in FIRST_BLOCK_THRESHOLDS:
        fields = {"threshold": threshold}
        yield Entry("FirstBlockCache", "", f"threshold {threshold:g}", cache=fields)
    for (kept, order), every in product(((3, 1), (sixth, 1), (sixth, 2)), INTERVALS):
        variant = f"whole steps, first {kept}, order {order}"
        taylor: dict[str, Any] = {
            "disable_cache_before_step": kept,
            "max_order": order,
            "use_lite_mode": True,
        }
        taylor |= {"cache_interval": every, "taylor_factors_dtype": torch.float32}
        yield Entry("TaylorSeer", variant, f"every {every}", cache=taylor)
    for method, timesteps in (("PAB", PYRAMID_TIMESTEPS), ("FasterCache", FASTER_TIMESTEPS)):
        # FasterCache's guidance is set as distilled: else it would split a batch that there is not.
        options = {"is_guidance_distilled": True} if method == "FasterCache" else {}
        for (high, low), every in product(timesteps, INTERVALS):
            variant = f"timesteps {high} to {max(0, low)}"
            broadcast: dict[str, Any] = {"spatial_attention_block_skip_range": every, **options}
            broadcast["spatial_attention_timestep_skip_range"] = (low, high)
            yield Entry(method, variant, f"every {every}", cache=broadcast)


@contextmanager
def with_cache(
    run: Any,
    entry: Entry,
    made: Counter[Any],
    compiled: Callable[[Any], Any],
) -> Iterator[list[str]]:
    """Puts an entry's cache on the transformer for the time being.

    A hook takes the place of a module's ``forward`` and keeps Python state. Compiled together with
    its block it would be compiled anew at every step, or not at all. So the forward beneath it is
    compiled, and the hook itself runs as written: nothing that it calls is slower than in stock.

    Args:
        run: a `CacheRun`.
        entry: has a cache.
        made: gets how often each part of the transformer was computed.
        compiled: compiles a forward, or returns it as it is.

    Yields:
        what diffusers warns of.
    """
    from chipsparse.experiments.diffusers_caches import Cache, cached

    def counted(module: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:  # with no attributes of a compiled one
            made[module] += 1
            if module in attentions:
                made[attentions[module]] += 1
            return forward(*args, **kwargs)

        return counting

    head = run.pipe.transformer.proj_out
    blocks = blocks_of(run.pipe.transformer)
    attentions = {} if entry.reuses_attention else {block: attention_of(block) for block in blocks}
    hooked = [*blocks, head]
    if entry.reuses_attention:
        hooked += [attention_of(block) for block in blocks]
    compiled_blocks = {block: block._compiled_call_impl for block in blocks}
    try:
        for block in blocks:
            block._compiled_call_impl = None  # it would go through the hooks
        for module in hooked:
            beneath = module.forward if module is head else compiled(module.forward)
            module.forward = counted(module, beneath)
        make = entry.cache_config
        per_branch = entry.reuses_attention
        with cached(run, Cache(entry.method, entry.setting, make, per_branch)) as warnings:
            if entry.reuses_attention:
                for block in blocks:  # so that its block's code ends before it
                    attention = attention_of(block)
                    attention.forward = torch.compiler.disable(attention.forward)
            yield warnings
    finally:
        for block, call in compiled_blocks.items():
            block._compiled_call_impl = call
        for module in hooked:
            vars(module).pop("forward", None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument("--model", type=Path, default=bundled_model())
    parser.add_argument("--prompts", type=Path, default=ASSETS / "prompts" / "shapes.txt")
    parser.add_argument("--first", type=int, default=0, help="number of the first prompt, from 0")
    parser.add_argument("--count", type=int, default=16, help="how many prompts")
    parser.add_argument("--steps", type=int, help="denoising steps, default the profile's")
    parser.add_argument("--size", help="HEIGHTxWIDTH[xFRAMES], default the profile's")
    parser.add_argument("--flow-shift", type=float, help="of noise levels")
    parser.add_argument("--profiles", type=Path, nargs="*", default=[], help="of ours")
    parser.add_argument("--case", default="", help="only ways whose name holds this expression")
    parser.add_argument("--store", type=Path, help="keep what was made, to go on from")


def run(args: argparse.Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Generates every way with every prompt, paired with dense; adds a record of each clip."""
    from diffusers import DiffusionPipeline

    from chipsparse.experiments.engine import Sample
    from chipsparse.experiments.store import Store
    from chipsparse.pipelines.flow_shift import with_flow_shift

    lines = args.prompts.read_text(encoding="utf-8").splitlines()
    samples = [Sample(index, prompt, index) for index, prompt in enumerate(lines)]
    pipe: Any = DiffusionPipeline.from_pretrained(str(args.model), dtype=dtype)
    if args.flow_shift is not None:
        pipe.scheduler = with_flow_shift(pipe.scheduler, args.flow_shift)
    pipe.to(device).set_progress_bar_config(disable=True)
    if device.type == "cuda" and hasattr(pipe, "video_processor"):
        pipe.vae.to(torch.float32)  # rounding there is no method's fault
        pipe.text_encoder.to(torch.float32)
    profile = find_profile(args.model, type(pipe.transformer).__name__)
    usual = {name: v for name, v in vars(profile.generation).items() if v is not None}
    tiny = {name: value for name, value in TINY.items() if args.tiny and name in usual}
    asked: dict[str, Any] = {"num_inference_steps": args.steps} if args.steps else {}
    if args.size:
        asked |= zip(SIZE, map(int, args.size.split("x")), strict=False)
    settings = {"num_inference_steps": 50, **usual, **tiny, **asked}
    shared = run_fields(OP, args.model.name, settings, args.flow_shift)
    lab = Lab(
        pipe,
        settings,
        shared,
        samples,
        calibrating=samples[args.first - 1],  # by default the last, which is not compared
        store=Store(args.store, shared, kind="equal-work"),
    )
    with lab.prepared(compiled=True):
        known = entries(lab.steps, args.profiles)
        known = [entry for entry in known if re.search(args.case, str(entry))]
        for record in lab.records(known, samples[args.first : args.first + args.count]):
            to.add(record)
    for name, clips in by_workload(to.records).items():
        for axis in ("work", "time"):
            rows = quality_rows(clips, axis)
            columns = dict.fromkeys(rows[0] if rows else (), "s")
            print(f"{name}: PSNR in dB at equal {axis}, mean (worst)\n\n{table(rows, columns)}\n")


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
        store: keeps the records of the experiments.
        timed: whether the time of clips matters, so that each way is warmed up.
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
        store: Any,
        timed: bool = True,
        **experiment: Any,
    ) -> None:
        from chipsparse.experiments.clips import ClipMaker
        from chipsparse.experiments.engine import Experiment, plainly

        self.pipe = pipe
        self._settings = dict(settings)
        self._run = shared
        self._device: torch.device = pipe._execution_device
        self.steps: int = settings["num_inference_steps"]
        self._samples = samples
        self._calibrating = calibrating
        self._store = store
        self._maker = ClipMaker(lambda: self.pipe, self._arguments, self.steps)
        self._compiles = False  # see `prepared`
        self._timed = timed
        self._experiment = Experiment(self._maker, samples, store, describe=plainly, **experiment)

    def _arguments(self, prompt: str) -> dict[str, Any]:
        guided = self._settings.get("true_cfg_scale", 1) > 1
        negative = {"negative_prompt": ""} if guided else {}  # or guidance would be left out
        return {**self._settings, "prompt": prompt, **negative}

    @contextmanager
    def prepared(self, *, compiled: bool) -> Iterator[None]:
        """Counts the dense work; on a GPU takes the fastest attention and may compile blocks."""
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
            self._compiles = compiled and self._device.type == "cuda"
            if self._compiles:
                stack.enter_context(torch._dynamo.config.patch(**COMPILATIONS))
                transformer.compile_repeated_blocks(**COMPILE_OPTIONS)
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
                values = {"psnr": clip.record.psnr_db, "ssim": clip.record.ssim, "work": 1.0}
                values |= {"seconds": clip.record.seconds, "dense_seconds": dense.seconds}
                record |= {**values, **clip.record.facts, "remarks": clip.record.notes}
            text = clip.record.refused or "{work:.1%} of the work, {psnr} dB".format(**record)
            print(f"{clip.sample.seed} {entry}: {text}", flush=True)
            yield record

    def _way(self, entry: Entry) -> Any:
        """The way of an entry; its facts are the share of the work and the calls of each action."""
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
                    work = self._work.of_report(report)
                    actions = Counter(step.action.value for step in report.steps)
                    return {
                        "work": work / self._dense,
                        "calls": dict(actions),
                        "sparse_layers": _sparse_layers(report),
                    }
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
                    on = with_cache(CacheRun(pipe, steps, ratios), entry, made, self._compiled)
                    warnings = stack.enter_context(on)
                    applied = Applied(notes=lambda: warnings, facts=facts)
                else:
                    applied = Applied(facts=facts)
                yield applied

        config = "" if entry.config is None else run_digest(entry.config)
        key = f"{entry} {config}".strip()
        return Way(str(entry), apply, key=key, method=entry.method, warm=self._timed)

    def _compiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(forward, **COMPILE_OPTIONS) if self._compiles else forward


def _sparse_layers(report: Any) -> dict[str, int]:
    """The number of layers whose attention and MLP ran sparse in the last sparse call."""
    sparse = [step for step in report.steps if step.action is Action.SPARSE]
    return {part: len(sparse[-1].fractions(part)) for part in PARTS} if sparse else {}

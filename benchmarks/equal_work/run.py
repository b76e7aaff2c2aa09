"""``python -m benchmarks --op equal_work``: generates, compares with dense, keeps a record of each.

A prompt's clips are made in one process, in an order that is shuffled, and paired with its dense
clip. There is one record for every clip; a run that is started again with the same file goes on
where it was. Prompts, or where settings are chosen these, can be split over several processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.clips import Clip, Workload, asked_for
from benchmarks.contact_sheet import contact_sheet
from benchmarks.equal_work.beneath_hooks import with_cache
from benchmarks.equal_work.curves import IDENTITY, OP, OURS, SKIPS, chosen, compared, joined
from benchmarks.equal_work.methods import Entry, dense, entries
from benchmarks.equal_work.work import DenseWork
from benchmarks.records import Record, environment, read
from benchmarks.run import Run
from benchmarks.transformer_step import COMPILE_OPTIONS, attention_backend
from chipsparse.experiments.quality import psnr, ssim
from chipsparse.pipelines.diffusers_caches import CacheRun, calibrated_ratios
from chipsparse.plan import Action
from chipsparse.report.generation import GenerationReport

# Enough for every action and for every part of a cache.
WARM_UP = ("dense", "refresh", "sparse", "sparse", "skip")
CALIBRATION = "calibration"  # the setting of the record that has MagCache's ratios
# Blocks that a config or a cache changes are compiled apart.
COMPILATIONS: dict[str, Any] = {"recompile_limit": 256, "accumulated_recompile_limit": 1 << 20}


def run(args: argparse.Namespace, workload: Workload, results: Run) -> None:
    """Measures what the results lack; `benchmarks.equal_work.command` has the options."""
    results.add(*joined([*read(args.json), *read(*args.known)]))
    bench = _Bench(args, workload, results)
    part, parts = args.part
    first = args.calibrating if args.role == "calibrating" else args.first
    prompts = list(enumerate(workload.prompts))[first : first + args.count]
    found = bench.entries()
    if args.role == "calibrating":
        prompts, found = prompts[:1], found[part::parts]
    else:
        bench.check_apart(prompts)
        prompts = prompts[part::parts]
    with bench.prepared():
        bench.warm_up(found)
        for seed, prompt in prompts:
            bench.measure(seed, prompt, found)


class _Bench:
    """Generates entry by entry and keeps what was measured."""

    def __init__(self, args: argparse.Namespace, workload: Workload, results: Run) -> None:
        self._args, self._workload, self._results = args, workload, results
        self._until = time.monotonic() + args.limit
        self._settings = asked_for(args)
        full = workload.settings(**self._settings)
        self._steps: int = full.get("num_inference_steps", 50)
        self._run = {
            "op": OP,
            "model": workload.name,
            "size": [full[name] for name in ("height", "width", "num_frames") if name in full],
            "steps": self._steps,
            "flow_shift": args.flow_shift,
        }
        self._compiling = workload.device.type == "cuda" or args.compile
        self._sheet: Path | None = args.sheet

    def entries(self) -> list[Entry]:
        """What is to be measured: of what settings were chosen for, these alone."""
        args = self._args
        found = entries(self._steps, args.profiles)
        if args.role == "calibrating":
            found = [entry for entry in found if entry.cache is not None]
        else:
            source = read(*args.calibration) or [
                record for record in self._results.records if self._is_of_run(record)
            ]
            tried = [each for each in source if each.get("role") == "calibrating"]
            wanted = chosen(tried, best=args.best)
            methods = {each["method"] for each in tried}
            found = [
                entry
                for entry in found
                if entry.method not in methods or entry.setting in wanted.get(entry.curve, ())
            ]
        if args.again:
            before = {_name_of(record) for record in compared(read(*args.again))}
            found = [
                entry for entry in found if entry.method in (OURS, SKIPS) or _named(entry) in before
            ]
        text = "{0.method}, {0.variant}, {0.setting}"
        return [entry for entry in found if re.search(args.case or "", text.format(entry))]

    def check_apart(self, prompts: Sequence[tuple[int, str]]) -> None:
        """Raises `ValueError` where settings were chosen on a prompt that is to be compared.

        Its clips are there already, in the other role, so the prompt would have none of the rivals.
        """
        calibrating = {
            (record["seed"], record["prompt"])
            for record in self._results.records
            if record.get("role") == "calibrating" and self._is_of_run(record)
        }
        for seed, prompt in prompts:
            if (seed, prompt) in calibrating:
                raise ValueError(
                    f"settings are chosen on prompt {seed}, which cannot be compared, too; leave "
                    "it out with --first and --count"
                )

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Counts the dense work; compiles blocks and takes the fastest attention where asked."""
        pipe, transformer = self._workload.pipe, self._workload.pipe.transformer
        with ExitStack() as stack:
            if self._workload.device.type == "cuda":
                stack.enter_context(attention_backend(transformer, "_native_cudnn"))
                if not self._workload.makes_images:  # rounding there is no method's fault
                    pipe.vae.to(torch.float32)
                    pipe.text_encoder.to(torch.float32)
            prompt, seed = self._workload.prompts[0], 0
            self._work = DenseWork.measured(
                transformer,
                lambda: self._clip(None, prompt, seed, num_inference_steps=2),
            )
            if self._compiling:
                stack.enter_context(torch._dynamo.config.patch(**COMPILATIONS))
                transformer.compile_repeated_blocks(**COMPILE_OPTIONS)
            yield

    def warm_up(self, found: Sequence[Entry]) -> None:
        """A few steps of each kind, where anything is compiled, in two rounds.

        The first of them that patch the model leave traces, for which PyTorch compiles the code of
        the others once more.
        """
        if not self._compiling:
            return
        if any(entry.cache is not None for entry in found):
            self._ratios()
        ours = [entry for entry in found if entry.method == OURS]
        kinds = {_kind(entry): entry for entry in (dense(), *found)}
        for entry in (*ours, *kinds.values(), *kinds.values()):
            with suppress(Exception) if entry.cache is not None else nullcontext():
                self._generate(_short(entry), (1.0,) * len(WARM_UP), 0, self._workload.prompts[0])

    def measure(self, seed: int, prompt: str, found: Sequence[Entry]) -> None:
        """What is not known of a prompt yet, as long as there is time."""
        known = self._known_of(prompt, seed)
        missing = [entry for entry in found if _named(entry) not in known]
        if not missing:
            return
        ratios = self._ratios() if any(entry.cache is not None for entry in missing) else ()
        stock, calls = self._generate(dense(), ratios, seed, prompt)
        if not known:
            self._keep(dense(), seed, prompt, self._compared(stock, stock, calls))
        frames = [stock.frames]
        for entry in random.Random(seed).sample(missing, len(missing)):
            if time.monotonic() > self._until:
                print(f"time is up: {seed}, {prompt} lacks some", flush=True)
                return
            warnings: list[str] = []
            try:
                made, work = self._generate(entry, ratios, seed, prompt, warnings)
            except Exception as error:
                if entry.cache is None:
                    raise
                # That a cache cannot run here is a result, whatever it stumbles over.
                facts: Record = {"refused": f"{type(error).__name__}: {error}"}
            else:
                facts = {**self._compared(made, stock, work / calls), "remarks": warnings}
                if self._sheet is not None:
                    frames.append(made.frames)
            self._keep(entry, seed, prompt, facts)
        if self._sheet is not None:
            contact_sheet(torch.stack(frames)).save(self._sheet)
            self._sheet = None

    def _generate(
        self,
        entry: Entry,
        ratios: tuple[float, ...],
        seed: int,
        prompt: str,
        warnings: list[str] | None = None,
    ) -> tuple[Clip, float]:
        """A clip and its multiply-adds."""
        steps = entry.steps or self._steps
        made: Counter[torch.nn.Module] = Counter()
        transformer = self._workload.pipe.transformer
        calls: Counter[str] = Counter()
        with ExitStack() as stack:
            if entry.config is None:  # others report what they did
                count = transformer.register_forward_pre_hook(lambda *_: calls.update(["all"]))
                stack.callback(count.remove)
            if entry.cache is not None:
                run = CacheRun(self._workload.pipe, steps, ratios)
                warned = stack.enter_context(with_cache(run, entry, made, self._compiled))
                if warnings is not None:
                    stack.callback(lambda: warnings.extend(warned))
            clip = self._clip(entry.config, prompt, seed, num_inference_steps=steps)
        if clip.report is not None:
            return clip, self._work.of_report(clip.report)
        if entry.cache is None:
            return clip, self._work.call * calls["all"]
        return clip, self._work.of_calls(made, calls["all"])

    def _clip(self, config: Any, prompt: str, seed: int, **changes: Any) -> Clip:
        settings = {**self._settings, **changes}
        return self._workload.generate(config, prompt, seed=seed, **settings)

    def _compiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        if not self._compiling:
            return forward
        result: Callable[..., Any] = torch.compile(forward, **COMPILE_OPTIONS)
        return result

    def _ratios(self) -> tuple[float, ...]:
        """MagCache's ratios for this model, size and number of steps, measured once."""
        for record in self._results.records:
            if record.get("setting") == CALIBRATION and self._is_of_run(record):
                return tuple(record["ratios"])
        seed, prompt = self._args.calibrating, self._workload.prompts[self._args.calibrating]
        ratios = calibrated_ratios(
            self._workload.pipe, self._steps, lambda: self._clip(None, prompt, seed)
        )
        facts = {"method": "MagCache", "setting": CALIBRATION, "ratios": ratios}
        self._results.add({**self._run, **facts, **environment(self._workload.device)})
        return ratios

    def _is_of_run(self, record: Record) -> bool:
        return all(record.get(name) == value for name, value in self._run.items())

    def _known_of(self, prompt: str, seed: int) -> set[tuple[str, ...]]:
        """What is known of a prompt, by method, variant and setting."""
        return {
            _name_of(record)
            for record in self._results.records
            if "psnr" in record or "refused" in record
            if self._is_of_run(record) and (record["prompt"], record["seed"]) == (prompt, seed)
        }

    def _compared(self, made: Clip, stock: Clip, work: float) -> Record:
        """What a record says of a clip: how close to the stock one, and what it took."""
        frames, expected = made.frames, stock.frames
        facts: Record = {
            "refused": None,
            "psnr": psnr(expected, frames),
            "ssim": ssim(expected, frames),
            "work": 1.0 if made is stock else work,
            "seconds": made.seconds,
            "dense_seconds": stock.seconds,
        }
        return facts if made.report is None else facts | _steps(made.report)

    def _keep(self, entry: Entry, seed: int, prompt: str, facts: Record) -> None:
        named = dict(zip(("method", "variant", "setting"), _named(entry), strict=True))
        clip = {"role": self._args.role, "prompt": prompt, "seed": seed}
        record = {**self._run, **named, **clip, **facts, **environment(self._workload.device)}
        assert all(name in record for name in IDENTITY)
        self._results.add(record)
        text = "{psnr:6.2f} dB  {work:6.1%} of the work, {seconds:.2f} s"
        shown = record["refused"] or text.format(**record)
        print(f"{seed} {', '.join(filter(None, _named(entry)))}: {shown}", flush=True)


def _named(entry: Entry) -> tuple[str, ...]:
    return entry.method, entry.variant, entry.setting


def _name_of(record: Record) -> tuple[str, ...]:
    return record["method"], record["variant"], record["setting"]


def _kind(entry: Entry) -> tuple[bool, ...]:
    """Entries of a kind run the same code compiled by PyTorch."""
    ours = entry.method == OURS, entry.method == SKIPS
    return *ours, entry.cache is not None, entry.reuses_attention


def _short(entry: Entry) -> Entry:
    """The same with so few steps that it only compiles and tunes."""
    config = entry.config
    if config is not None:
        config = config.override({"schedule.actions": WARM_UP})
    return dataclasses.replace(entry, config=config, steps=len(WARM_UP))


def _steps(report: GenerationReport) -> Record:
    """Of a generation of ours: how many calls took each action, and how long one takes."""
    times: dict[Action, list[float]] = {}
    for step in report.steps:
        times.setdefault(step.action, []).append(step.seconds * 1e3)
    kept = [step.attention_kept for step in report.steps if step.attention_kept is not None]
    return {
        "calls": {action.value: len(found) for action, found in times.items()},
        "call_ms": {action.value: statistics.median(found) for action, found in times.items()},
        "replayed_calls": sum(step.replayed for step in report.steps),
        "attention_kept": statistics.fmean(kept) if kept else None,
        "fallbacks": list(report.fallbacks),
    }

"""``python -m benchmarks steps``: generations of full-size transformers, summed from their steps.

There is a record for each named quality of the model's profile. Qualities that differ in their
steps alone share the measured ones; a record says nothing of steps that its quality never takes.
Sparse steps are captured as CUDA graphs where those of the whole generation may be. ``--schedules
dense`` measures a patched transformer with nothing sparse.

The baseline is the stock transformer in the same process: same weights and inputs, cuDNN attention,
no useless mask, compiled blocks. Weights are random, so times and memory mean something and
pictures do not; that the patched transformer computes the same model is checked on its dense step.
Only the transformer is timed: the text encoder and the VAE cost the same with and without.

``offload`` times sparse steps with all caches in host memory against all of them on the GPU.

``parallel``, under ``torchrun``, times steps on several GPUs against one: the first process runs
alone, then all run together. Each time is that of the slowest process. Of each action the record
says which share of the time is exchange that nothing hides: the time that the stream of the layers
spends with packing, waiting (for slower processes, too) and unpacking.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import statistics
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, get_args
from unittest import mock

import torch
import torch.distributed as dist

import chipsparse
from benchmarks.cases import check_finite, relative_error, require
from benchmarks.models import MODELS, STEPS, FullModel, call, to_fp8, without_useless_masks
from benchmarks.records import Record, Run, environment
from benchmarks.step_timing import (
    PARTS,
    attention_backend,
    breakdown,
    compiled_blocks,
    mark,
    milliseconds,
    run_timed,
)
from chipsparse import Parallel, ScheduleConfig, SparsityConfig
from chipsparse.config import Action, ActionName, Actions, Precision
from chipsparse.experiments.engine import config_digest, step_digest
from chipsparse.layout import ModelLayout
from chipsparse.sparse.cost_model.layer_times import as_of_many
from chipsparse.sparse.plan import SparsityPlan

COLUMNS = {
    **dict.fromkeys(("case", "schedule"), ""),
    "latency_ms": ".0f",
    "baseline_ms": ".0f",
    "speedup": ".2f",
    "dense_ms": ".1f",
    "refresh_ms": ".1f",
    "sparse_ms": ".1f",
    "skip_ms": ".2f",
    "rel_error": ".1e",
    "sparse_error": ".1e",
    "graphs": "d",
    "graph_breaks": "d",
    "peak_gpu_bytes": ".3e",
    "pinned_bytes": ".3e",
}
OFFLOAD_COLUMNS = {
    "case": "",
    "mlp": "",
    "layers": "d",
    "latency_ms": ".2f",
    "baseline_ms": ".2f",
    "slowdown": ".4f",
    "host_bytes": ".4e",
    "to_device_bytes": ".3e",
    "identical": "",
}
# Largest relative error of a dense step: the model's own rounding, in another order.
DENSE_LIMIT = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-4}
# The same where it is rounded to 8 bits: attention by about one in a hundred a layer, where it is;
# inputs of linears by a whole level where they differ by little.
FP8_LIMIT = 0.1
# Steps up to the first sparse one run once before, and compile. The last COUNTED steps of each
# action tell its time: the first of all makes room for caches, the second sparse one is recorded as
# a graph where that pays. One more sparse step is profiled.
ACTIONS: list[ActionName] = [
    "dense",
    "refresh",
    "sparse",
    "sparse",
    "sparse",
    "sparse",
    "skip",
    "dense",
    "refresh",
    "skip",
    "dense",
    "refresh",
    "skip",
]
# Long steps vary little: of those that take so long there are fewer.
LONG_STEP_MS = 4_000
FEW_ACTIONS = ACTIONS[: ACTIONS.index("skip") + 1]
COUNTED = 2
FIRST_SPARSE = 2
LAST_SPARSE = 5
TINY = {"block_size": 16, "layers": ()}  # few tokens and layers
WAIT = timedelta(minutes=20)  # of the others, while the first process runs alone


def add_arguments(parser: ArgumentParser) -> None:
    """Options of all three commands."""
    parser.add_argument("--case", help=f"comma-separated, default all: {', '.join(MODELS)}")
    extra = "or dense, or sparse: chipmunk with 44 of 50 steps sparse"
    parser.add_argument("--schedules", help=f"comma-separated, default all qualities; {extra}")
    neurons = "share of the neurons, in place of what the qualities say"
    parser.add_argument("--mlp-density", type=float, help=neurons)
    precision = "of full attention at the dense steps and refreshes of all qualities"
    parser.add_argument("--precision", choices=get_args(Precision), default="model", help=precision)
    linears = "of all blocks by torchao, weights and inputs, also those of the baseline"
    parser.add_argument("--fp8-linears", action="store_true", help=linears)
    parser.add_argument("--mlp", action="store_true", help="offload: sparse feed-forward, too")
    stock = "parallel: also the stock full step under diffusers' own context parallelism"
    parser.add_argument("--stock", action="store_true", help=stock)


def run(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds a record for each case and quality."""

    def measure(steps: Steps) -> None:
        to.add(*steps.records(chosen(steps.model, args)))
        # After the records are written: the times tell what went wrong.
        in_fp8 = args.fp8_linears or args.precision == "fp8"
        limit = FP8_LIMIT if in_fp8 else DENSE_LIMIT[dtype]
        require("relative error", steps.rel_error, limit, "the dense step")

    _each_case(args, device, dtype, to, measure)


def run_offload(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds a record for each case."""

    def measure(steps: Steps) -> None:
        to.add(record := steps.offload(args.mlp))
        if not record["identical"]:
            raise ValueError("the outputs differ from those with all caches on the device")

    _each_case(args, device, dtype, to, measure)


def run_parallel(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds a record for each case; the first process keeps it."""

    def measure(steps: Steps) -> None:
        record = steps.parallel(args.stock)
        if record is not None:
            to.add(record)
            print(json.dumps(record, indent=1))

    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=WAIT)
    try:
        _each_case(args, device, dtype, to, measure)
    finally:
        dist.destroy_process_group()


def _each_case(
    args: Namespace,
    device: torch.device,
    dtype: torch.dtype,
    to: Run,
    measure: Callable[[Steps], None],
) -> None:
    """Measures the models one after the other; a failure of one leaves the others."""
    for name in args.case.split(",") if args.case else MODELS:
        with to.attempt(name), torch.no_grad():
            if name not in MODELS:
                raise ValueError(f"no model for the case {name!r}; there are {list(MODELS)}")
            measure(Steps(MODELS[name], args, device, dtype))
        gc.collect()  # the next model wants its memory
        torch.cuda.empty_cache()


def chosen(model: FullModel, args: Namespace) -> dict[str, SparsityConfig]:
    """The configs that are measured of a model, by the name of the schedule."""
    qualities = model.qualities()
    known = {"dense": SparsityConfig.dense(), "sparse": model.nearly_all_sparse(), **qualities}
    names = args.schedules.split(",") if args.schedules else [*qualities]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--schedules {', '.join(unknown)}: there are {', '.join(known)}")
    changes: dict[str, object] = {"attention.precision": args.precision}
    if args.mlp_density is not None:
        changes["mlp.density"] = args.mlp_density
    return {name: known[name].override(changes) for name in names}


def of_steps(config: SparsityConfig, step_ms: float = 0.0) -> SparsityConfig:
    """The config of measured steps, one behind the other.

    Sparse ones are measured where a layer can be sparse, whether or not the schedule takes any.

    Args:
        config: whose layers are measured.
        step_ms: of a stock step.
    """
    actions = ACTIONS if step_ms < LONG_STEP_MS else FEW_ACTIONS
    sparse = config.attention.is_sparse or config.mlp.is_sparse
    full = [action for action in actions if action in ("dense", "skip")]
    return replace(
        config,
        schedule=ScheduleConfig(
            Actions(tuple([*actions, "sparse"] if sparse else full)),
            forecast=float(config.schedule.forecast > 0),  # of any share, it takes as long
        ),
    )


def actions_listed(config: SparsityConfig) -> list[ActionName]:
    """The actions that the schedule of a config of `of_steps` lists."""
    form = config.schedule.form
    assert isinstance(form, Actions)
    return [*form.each]


def actions_of(config: SparsityConfig, layout: ModelLayout) -> Counter[str]:
    """The number of steps of each action in a generation of a config with a decided schedule."""
    return Counter(action.value for action in SparsityPlan(config, layout, STEPS).actions())


@dataclass
class Timed:
    """Steps of a patched transformer, timed."""

    ms: dict[str, float]  # of all, and of a step of each action
    outputs: list[torch.Tensor]  # of each step
    layout: ModelLayout
    facts: Record  # of the session, by their names in records
    exposed: dict[str, float]  # of these, exchange that nothing hides
    same_again: bool  # the first sparse step gave the same bits in the run before


class Steps:
    """One model, run stock and patched."""

    def __init__(
        self,
        model: FullModel,
        args: Namespace,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model = model
        self.device = device
        self.rel_error = 0.0  # the largest one of a dense step so far
        self._changes = TINY if args.tiny else {}
        if args.tiny and dist.is_initialized():
            heads = {"num_attention_heads": 2 * dist.get_world_size()}
            model = replace(model, tiny={**model.tiny, **heads})
        self._dtype = str(dtype).removeprefix("torch.")
        self._transformer = model.make(args.tiny, device, dtype)
        self._linears = "fp8" if args.fp8_linears else self._dtype
        if args.fp8_linears:
            to_fp8(self._transformer, model.blocks)
        self._inputs = model.step(self._transformer, args.tiny)
        self._backend = "_native_cudnn" if device.type == "cuda" else "native"

    def records(self, configs: dict[str, SparsityConfig]) -> list[Record]:
        """The record of each config; configs of the same steps are measured once."""
        measured: dict[SparsityConfig, Timed] = {}
        with attention_backend(self._transformer, self._backend):
            step_ms, expected = self._stock()
            for config in configs.values():
                of_it = of_steps(config, step_ms)
                if of_it not in measured:
                    measured[of_it] = self._compared(config, of_it, expected)
        return [
            self._record(name, config, measured[of_steps(config, step_ms)], step_ms)
            for name, config in configs.items()
        ]

    def _record(self, name: str, config: SparsityConfig, timed: Timed, step_ms: float) -> Record:
        """The record of a quality, from measured steps and the time of a stock one."""
        decided = self.model.decided(config)
        counts = actions_of(decided, timed.layout)
        latency = _generation(decided, timed.ms, timed.layout)
        times = {action: timed.ms.get(action) for action in ACTIONS}
        backend = self._backend.lstrip("_")
        return {
            "op": "end_to_end",
            "benchmark": "full_size",
            **self._facts(timed.layout),
            "model": self.model.transformer_class,
            "steps": STEPS,
            "schedule": name,
            "config": config_digest(decided),
            "step_config": step_digest(config),
            "actions": dict(counts),
            "precision": config.attention.precision,
            "linears": self._linears,
            "density": config.attention.density,
            "mlp_density": config.mlp.density if config.mlp.is_sparse else 1.0,
            "baseline": f"stock transformer, {backend} attention, no mask, compiled blocks, "
            f"linears in {self._linears}",
            "latency_ms": latency,
            "baseline_ms": STEPS * step_ms,
            "speedup": STEPS * step_ms / latency,
            "measured": "summed from measured steps",
            "baseline_step_ms": step_ms,
            "step_speedup": step_ms / times["sparse"] if times["sparse"] else None,
            **{f"{action}_ms": ms for action, ms in times.items()},
            **timed.facts,
            **environment(self.device),
        }

    def offload(self, sparse_mlp: bool) -> Record:
        """The record of sparse steps with all caches in host memory."""
        changes = {} if sparse_mlp else {"mlp.density": "dense"}
        config = of_steps(self.model.nearly_all_sparse().override(changes))
        with attention_backend(self._transformer, self._backend):
            resident, hosted = (
                self._patched(config.override({"memory.offload": where}))
                for where in ("never", "always")
            )
        pairs = zip(resident.outputs, hosted.outputs, strict=True)
        return {
            "op": "offload",
            **self._facts(resident.layout),
            "density": config.attention.density,
            "mlp": "sparse" if sparse_mlp else "dense",
            "backend": "host memory",
            "baseline": "all caches on the device",
            "latency_ms": hosted.ms["sparse"],
            "baseline_ms": resident.ms["sparse"],
            "slowdown": hosted.ms["sparse"] / resident.ms["sparse"],
            **{
                f"baseline_{name}": resident.facts[name]
                for name in ("peak_gpu_bytes", "host_bytes")
            },
            **hosted.facts,
            "identical": all(torch.equal(*pair) for pair in pairs),
            **environment(self.device),
        }

    def parallel(self, with_stock: bool) -> Record | None:
        """Measures with all processes; the first one has the record."""
        ranks = dist.get_world_size()
        alone = None
        # Nothing of faithful is sparse: it consists of the same full and skipped steps.
        sparse = self.model.nearly_all_sparse()
        faithful = self.model.qualities()["faithful"]
        if dist.get_rank() == 0:
            alone = self._patched(of_steps(sparse))
        dist.barrier()
        together = []
        for guidance in (1, 2) if self.model.guided else (1,):
            degrees = Parallel(ulysses=ranks // guidance, guidance=guidance)
            timed = self._patched(of_steps(sparse), degrees)
            ms = _largest(timed.ms)
            shares = {name: timed.exposed[name] / timed.ms[name] for name in timed.ms}
            facts: Record = {**asdict(degrees), "ms": ms, "exposed_share": _largest(shares)}
            facts |= _largest({"peak_gpu_bytes": timed.facts["peak_gpu_bytes"] or 0})
            if alone is None:
                continue
            times = {
                name: [_generation(config, part, timed.layout) for part in (alone.ms, ms)]
                for name, config in (("sparse", sparse), ("faithful", faithful))
            }
            pair = timed.outputs[LAST_SPARSE], alone.outputs[LAST_SPARSE]
            facts |= {
                "same_again": timed.same_again,
                "speedup": {name: alone.ms[name] / ms[name] for name in ms},
                "generation_ms": {name: shared for name, (_, shared) in times.items()},
                "generation_speedup": {name: one / shared for name, (one, shared) in times.items()},
                "rel_l2": relative_error(*pair),
            }
            together.append(facts)
        stock_ms = self._stock_in_parallel() if with_stock else None
        if alone is None:
            return None
        return {
            "op": "parallel_steps",
            **self._facts(alone.layout),
            "ranks": ranks,
            "blocks": alone.layout.layers,
            "measured_blocks": alone.layout.layers,
            "density": sparse.attention.density,
            "alone": {"ms": alone.ms, "peak_gpu_bytes": alone.facts["peak_gpu_bytes"]},
            "together": together,
            "stock_ms": stock_ms,
            **environment(self.device),
        }

    def _facts(self, layout: ModelLayout) -> Record:
        return {
            "case": self.model.case,
            "branches": len(self.model.branches),
            "tokens": layout.tokens,
            "layers": layout.layers,
            "dtype": self._dtype,
        }

    def _branch(self, step: int, steps: int) -> torch.Tensor:
        return call(self._transformer, self._inputs, self.model.branches[0], step, steps)

    def _step(self, step: int, steps: int) -> torch.Tensor:
        """All guidance branches of a step; the output of the last, which all processes have."""
        for branch in self.model.branches:
            output = call(self._transformer, self._inputs, branch, step, steps)
        return output

    def _timed(
        self,
        run: Callable[[int], torch.Tensor],
        steps: Sequence[int],
    ) -> tuple[list[float], list[torch.Tensor]]:
        """Milliseconds and outputs of steps."""
        times, outputs = run_timed([partial(run, step) for step in steps], self.device)
        for output in outputs:
            check_finite(output)
        return times, outputs

    def _stock(self) -> tuple[float, dict[int, torch.Tensor]]:
        """Milliseconds of a step with all branches, and the outputs of the steps to compare."""
        step = partial(self._step, steps=STEPS)
        compared = [0, LAST_SPARSE]
        with without_useless_masks(self._transformer), compiled_blocks(self._transformer):
            step(0)  # compiles
            times, outputs = self._timed(step, compared)
        return statistics.median(times), dict(zip(compared, outputs, strict=True))

    def _compared(
        self,
        config: SparsityConfig,
        of_it: SparsityConfig,
        expected: dict[int, torch.Tensor],
    ) -> Timed:
        """Measured steps of a config, with their errors among the facts."""
        if "sparse" in actions_listed(of_it):
            with self._enabled(config) as handle:
                self._step(0, STEPS)
                plan = handle._runners[0].sparse.session.plan
            of_it = as_of_many(of_it, plan, self._transformer.dtype)
        timed = self._patched(of_it)
        timed.facts["rel_error"] = relative_error(timed.outputs[0], expected[0])
        self.rel_error = max(timed.facts["rel_error"], self.rel_error)
        if "sparse" in timed.ms:
            pair = timed.outputs[LAST_SPARSE], expected[LAST_SPARSE]
            timed.facts["sparse_error"] = relative_error(*pair)
        return timed

    def _enabled(self, config: SparsityConfig, parallel: Parallel | None = None) -> Any:
        pipe = self.model.pipe(self._transformer)
        return chipsparse.enable(pipe, config.override(self._changes), parallel=parallel)

    def _patched(self, config: SparsityConfig, parallel: Parallel | None = None) -> Timed:
        """Times the steps of a config's actions on a patched transformer."""
        device = self.device
        cuda = self.device.type == "cuda"
        actions = actions_listed(config)
        sparse = "sparse" in actions
        timed = [*range(len(actions) - sparse)]  # the last one is profiled
        spans: list[tuple[int, Any, Any]] = []  # of exchanges on the stream of the layers
        current = 0

        def step(number: int) -> torch.Tensor:
            nonlocal current
            current = number
            return self._step(number, len(actions) + 1)  # caches are freed behind the last

        @contextlib.contextmanager
        def watched() -> Iterator[None]:
            start = mark(device)
            yield
            spans.append((current, start, mark(device)))

        with (
            self._enabled(config, parallel) as handle,
            compiled_blocks(self._transformer) as graphs,
        ):
            if (split := self._transformer.chipsparse_runner.sparse.split) is not None:
                split.exchange.watch = watched
            # Compiles, tunes, picks dense kernels, takes host memory.
            _, first = self._timed(step, timed[: FIRST_SPARSE + 1])
            spans.clear()
            if cuda:
                torch.cuda.reset_peak_memory_stats(device)
            times, outputs = self._timed(step, timed)
            facts = self._of_session(handle)
            facts["breakdown_ms"] = None
            if sparse and cuda and parallel is None:
                handle.report.layer_times = True  # so that kernels are launched one by one
                profiled = partial(self._branch, len(timed), len(actions) + 1)
                facts["breakdown_ms"] = breakdown(profiled, device)
            layout = handle._runners[0].sparse.session.plan.layout
        exposed = [0.0] * len(times)
        for number, start, end in spans:
            exposed[number] += milliseconds(start, end)
        gc.collect()  # the next one plans with what is free
        torch.cuda.empty_cache()
        ms, unhidden = (
            {"all": math.fsum(part), **_medians(part, actions)} for part in (times, exposed)
        )
        if parts := facts["breakdown_ms"]:
            # A profiled call waits for the host; what it idles for is known of the others.
            parts["all"] = ms["sparse"] / len(self.model.branches)
            parts["idle"] = max(0.0, parts["all"] - sum(parts[p] for p in PARTS if p != "idle"))
        same = torch.equal(outputs[FIRST_SPARSE], first[-1])
        return Timed(ms, outputs, layout, facts | graphs, unhidden, same)

    def _of_session(self, handle: Any) -> Record:
        """The memory, kernels and kept shares of the steps that ran."""
        report = handle.report
        facts = dict[str, Any]()
        pinned = handle._runners[0].sparse.session._pool.host.pinned_bytes
        sparse = [step for step in report.steps if step.action is Action.SPARSE]
        if sparse:
            of_step = sparse[-len(self.model.branches) :]
            facts = {
                "attention_kept": sparse[0].attention_kept,
                "mlp_kept": sparse[0].mlp_kept,
                "to_device_bytes": sum(step.bytes_to_device for step in of_step),
                "to_host_bytes": sum(step.bytes_to_host for step in of_step),
            }
        cuda = self.device.type == "cuda"
        return facts | {
            "backends": dict(report.backends),
            "fallbacks": list(report.fallbacks),
            "cache_bytes": report.cache_bytes if sparse else 0,
            "host_bytes": report.host_bytes if sparse else 0,
            "pinned_bytes": pinned if sparse else 0,
            "peak_gpu_bytes": torch.cuda.max_memory_allocated(self.device) if cuda else None,
        }

    def _stock_in_parallel(self) -> float:
        """Milliseconds of a full stock step, shared as diffusers does it; the slowest process's.

        The first block is not compiled: diffusers' hook on it cannot be.
        """
        from diffusers import ContextParallelConfig

        transformer = self._transformer
        ranks = dist.get_world_size()
        torch._dynamo.reset()
        for name in self.model.blocks:
            for block in getattr(transformer, name)[1:]:
                block.compile()
        with attention_backend(transformer, self._backend), without_useless_masks(transformer):
            # diffusers divides by the number of accelerators, and there may be none.
            counted = torch.accelerator.device_count() or ranks
            with mock.patch.object(torch.accelerator, "device_count", return_value=counted):
                config = ContextParallelConfig(ulysses_degree=ranks)
                transformer.enable_parallelism(config=config)
            times, _ = self._timed(partial(self._step, steps=STEPS), range(3))
        return _largest({"ms": statistics.median(times[1:])})["ms"]


def _generation(config: SparsityConfig, ms: dict[str, float], layout: ModelLayout) -> float:
    """Milliseconds of all steps."""
    counts = actions_of(config, layout)
    return math.fsum(count * ms[action] for action, count in counts.items())


def _medians(times: Sequence[float], actions: Sequence[str]) -> dict[str, float]:
    by_action: dict[str, list[float]] = {}
    for time, action in zip(times, actions, strict=False):
        by_action.setdefault(action, []).append(time)
    return {action: statistics.median(ms[-COUNTED:]) for action, ms in by_action.items()}


def _largest(values: dict[str, float]) -> dict[str, float]:
    """The largest of each value among all processes."""
    of_ranks: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, values)
    return {name: max(of_rank[name] for of_rank in of_ranks) for name in values}

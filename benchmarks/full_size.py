"""Whole generations of full-size transformers: every kind of step really run, then summed up.

There is a record for each named quality of the model's profile. Qualities that differ in their
steps alone share the measured ones; a record says nothing of steps that its quality never takes.
Sparse steps are captured as CUDA graphs where those of the whole generation may be.

The baseline is the stock transformer in the same process: same weights and inputs, cuDNN attention,
no useless mask, compiled blocks. Weights are random, so times and memory mean something and
pictures do not; that the patched transformer computes the same model is checked on its dense step.
Only the transformer is timed: the text encoder and the VAE cost the same with and without.
"""

from __future__ import annotations

import gc
import math
import statistics
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, get_args

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import chipsparse
from benchmarks.family_models import FAMILIES
from benchmarks.fp8_linears import to_fp8
from benchmarks.full_models import (
    MODELS,
    STEPS,
    FullModel,
    call,
    last_blocks_only,
    without_useless_masks,
)
from benchmarks.records import Record, environment
from benchmarks.run import Run
from benchmarks.sampled_checks import check_finite, relative_error, require
from benchmarks.step_breakdown import PARTS, breakdown
from benchmarks.transformer_step import DENSE_LIMIT, attention_backend, compiled_blocks, run_timed
from chipsparse import ScheduleConfig, SparsityConfig
from chipsparse.cache.kinds import keeping_in_fp8
from chipsparse.cache.memory_plan import (
    UNLIMITED,
    Capacity,
    MemoryDemand,
    MemoryPlan,
    plan_memory,
    reserve_share,
    working_bytes,
)
from chipsparse.common.machine import host_budget, host_free_bytes
from chipsparse.config import ActionName, Precision
from chipsparse.cost_model.layer_times import as_of_many
from chipsparse.layout import ModelLayout
from chipsparse.plan import Action, SparsityPlan
from chipsparse.schedule.schedule import Schedule

COLUMNS = {
    "benchmark": "",
    "case": "",
    "schedule": "",
    "steps": "d",
    "latency_ms": ".0f",
    "baseline_ms": ".0f",
    "speedup": ".2f",
    "dense_ms": ".1f",
    "refresh_ms": ".1f",
    "sparse_ms": ".1f",
    "skip_ms": ".2f",
    "all_dense_ratio": ".4f",
    "rel_error": ".1e",
    "sparse_error": ".1e",
    "graphs": "d",
    "graph_breaks": "d",
    "peak_gpu_bytes": ".3e",
    "pinned_bytes": ".3e",
}
# What is known of sparse steps and refreshes alone, and what only their caches take.
OF_ACTIONS = {
    "refresh": ("refresh_ms",),
    "sparse": (
        *("sparse_ms", "sparse_step_ms", "attention_kept", "mlp_kept", "sparse_error"),
        *("reused_error", "breakdown_ms", "longest_kernels", "peak_gpu_bytes"),
    ),
}
CACHES = ("cache_bytes", "host_bytes", "pinned_bytes")
# Largest relative error of a dense step that is rounded to 8 bits: attention by about one in a
# hundred a layer, where it is; inputs of linears by a whole level where they differ by little.
FP8_LIMIT = 0.1
SCALE = 0.1  # of rows and columns, in a dry run
# The last COUNTED steps of each action tell its time: the first of all makes room for caches, the
# second sparse one is recorded as a graph where that pays. One more sparse step is profiled.
RUNS: dict[ActionName, int] = {"dense": 3, "refresh": 2, "sparse": 4, "skip": 2}
COUNTED = 2
# The first steps in full look at every module and write down what the model holds, once.
FIRST = 2
PROFILED = sum(RUNS.values()) - RUNS["skip"]
ACTIONS: list[ActionName] = [action for action, runs in RUNS.items() for _ in range(runs)]
ACTIONS.insert(PROFILED, "sparse")
NOTHING_SPARSE = [action for action in ACTIONS if action in ("dense", "skip")]


def add_arguments(parser: ArgumentParser) -> None:
    """Options of this benchmark alone."""
    group = parser.add_argument_group("full_size")
    group.add_argument("--small", action="store_true", help="tiny models and pictures: a dry run")
    group.add_argument(
        "--depth",
        type=float,
        default=1.0,
        help="measure this share of the blocks of each kind, in the same share of the memory, and "
        "scale their times and caches",
    )
    group.add_argument(
        "--schedules",
        help="only these qualities, comma-separated; '' for none, with --early",
    )
    group.add_argument(
        "--early",
        action="store_true",
        help="also the two schedules of the first measurements, 44 of 50 steps sparse, or 25 of "
        "them skipped: summed from the steps of published where these keep as many columns",
    )
    group.add_argument(
        "--precision",
        choices=get_args(Precision),
        default="auto",
        help="of full attention at the dense steps and refreshes of all qualities",
    )
    group.add_argument(
        "--neurons", type=float, help="keep this share of them; default: the profile's"
    )
    group.add_argument(
        "--fp8-linears",
        action="store_true",
        help="of all blocks by torchao, weights and inputs, also those of the baseline",
    )
    group.add_argument("--whole", action="store_true", help="also run all steps, one by one")
    group.add_argument("--all-dense", action="store_true", help="also a patched all-dense plan")


def run(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds a record for each case and quality."""
    if not 0 < args.depth <= 1 or (args.whole and args.depth < 1):
        raise ValueError(f"--depth {args.depth:g}: above 0, at most 1, and 1 with --whole")
    models = {**MODELS, **FAMILIES}
    for name in args.case.split(",") if args.case else MODELS:
        with to.attempt(f"full_size, {name}"):
            if name not in models:
                raise ValueError(f"no model for the case {name!r}; there are {list(models)}")
            model = models[name]
            qualities = chosen(model, args)
            measured = Measured(
                model,
                qualities,
                args.depth,
                device,
                dtype,
                small=args.small,
                fp8_linears=args.fp8_linears,
            )
            to.add(*measured.records(whole=args.whole, all_dense=args.all_dense))
            # After the records are written: the times tell what went wrong.
            rounded = args.fp8_linears or args.precision == "fp8"
            limit = FP8_LIMIT if rounded else DENSE_LIMIT[dtype]
            require("relative error", measured.rel_error, limit, "the dense step")
            del measured
        gc.collect()  # the next model wants its memory
        if device.type == "cuda":
            torch.cuda.empty_cache()


def chosen(model: FullModel, args: Namespace) -> dict[str, SparsityConfig]:
    """What is measured of a model, by the name of its schedule.

    Raises:
        ValueError: a quality that it does not have, or nothing at all.
    """
    found = model.qualities()
    if args.schedules is not None:
        names = args.schedules.split(",") if args.schedules else []
        if unknown := [name for name in names if name not in found]:
            raise ValueError(f"--schedules {', '.join(unknown)}: there are {', '.join(found)}")
        found = {name: found[name] for name in names}
    if args.early:
        found |= model.early()
    if not found:
        raise ValueError("--schedules '': nothing to measure without --early")
    changes = {"attention.precision": args.precision}
    if args.neurons is not None:
        changes["mlp.density"] = args.neurons
    return {name: config.override(changes) for name, config in found.items()}


def of_steps(config: SparsityConfig) -> SparsityConfig:
    """What is measured for a config: one step of each action that it takes after the other."""
    schedule = Schedule(config.schedule, STEPS)
    sparse = any(schedule.action(step) is Action.SPARSE for step in range(STEPS))
    return replace(
        config,
        schedule=ScheduleConfig(
            actions=tuple(ACTIONS if sparse else NOTHING_SPARSE),
            first_dense_layers=config.schedule.first_dense_layers,
            forecast=float(config.schedule.forecast > 0),  # of any share, it takes as long
        ),
    )


def of_action(times: Sequence[float], action: ActionName) -> float:
    """The median time of the counted steps of an action, from those of all `ACTIONS`."""
    found = [time for time, taken in zip(times, ACTIONS, strict=True) if taken == action]
    return statistics.median(found[: RUNS[action]][-COUNTED:])


def actions_of(config: SparsityConfig, layout: ModelLayout) -> list[str]:
    """What every step of a generation does."""
    return [action.value for action in SparsityPlan(config, layout, STEPS).actions()]


def of_quality(found: dict[str, Any], counts: Mapping[str, int]) -> dict[str, Any]:
    """Of the steps of all actions, what is true of a quality that takes these: no more.

    Where nothing is sparse, no cache is held.
    """
    never = [action for action in OF_ACTIONS if not counts.get(action)]
    unknown = {name: None for action in never for name in OF_ACTIONS[action]}
    none = dict.fromkeys(CACHES, 0) if "sparse" in never else {}
    return found | unknown | none


def of_all_blocks(plan: SparsityPlan, share: float) -> SparsityPlan:
    """A plan of this share of a model's blocks, as it is of all of them."""
    kinds = tuple(replace(kind, layers=round(kind.layers / share)) for kind in plan.layout.kinds)
    return replace(plan, layout=replace(plan.layout, kinds=kinds))


def in_share(
    config: SparsityConfig, whole: MemoryPlan, *, share: float, taken: int
) -> SparsityConfig:
    """The config with budgets under which a share of the blocks has its caches where all have them.

    Args:
        config: of the measurement.
        whole: of all blocks, in the memory that there is.
        share: of the blocks that are measured.
        taken: bytes of the GPU that their weights and working memory take.
    """
    config = keeping_in_fp8(config, whole.in_fp8)
    placement, host = whole.placement, share * whole.host_bytes
    if placement.host and not placement.recomputed:  # what is cut into whole tensors needs room
        host += 2 * whole.branches * max(placement.host.values())
    caches = share * whole.branches * placement.device_bytes + placement.slot_bytes
    return config.override({"memory.vram": taken + int(caches), "memory.ram": int(host)})


def bytes_of(module: torch.nn.Module) -> int:
    """Of its parameters; of those in FP8, of their numbers and scales."""

    def own(parameter: Any) -> int:
        if not is_traceable_wrapper_subclass(parameter):
            return int(parameter.nbytes)
        names, _ = parameter.__tensor_flatten__()
        return sum(own(getattr(parameter, name)) for name in names)

    return sum(map(own, module.parameters()))


class Measured:
    """Runs one model, stock and patched.

    Args:
        model: which.
        qualities: what is measured of it, by the name of the schedule.
        depth: share of the blocks of each kind that are made and run.
        device: where it runs.
        dtype: of weights and latents.
        small: tiny, for a dry run.
        fp8_linears: round those of all blocks, before anything is run.
    """

    def __init__(
        self,
        model: FullModel,
        qualities: Mapping[str, SparsityConfig],
        depth: float,
        device: torch.device,
        dtype: torch.dtype,
        *,
        small: bool,
        fp8_linears: bool = False,
    ) -> None:
        self.model, self.qualities, self.device, self.dtype = model, qualities, device, dtype
        layers = model.layers_of(depth)
        self.transformer = model.make(layers, small, device, dtype)
        self._fp8_linears = fp8_linears
        if fp8_linears:
            to_fp8(self.transformer, model.blocks)
        self._blocks, self._share = sum(model.layers), sum(layers) / sum(model.layers)
        scale = SCALE if small else 1.0
        self._inputs = model.inputs(scale, self.transformer.config, STEPS, device, dtype)
        self.rel_error = 0.0
        self._outside: dict[str, float] = {}  # of a step, what its blocks do not take, by part

    def records(self, *, whole: bool, all_dense: bool) -> list[Record]:
        """The records of all qualities.

        Args:
            whole: run all steps of each instead of summing measured ones.
            all_dense: also measure a patched transformer with nothing sparse.
        """
        attention = "_native_cudnn" if self.device.type == "cuda" else "native"
        measured: dict[SparsityConfig, tuple[dict[str, Any], ModelLayout]] = {}
        with attention_backend(self.transformer, attention), torch.no_grad():
            stock = self._stock(whole)
            unchanged = self._all_dense(stock["ms"]) if all_dense else {}
            for config in self.qualities.values():
                steps_of = of_steps(config)
                if steps_of not in measured:
                    sparse = "sparse" in (steps_of.schedule.actions or ())
                    measured[steps_of] = (
                        self._patched(as_of_many(steps_of, self._plan(config), self.dtype))
                        if sparse
                        else self._skipping(steps_of)
                    )
            totals = self._whole_schedules() if whole else {}
        dtype = str(self.dtype).removeprefix("torch.")
        linears = "fp8" if self._fp8_linears else dtype
        records = []
        for name, config in self.qualities.items():
            steps, layout = measured[of_steps(config)]
            counts = Counter(actions_of(config, layout))
            steps = of_quality(steps, counts)
            summed = sum(count * steps[f"{action}_ms"] for action, count in counts.items())
            latency = totals.get(name, summed)
            step = self._of_all(stock["ms"])
            baseline = stock.get("whole_ms", STEPS * step)
            records.append(
                {
                    "op": "end_to_end",
                    "benchmark": "full_size",
                    "case": self.model.case,
                    "model": self.model.transformer_class,
                    "steps": STEPS,
                    "schedule": name,
                    "actions": dict(counts),
                    "config": asdict(config),
                    "branches": len(self.model.branches),
                    "tokens": layout.tokens,
                    "layers": self._blocks,
                    "measured_layers": layout.layers,
                    "dtype": dtype,
                    "precision": config.attention.precision,
                    "linears": linears,
                    "density": config.attention.density,
                    "mlp_density": config.mlp.density if config.mlp.enabled else 1.0,
                    "backend": "chipsparse",
                    "baseline": f"stock transformer, {attention.lstrip('_')} attention, no mask, "
                    f"compiled blocks, linears in {linears}",
                    "latency_ms": latency,
                    "baseline_ms": baseline,
                    "speedup": baseline / latency,
                    "measured": "all steps run" if totals else "summed from measured steps",
                    "summed_ms": summed,
                    "baseline_step_ms": step,
                    "outside_ms": self._outside.get("all"),
                    "step_speedup": step / steps["sparse_ms"] if counts["sparse"] else None,
                    "all_dense_ratio": unchanged.get("ratio"),
                    "all_dense": unchanged,
                    **steps,
                    **environment(self.device),
                }
            )
        return records

    def _call(self, step: int, branch: str, steps: int = len(ACTIONS) + 1) -> torch.Tensor:
        """One guidance branch of a step. One more than are run: caches are freed after the last."""
        return call(self.transformer, self._inputs, branch, step, steps)

    def _step(self, step: int, steps: int = len(ACTIONS) + 1) -> torch.Tensor:
        """All guidance branches of a step; the output of the first."""
        outputs = [self._call(step, branch, steps) for branch in self.model.branches]
        return outputs[0]

    def _warm_up(self, steps: Iterable[int], count: int = len(ACTIONS) + 1) -> None:
        """These steps of so many with the last blocks alone, which compile; then the first ones."""
        with last_blocks_only(self.model, self.transformer):
            for step in steps:
                self._step(step, count)
        for step in range(FIRST):
            self._step(step, count)

    def _timed(self, calls: Sequence[Callable[[], torch.Tensor]]) -> Any:
        times, outputs = run_timed(calls, self.device)
        for output in outputs:
            check_finite(output)
        return times, outputs

    def _stock(self, whole: bool) -> dict[str, Any]:
        """Time of a step with all branches; the outputs of the steps that are compared."""
        with (
            without_useless_masks(self.model, self.transformer),
            compiled_blocks(self.transformer) as graphs,
        ):
            with last_blocks_only(self.model, self.transformer):
                for step in range(2):
                    self._step(step)
            compared = [0, PROFILED - 1]
            times, outputs = self._timed([partial(self._step, step) for step in compared])
            self._expected = dict(zip(compared, outputs, strict=True))
            found = {"ms": statistics.median(times), **graphs}
            if self._share < 1:
                self._outside = self._outside_of_blocks()
            if whole:
                found["whole_ms"] = self._run_all(STEPS)
        return found

    def _outside_of_blocks(self) -> dict[str, float]:
        """Milliseconds that the kernels of a stock step take without any block, by part.

        What the host takes counts for nothing: beside blocks it passes while their kernels run.
        """
        with last_blocks_only(self.model, self.transformer, 0):
            self._step(0)
            found, _ = breakdown(lambda: self._call(0, self.model.branches[0]), self.device)
        parts = {part: len(self.model.branches) * found[part] for part in PARTS if part != "idle"}
        return {**parts, "all": sum(parts.values())}

    def _of_all(self, step_ms: float, part: str = "all", calls: int = 1) -> float:
        """Milliseconds of a step, or a part of one, of all blocks, from those of the ones made.

        What is outside of the blocks counts once. ``calls`` is how many calls of a step share it.
        """
        outside = self._outside.get(part, 0.0) / calls
        return outside + max(0.0, step_ms - outside) / self._share

    def _all_dense(self, stock_ms: float) -> dict[str, float]:
        """Times of a step where the patched transformer's plan has nothing sparse.

        The stock transformer runs once more afterwards: a GPU that has become warm is slower.
        """
        with self._enabled(SparsityConfig.dense()):
            patched_ms = self._dense_calls()
        with without_useless_masks(self.model, self.transformer):
            again_ms = self._dense_calls()
        mean = (stock_ms + again_ms) / 2
        return {"ms": patched_ms, "stock_again_ms": again_ms, "ratio": patched_ms / mean}

    def _dense_calls(self) -> float:
        """Median time of a step that is dense, compiled anew."""
        with compiled_blocks(self.transformer):
            self._warm_up(range(2))
            times, _ = self._timed([partial(self._step, step) for step in range(FIRST, 5)])
        return statistics.median(times)

    def _enabled(self, config: SparsityConfig) -> Any:
        return chipsparse.enable(self.model.pipe(self.transformer), config)

    def _skipping(self, config: SparsityConfig) -> tuple[dict[str, Any], ModelLayout]:
        """Times of dense and skipped steps where no other is taken; and the layout."""
        count = len(NOTHING_SPARSE) + 1  # what is held is freed after the last
        with self._enabled(config) as handle, compiled_blocks(self.transformer) as graphs:
            self._warm_up([0], count)
            calls = [partial(self._step, step, count) for step in range(count - 1)]
            times, outputs = self._timed(calls)
            layout = handle._adapters[0].session.plan.layout
            backends, fallbacks = dict(handle.report.backends), list(handle.report.fallbacks)
        rel_error = relative_error(outputs[0], self._expected[0])
        self.rel_error = max(rel_error, self.rel_error)
        dense, skip = times[: RUNS["dense"]], times[RUNS["dense"] :]
        found = {
            "dense_ms": self._of_all(statistics.median(dense[-COUNTED:])),
            "skip_ms": statistics.median(skip[-COUNTED:]),
            "rel_error": rel_error,
            "backends": backends,
            "fallbacks": fallbacks,
        }
        return found | graphs, layout

    def _plan(self, quality: SparsityConfig) -> SparsityPlan:
        """The plan of a whole generation with a config, of what is measured of the model."""
        with self._enabled(quality) as handle, last_blocks_only(self.model, self.transformer):
            self._step(0, STEPS)
            plan: SparsityPlan = handle._adapters[0].session.plan
        return plan

    def _patched(self, config: SparsityConfig) -> tuple[dict[str, Any], ModelLayout]:
        """Times of the four actions, errors, memory, parts of a sparse step; and the layout."""
        first_dense = config.schedule.first_dense_layers
        if self._share < 1:  # one of a few layers is more than one of all: it is added in the end
            config = self._in_less_memory(config.override({"schedule.first_dense_layers": 0}))
        cuda = self.device.type == "cuda"
        with self._enabled(config) as handle, compiled_blocks(self.transformer) as graphs:
            # Compiles, tunes, picks dense kernels, takes host memory.
            self._warm_up([ACTIONS.index(action) for action in ("dense", "refresh", "sparse")])
            if cuda:
                torch.cuda.reset_peak_memory_stats(self.device)
            times, outputs = self._timed([partial(self._step, step) for step in range(PROFILED)])
            handle.report.layer_times = True  # so that kernels are launched one by one, by layers
            parts, kernels = breakdown(
                lambda: self._call(PROFILED, self.model.branches[0]), self.device
            )
            handle.report.layer_times = False
            for branch in self.model.branches[1:]:
                self._call(PROFILED, branch)
            skips = [partial(self._step, step) for step in range(PROFILED + 1, len(ACTIONS))]
            times += [math.nan, *self._timed(skips)[0]]  # the profiled step has no time
            taken = {action: of_action(times, action) for action in RUNS}
            # A profiled call waits for the host; what it idles for is known of the others.
            parts["all"] = taken["sparse"] / len(self.model.branches)
            parts["idle"] = max(0.0, parts["all"] - sum(parts[p] for p in PARTS if p != "idle"))
            report = handle.report
            adapter = handle._adapters[0]
            layout = adapter.session.plan.layout
            memory = adapter.session._pool.host
            kept = next(step for step in report.steps if step.action is Action.SPARSE)
            refreshed, expected = ACTIONS.index("sparse") - 1, self._expected[PROFILED - 1]
            rel_error = relative_error(outputs[0], self._expected[0])
            self.rel_error = max(rel_error, self.rel_error)
            found = {
                **{f"{action}_ms": time for action, time in taken.items()},
                "sparse_step_ms": times[ACTIONS.index("sparse") : PROFILED],
                "attention_kept": kept.attention_kept,
                "mlp_kept": kept.mlp_kept,
                "rel_error": rel_error,
                "sparse_error": relative_error(outputs[-1], expected),
                # What reusing the refresh's output would have cost on the same step.
                "reused_error": relative_error(outputs[refreshed], expected),
                "breakdown_ms": parts,
                "longest_kernels": kernels,
                "backends": dict(report.backends),
                "fallbacks": list(report.fallbacks),
                "cache_bytes": report.cache_bytes,
                "host_bytes": report.host_bytes,
                "pinned_bytes": memory.pinned_bytes,
                "peak_gpu_bytes": torch.cuda.max_memory_allocated(self.device) if cuda else None,
            }
        if self._share < 1:
            found |= self._of_all_blocks(found, first_dense / self._blocks)
        return found | graphs, layout

    def _in_less_memory(self, config: SparsityConfig) -> SparsityConfig:
        """The config with budgets under which caches live where they would with all blocks.

        A few blocks need as much working memory as all of them, and as large slots for what comes
        from host memory, but their share of the weights and caches.
        """
        if self.device.type != "cuda":
            return config
        plan = self._plan(config)
        free, _ = torch.cuda.mem_get_info(self.device)
        room = free + torch.cuda.memory_reserved(self.device)
        room -= round(room * reserve_share())
        in_blocks = sum(bytes_of(getattr(self.transformer, name)) for name in self.model.blocks)
        weights = bytes_of(self.transformer) - in_blocks + round(in_blocks / self._share)
        working = working_bytes(plan, dtype=self.dtype)
        free_host = host_free_bytes()
        host = UNLIMITED if free_host is None else host_budget(free_host)
        demand = MemoryDemand(self.dtype, len(self.model.branches), captures=False)
        whole = plan_memory(
            of_all_blocks(plan, self._share), Capacity(room - weights - working, host), demand
        )
        taken = torch.cuda.memory_allocated(self.device) + working
        return in_share(config, whole, share=self._share, taken=taken)

    def _of_all_blocks(self, found: dict[str, Any], dense_share: float) -> dict[str, Any]:
        """Times of a step of all blocks, this share of which is always dense, and their caches.

        What a part of the blocks takes of the GPU at most says nothing of all of them.
        """
        dense = found["dense_ms"]
        times = {"dense_ms": dense}
        for name in ("refresh_ms", "sparse_ms"):
            times[name] = dense_share * dense + (1 - dense_share) * found[name]
        scaled: dict[str, Any] = {name: self._of_all(time) for name, time in times.items()}
        for name in CACHES:
            scaled[name] = round((1 - dense_share) * found[name] / self._share)
        scaled["peak_gpu_bytes"] = None
        calls = len(self.model.branches)  # of which one was looked at
        parts = found["breakdown_ms"]
        of_all = {part: self._of_all(ms, part, calls) for part, ms in parts.items()}
        return scaled | {"breakdown_ms": of_all}

    def _whole_schedules(self) -> dict[str, float]:
        """Milliseconds of all steps of each quality, really run."""
        found = {}
        for name, config in self.qualities.items():
            with self._enabled(config), compiled_blocks(self.transformer):
                with last_blocks_only(self.model, self.transformer):
                    self._run_all(STEPS)  # compiles whatever its steps need
                self._run_all(STEPS)  # the first generation takes the memory for its caches
                found[name] = self._run_all(STEPS)
        return found

    def _run_all(self, steps: int) -> float:
        times, _ = self._timed([lambda: self._all_steps(steps)])
        return float(times[0])

    def _all_steps(self, steps: int) -> torch.Tensor:
        for step in range(steps):
            output = self._step(step, steps)
        return output

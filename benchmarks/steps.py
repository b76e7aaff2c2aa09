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
"""

from __future__ import annotations

import gc
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
from benchmarks.fp8_linears import to_fp8
from benchmarks.kernel_checks import check_finite, relative_error, require
from benchmarks.models import (
    FAMILIES,
    MODELS,
    STEPS,
    FullModel,
    call,
    last_blocks_only,
    without_useless_masks,
)
from benchmarks.records import Record, Run, environment
from benchmarks.step_timing import (
    DENSE_LIMIT,
    PARTS,
    attention_backend,
    breakdown,
    compiled_blocks,
    run_timed,
)
from chipsparse import ScheduleConfig, SparsityConfig
from chipsparse.cache.kinds import with_caches
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
    **dict.fromkeys(("case", "schedule"), ""),
    **{"latency_ms": ".0f", "baseline_ms": ".0f", "speedup": ".2f"},
    **{"dense_ms": ".1f", "refresh_ms": ".1f", "sparse_ms": ".1f", "skip_ms": ".2f"},
    **{"rel_error": ".1e", "sparse_error": ".1e", "graphs": "d", "graph_breaks": "d"},
    **{"peak_gpu_bytes": ".3e", "pinned_bytes": ".3e"},
}
OFFLOAD_COLUMNS = {
    **{"case": "", "mlp": "", "layers": "d", "latency_ms": ".2f", "baseline_ms": ".2f"},
    **{"slowdown": ".4f", "host_bytes": ".4e", "bytes_to_device": ".3e", "identical": ""},
}
CACHES = ("cache_bytes", "host_bytes", "pinned_bytes")
# Largest relative error of a dense step that is rounded to 8 bits: attention by about one in a
# hundred a layer, where it is; inputs of linears by a whole level where they differ by little.
FP8_LIMIT = 0.1
# The last COUNTED steps of each action tell its time: the first of all makes room for caches, the
# second sparse one is recorded as a graph where that pays. One more sparse step is profiled.
RUNS: dict[ActionName, int] = {"dense": 3, "refresh": 2, "sparse": 4, "skip": 2}
COUNTED = 2
ACTIONS: list[ActionName] = [action for action, runs in RUNS.items() for _ in range(runs)]
NOTHING_SPARSE = [action for action in ACTIONS if action in ("dense", "skip")]
REFRESH, SPARSE = (len(ACTIONS) - 3 - back for back in (RUNS["sparse"], 0))  # the last of each
OFFLOADED: list[Any] = ["dense", "refresh", *["sparse"] * 6]
# The first steps in full look at every module and write down what the model holds, once.
FIRST = 2


def add_arguments(parser: ArgumentParser) -> None:
    """Options of both commands."""
    models = f"{', '.join(MODELS)}; by name alone: {', '.join(FAMILIES)}"
    parser.add_argument("--case", help=f"comma-separated, default all of the first: {models}")
    parser.add_argument(
        "--depth",
        type=float,
        default=1.0,
        help="measure this share of the blocks of each kind, in the same share of the memory, and "
        "scale their times and caches",
    )
    extra = "or dense, or sparse: published with 44 of 50 steps sparse"
    parser.add_argument("--schedules", help=f"comma-separated, default all qualities; {extra}")
    precision = "of full attention at the dense steps and refreshes of all qualities"
    parser.add_argument("--precision", choices=get_args(Precision), default="auto", help=precision)
    linears = "of all blocks by torchao, weights and inputs, also those of the baseline"
    parser.add_argument("--fp8-linears", action="store_true", help=linears)
    parser.add_argument("--mlp", action="store_true", help="offload: sparse feed-forward, too")


def run(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds a record for each case and quality."""

    def measure(model: FullModel) -> None:
        measured = Measured(model, args, device, dtype)
        to.add(*measured.records(chosen(model, args)))
        # After the records are written: the times tell what went wrong.
        rounded = args.fp8_linears or args.precision == "fp8"
        limit = FP8_LIMIT if rounded else DENSE_LIMIT[dtype]
        require("relative error", measured.rel_error, limit, "the dense step")

    _each_case(args, MODELS, to, measure)


def run_offload(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds a record for each case."""

    def measure(model: FullModel) -> None:
        to.add(record := Measured(model, args, device, dtype).offload(args.mlp))
        if not record["identical"]:
            raise ValueError("the outputs differ from those with all caches on the device")

    _each_case(args, ("hunyuan_720p", "wan1b_480p"), to, measure)


def _each_case(
    args: Namespace, usual: Iterable[str], to: Run, measure: Callable[[FullModel], None]
) -> None:
    if not 0 < args.depth <= 1:
        raise ValueError(f"--depth {args.depth:g}: above 0 and at most 1")
    models = MODELS | FAMILIES
    for name in args.case.split(",") if args.case else usual:
        with to.attempt(name):
            if name not in models:
                raise ValueError(f"no model for the case {name!r}; there are {list(models)}")
            measure(models[name])
        gc.collect()  # the next model wants its memory
        torch.cuda.empty_cache()


def chosen(model: FullModel, args: Namespace) -> dict[str, SparsityConfig]:
    """What is measured of a model, by the name of its schedule.

    Raises:
        ValueError: a quality that it does not have.
    """
    qualities = model.qualities()
    known = {"dense": SparsityConfig.dense(), "sparse": model.nearly_all_sparse(), **qualities}
    names = args.schedules.split(",") if args.schedules else [*qualities]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--schedules {', '.join(unknown)}: there are {', '.join(known)}")
    changes = {"attention.precision": args.precision}
    return {name: known[name].override(changes) for name in names}


def of_steps(config: SparsityConfig) -> SparsityConfig:
    """What is measured for a config: steps of each action that it takes, one behind the other."""
    schedule = Schedule(config.schedule, STEPS)
    sparse = any(schedule.action(step) is Action.SPARSE for step in range(STEPS))
    return replace(
        config,
        schedule=ScheduleConfig(
            actions=tuple([*ACTIONS, "sparse"] if sparse else NOTHING_SPARSE),
            first_dense_layers=config.schedule.first_dense_layers,
            forecast=float(config.schedule.forecast > 0),  # of any share, it takes as long
        ),
    )


def actions_of(config: SparsityConfig, layout: ModelLayout) -> list[str]:
    """What every step of a generation does."""
    return [action.value for action in SparsityPlan(config, layout, STEPS).actions()]


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
    config = with_caches(config, in_fp8=whole.in_fp8)
    placement, host = whole.placement, share * whole.host_bytes
    if placement.host and not placement.recomputed:  # caches move as a whole
        host += 2 * whole.branches * max(sum(kinds.values()) for kinds in placement.host.values())
    caches = share * whole.branches * placement.device_bytes + placement.slot_bytes
    return config.override({"memory.vram": taken + int(caches), "memory.ram": int(host)})


def bytes_of(module: torch.nn.Module) -> int:
    """The bytes of a module's parameters; of those in FP8, of their numbers and scales."""

    def own(parameter: Any) -> int:
        if not is_traceable_wrapper_subclass(parameter):
            return int(parameter.nbytes)
        names, _ = parameter.__tensor_flatten__()
        return sum(own(getattr(parameter, name)) for name in names)

    return sum(map(own, module.parameters()))


class Measured:
    """One model, run stock and patched."""

    def __init__(
        self, model: FullModel, args: Namespace, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        layers = model.layers_of(args.depth)
        self.transformer = model.make(layers, args.tiny, device, dtype)
        self._linears = "fp8" if args.fp8_linears else str(dtype).removeprefix("torch.")
        if args.fp8_linears:
            to_fp8(self.transformer, model.blocks)
        self._blocks, self._share = sum(model.layers), sum(layers) / sum(model.layers)
        self._inputs = model.step(self.transformer, args.tiny)
        self._backend = "_native_cudnn" if device.type == "cuda" else "native"
        self.rel_error = 0.0
        self._outside: dict[str, float] = {}  # of a step, what its blocks do not take, by part

    def records(self, qualities: Mapping[str, SparsityConfig]) -> list[Record]:
        """The records of all qualities."""
        measured: dict[SparsityConfig, tuple[dict[str, Any], ModelLayout]] = {}
        with attention_backend(self.transformer, self._backend), torch.no_grad():
            step = self._of_all(self._stock())
            for config in qualities.values():
                steps_of = of_steps(config)
                if steps_of not in measured:
                    measured[steps_of] = self._patched(steps_of, config)
        records = []
        for name, config in qualities.items():
            facts, layout = measured[of_steps(config)]
            counts = Counter(actions_of(config, layout))
            latency = sum(count * facts[f"{action}_ms"] for action, count in counts.items())
            times = {f"{a}_ms": facts[f"{a}_ms"] if counts[a] else None for a in RUNS}
            sparse_ms, backend = times["sparse_ms"], self._backend.lstrip("_")
            records.append(
                {
                    "op": "end_to_end",
                    "benchmark": "full_size",
                    **self._facts(layout),
                    "model": self.model.transformer_class,
                    "steps": STEPS,
                    "schedule": name,
                    "actions": dict(counts),
                    "config": asdict(config),
                    "precision": config.attention.precision,
                    "linears": self._linears,
                    "density": config.attention.density,
                    "mlp_density": config.mlp.density if config.mlp.is_sparse else 1.0,
                    "baseline": f"stock transformer, {backend} attention, no mask, compiled "
                    f"blocks, linears in {self._linears}",
                    "latency_ms": latency,
                    "baseline_ms": STEPS * step,
                    "speedup": STEPS * step / latency,
                    "measured": "summed from measured steps",
                    "baseline_step_ms": step,
                    "outside_ms": self._outside.get("all"),
                    "step_speedup": step / sparse_ms if sparse_ms else None,
                    **facts,
                    **times,
                    **environment(self.device),
                }
            )
        return records

    def _facts(self, layout: ModelLayout) -> Record:
        return {
            "case": self.model.case,
            "branches": len(self.model.branches),
            "tokens": layout.tokens,
            "layers": self._blocks,
            "measured_layers": layout.layers,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def _step(self, step: int, steps: int) -> torch.Tensor:
        """All guidance branches of a step; the output of the last, which all processes have."""
        for branch in self.model.branches:
            output = call(self.transformer, self._inputs, branch, step, steps)
        return output

    def _warm_up(self, steps: Iterable[int], count: int) -> None:
        """These steps of so many with the last blocks alone, which compile; then the first ones."""
        with last_blocks_only(self.model, self.transformer):
            for step in steps:
                self._step(step, count)
        for step in range(FIRST):
            self._step(step, count)

    def _timed(self, steps: Iterable[int], count: int) -> tuple[list[float], list[torch.Tensor]]:
        calls = [partial(self._step, step, count) for step in steps]
        times, outputs = run_timed(calls, self.device)
        for output in outputs:
            check_finite(output)
        return times, outputs

    def _stock(self) -> float:
        """Time of a step with all branches; keeps the outputs of the steps that are compared."""
        compared = [0, SPARSE]
        with (
            without_useless_masks(self.model, self.transformer),
            compiled_blocks(self.transformer),
        ):
            self._warm_up(range(2), STEPS)
            times, outputs = self._timed(compared, STEPS)
            self._expected = dict(zip(compared, outputs, strict=True))
            if self._share < 1:
                with last_blocks_only(self.model, self.transformer, 0):
                    self._step(0, STEPS)
                    parts = breakdown(partial(self._branch, 0, STEPS), self.device)
                # Kernels alone: beside blocks the host passes while theirs run.
                calls = len(self.model.branches)
                self._outside = {part: calls * parts[part] for part in PARTS if part != "idle"}
                self._outside["all"] = sum(self._outside.values())
        return statistics.median(times)

    def _branch(self, step: int, steps: int) -> torch.Tensor:
        return call(self.transformer, self._inputs, self.model.branches[0], step, steps)

    def _of_all(self, step_ms: float, part: str = "all", calls: int = 1) -> float:
        """Milliseconds of a step, or a part of one, of all blocks, from those of the ones made.

        What is outside of the blocks counts once. ``calls`` is how many calls of a step share it.
        """
        outside = self._outside.get(part, 0.0) / calls
        return outside + max(0.0, step_ms - outside) / self._share

    def _enabled(self, config: SparsityConfig) -> Any:
        return chipsparse.enable(self.model.pipe(self.transformer), config)

    def _plan(self, quality: SparsityConfig) -> SparsityPlan:
        """The plan of a whole generation with a config, of what is measured of the model."""
        with self._enabled(quality) as handle, last_blocks_only(self.model, self.transformer):
            self._step(0, STEPS)
            plan: SparsityPlan = handle._adapters[0].session.plan
        return plan

    def _patched(
        self, config: SparsityConfig, quality: SparsityConfig
    ) -> tuple[dict[str, Any], ModelLayout]:
        """Times of the actions, errors, memory, parts of a sparse step; and the layout.

        Args:
            config: of the measured steps.
            quality: of a generation with them.
        """
        actions, first_dense = config.schedule.actions or (), config.schedule.first_dense_layers
        sparse = "sparse" in actions
        if sparse:
            config = as_of_many(config, self._plan(quality), self.dtype)
            if self._share < 1:  # one of a few layers is more than one of all: it is added later
                config = config.override({"schedule.first_dense_layers": 0})
                config = self._in_less_memory(config)
        timed = len(ACTIONS) if sparse else len(actions)
        facts, times, outputs, layout = self._run(config, actions, timed)
        for action in dict.fromkeys(actions[:timed]):
            of_it = [time for time, a in zip(times, actions, strict=False) if a == action]
            facts[f"{action}_ms"] = statistics.median(of_it[-COUNTED:])
        facts["rel_error"] = relative_error(outputs[0], self._expected[0])
        self.rel_error = max(facts["rel_error"], self.rel_error)
        if not sparse:
            return {**facts, "dense_ms": self._of_all(facts["dense_ms"])}, layout
        expected = self._expected[SPARSE]
        facts["sparse_step_ms"] = times[REFRESH + 1 : SPARSE + 1]
        facts["sparse_error"] = relative_error(outputs[SPARSE], expected)
        # A profiled call waits for the host; what it idles for is known of the others.
        parts = facts["breakdown_ms"]
        parts["all"] = facts["sparse_ms"] / len(self.model.branches)
        parts["idle"] = max(0.0, parts["all"] - sum(parts[p] for p in PARTS if p != "idle"))
        if self._share < 1:
            facts |= self._of_all_blocks(facts, first_dense / self._blocks)
        return facts, layout

    def _run(
        self, config: SparsityConfig, actions: Sequence[str], timed: int
    ) -> tuple[dict[str, Any], list[float], list[torch.Tensor], ModelLayout]:
        """Runs steps of a patched transformer, so many of them timed; one behind is profiled.

        Returns:
            What the report says, times and outputs of the timed steps, and the layout.
        """
        cuda, count = self.device.type == "cuda", len(actions) + 1  # caches are freed at the last
        facts: dict[str, Any] = {}
        with self._enabled(config) as handle, compiled_blocks(self.transformer) as graphs:
            # Compiles, tunes, picks dense kernels, takes host memory.
            self._warm_up([actions.index(a) for a in dict.fromkeys(actions) if a != "skip"], count)
            if cuda:
                torch.cuda.reset_peak_memory_stats(self.device)
            times, outputs = self._timed(range(timed), count)
            report, session = handle.report, handle._adapters[0].session
            kept = [step for step in report.steps if step.action is Action.SPARSE]
            if kept:
                facts = {name: getattr(kept[0], name) for name in ("attention_kept", "mlp_kept")}
                of_step = kept[-len(self.model.branches) :]
                for name in ("bytes_to_device", "bytes_to_host"):
                    facts[name] = sum(getattr(step, name) for step in of_step)
            if timed < len(actions):
                report.layer_times = True  # so that kernels are launched one by one, by layers
                profiled = partial(self._branch, timed, count)
                facts["breakdown_ms"] = breakdown(profiled, self.device)
                report.layer_times = False
            facts |= {
                "backends": dict(report.backends),
                "fallbacks": list(report.fallbacks),
                "cache_bytes": report.cache_bytes if kept else 0,
                "host_bytes": report.host_bytes if kept else 0,
                "pinned_bytes": session._pool.host.pinned_bytes if kept else 0,
                "peak_gpu_bytes": torch.cuda.max_memory_allocated(self.device) if cuda else None,
            }
            layout = session.plan.layout
        return facts | graphs, times, outputs, layout

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
        capacity = Capacity(room - weights - working, host)
        whole = plan_memory(of_all_blocks(plan, self._share), capacity, demand)
        taken = torch.cuda.memory_allocated(self.device) + working
        return in_share(config, whole, share=self._share, taken=taken)

    def _of_all_blocks(self, facts: dict[str, Any], dense_share: float) -> dict[str, Any]:
        """Times of a step of all blocks, this share of which is always dense, and their caches.

        What a part of the blocks takes of the GPU at most says nothing of all of them.
        """
        dense = facts["dense_ms"]
        scaled: dict[str, Any] = {"dense_ms": self._of_all(dense), "peak_gpu_bytes": None}
        for name in ("refresh_ms", "sparse_ms"):
            scaled[name] = self._of_all(dense_share * dense + (1 - dense_share) * facts[name])
        for name in CACHES:
            scaled[name] = round((1 - dense_share) * facts[name] / self._share)
        calls = len(self.model.branches)  # of which one was looked at
        parts = facts["breakdown_ms"]
        return scaled | {
            "breakdown_ms": {part: self._of_all(ms, part, calls) for part, ms in parts.items()}
        }

    def offload(self, sparse_mlp: bool) -> Record:
        """The record of sparse steps with all caches in host memory."""
        changes = {} if sparse_mlp else {"mlp.density": "dense"}
        config = self.model.nearly_all_sparse().override(changes)
        config = replace(config, schedule=ScheduleConfig(actions=tuple(OFFLOADED)))
        first = OFFLOADED.index("sparse") + 1  # the first of them warms up
        with attention_backend(self.transformer, self._backend), torch.no_grad():
            resident, hosted = (
                self._run(config.override({"memory.offload": where}), OFFLOADED, len(OFFLOADED))
                for where in ("never", "always")
            )
        baseline, step = (statistics.median(times[first:]) for _, times, _, _ in (resident, hosted))
        pairs = zip(resident[2], hosted[2], strict=True)
        facts = {f"baseline_{name}": resident[0][name] for name in ("peak_gpu_bytes", *CACHES)}
        return {
            "op": "offload",
            **self._facts(resident[3]),
            "layers": resident[3].layers,
            "density": config.attention.density,
            "mlp": "sparse" if sparse_mlp else "dense",
            "backend": "host memory",
            "baseline": "all caches on the device",
            "latency_ms": step,
            "baseline_ms": baseline,
            "slowdown": step / baseline,
            **facts,
            **hosted[0],
            "identical": all(torch.equal(*pair) for pair in pairs),
            **environment(self.device),
        }

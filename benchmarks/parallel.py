"""``torchrun --nproc-per-node 4 -m benchmarks parallel``: steps on several GPUs against one.

With ``--tiny`` on CPUs, over gloo. The first process runs all actions alone, then all run them
together: the same weights, latents and config, blocks compiled in both. Each time is that of the
slowest process. Generations are summed from the steps.

Of each action the record says which share of the time is exchange that nothing hides: the time that
the stream on which layers compute spends with packing, with waiting (for slower processes, too) and
with unpacking, between CUDA events around each; the largest share of all processes.
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
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import chipsparse
from benchmarks.kernel_checks import check_finite, relative_error
from benchmarks.models import MODELS, STEPS, without_useless_masks
from benchmarks.records import Run, environment
from benchmarks.step_timing import (
    attention_backend,
    compiled_blocks,
    mark,
    milliseconds,
    run_timed,
)
from benchmarks.steps import Measured, actions_of
from chipsparse import Parallel, SparsityConfig
from chipsparse.config import ActionName
from chipsparse.layout import ModelLayout
from chipsparse.parallel.head_exchange import PARTS

WAIT = timedelta(minutes=20)  # of the others, while the first process runs alone
# Ten steps; those up to the first sparse one run once before, and compile.
ACTIONS: list[ActionName] = [
    *("dense", "refresh", "sparse", "sparse", "sparse"),
    *("skip", "refresh", "sparse", "sparse", "sparse"),
]
FIRST_SPARSE, LAST = ACTIONS.index("sparse"), len(ACTIONS) - 1


def add_arguments(parser: ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument("--case", choices=sorted(MODELS), required=True)
    parser.add_argument("--guidance", type=int, nargs="+", default=[1], choices=(1, 2))
    parser.add_argument("--depth", type=float, default=1.0, help="share of the blocks")
    parser.add_argument("--skip-alone", action="store_true", help="where one GPU cannot hold it")
    stock = "also the stock full step under diffusers' own context parallelism"
    parser.add_argument("--stock", action="store_true", help=stock)
    parser.set_defaults(fp8_linears=False)


def run(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Measures one case; the first process keeps the record."""
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=WAIT)
    try:
        with torch.no_grad():
            record = _Shared(args, device, dtype).record()
        if dist.get_rank() == 0:
            to.add(record)
            print(json.dumps(record, indent=1))
    finally:
        dist.destroy_process_group()


class _Shared(Measured):
    """A transformer that this process runs alone or with others."""

    def __init__(self, args: Namespace, device: torch.device, dtype: torch.dtype) -> None:
        self._args = args
        self._ranks, model = dist.get_world_size(), MODELS[args.case]
        if args.tiny:
            model = replace(model, tiny={**model.tiny, "num_attention_heads": 2 * self._ranks})
        super().__init__(model, args, device, dtype)
        # Nothing of faithful is sparse: it consists of the same full and skipped steps.
        config, faithful = model.nearly_all_sparse(), model.qualities()["faithful"]
        self._generations = {"sparse": config, "faithful": faithful}
        self._config = config.override({"schedule.actions": tuple(ACTIONS)})
        if args.tiny:  # few tokens make few blocks
            small = {"block_size": 16}
            self._config = self._config.override(small)

    def record(self) -> dict[str, Any]:
        """All of it, measured by all processes."""
        args, model = self._args, self.model
        alone = self._measure(None) if dist.get_rank() == 0 and not args.skip_alone else None
        dist.barrier()
        together = []
        for guidance in args.guidance:
            parallel = Parallel(ulysses=self._ranks // guidance, guidance=guidance)
            own = self._measure(parallel)
            shared = _of_all_ranks(own) | {"same_again": own["same_again"]}
            against = self._against(alone, own, shared["ms"])
            together.append({**asdict(parallel), "parts": PARTS, **shared, **against})
        return {
            "op": "parallel_steps",
            "case": model.case,
            "ranks": self._ranks,
            "blocks": sum(model.layers),
            "measured_blocks": sum(model.layers_of(args.depth)),
            "dtype": str(self.dtype).removeprefix("torch."),
            "density": self._config.attention.density,
            "alone": {name: alone[name] for name in ("ms", "peak_gpu_bytes")} if alone else None,
            "together": together,
            "stock_ms": self._stock() if args.stock else None,
            **environment(self.device),
        }

    def _measure(self, parallel: Parallel | None) -> dict[str, Any]:
        """Times of the actions in a second generation, and the output of its last sparse step."""
        spans: list[tuple[int, Any, Any]] = []  # of exchanges on the stream of the layers
        current, device, transformer = [0], self.device, self.transformer

        def step(number: int) -> torch.Tensor:
            current[0] = number
            return self._step(number, len(ACTIONS) + 1)  # caches are freed behind the last

        @contextlib.contextmanager
        def watched() -> Iterator[None]:
            start = mark(device)
            yield
            spans.append((current[0], start, mark(device)))

        calls = [partial(step, number) for number in range(len(ACTIONS))]
        pipe = self.model.pipe(transformer)
        with (
            chipsparse.enable(pipe, self._config, parallel=parallel) as handle,
            compiled_blocks(transformer),
        ):
            if (split := transformer.chipsparse_adapter.split) is not None:
                split.exchange.watch = watched
            _, first = run_timed(calls[: FIRST_SPARSE + 1], device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            spans.clear()
            times, outputs = run_timed(calls, device)
            plan: Any = handle._adapters[0].session.plan
        exposed = [0.0] * len(calls)
        for number, start, end in spans:
            exposed[number] += milliseconds(start, end)
        gc.collect()  # the next one plans with what is free
        torch.cuda.empty_cache()
        check_finite(outputs[LAST])
        ms, unhidden = (
            {"all": math.fsum(steps), **{action: _median(steps, action) for action in ACTIONS}}
            for steps in (times, exposed)
        )
        cuda = device.type == "cuda"
        return {
            "ms": ms,
            "exposed_share": {name: unhidden[name] / ms[name] for name in ms if ms[name]},
            "output": outputs[LAST],
            "layout": plan.layout,
            "same_again": torch.equal(outputs[FIRST_SPARSE], first[-1]),
            "peak_gpu_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
        }

    def _against(
        self, alone: dict[str, Any] | None, own: dict[str, Any], ms: dict[str, float]
    ) -> dict[str, Any]:
        """How much faster than alone, and how far the output of the last sparse step is.

        Args:
            alone: measured on one GPU, if it was.
            own: measured by this process on all of them.
            ms: times of the slowest process.
        """
        layout, configs = own["layout"], self._generations.items()
        together = {name: generation(config, ms, layout) for name, config in configs}
        if alone is None:
            return {"generation_ms": together}
        one = {name: generation(config, alone["ms"], layout) for name, config in configs}
        return {
            "generation_ms": together,
            "speedup": {name: alone["ms"][name] / ms[name] for name in ms},
            "generation_speedup": {name: one[name] / together[name] for name in together},
            "rel_l2": relative_error(own["output"], alone["output"]),
        }

    def _stock(self) -> float:
        """Milliseconds of a full stock step, shared as diffusers does it; the slowest process's.

        The first block is not compiled: diffusers' hook on it cannot be.
        """
        from diffusers import ContextParallelConfig

        transformer, device = self.transformer, self.device
        torch._dynamo.reset()
        for name in self.model.blocks:
            for block in getattr(transformer, name)[1:]:
                block.compile()
        with (
            attention_backend(transformer, self._backend),
            without_useless_masks(self.model, transformer),
        ):
            # diffusers divides by the number of accelerators, and there may be none.
            counted = torch.accelerator.device_count() or self._ranks
            with mock.patch.object(torch.accelerator, "device_count", return_value=counted):
                config = ContextParallelConfig(ulysses_degree=self._ranks)
                transformer.enable_parallelism(config=config)
            calls = [partial(self._step, number, STEPS) for number in range(3)]
            times, outputs = run_timed(calls, device)
        check_finite(outputs[-1])
        return float(max(_of_each_rank(statistics.median(times[1:]))))


def _median(times: list[float], action: ActionName) -> float:
    return statistics.median(t for t, taken in zip(times, ACTIONS, strict=True) if taken == action)


def generation(config: SparsityConfig, ms: dict[str, float], layout: ModelLayout) -> float:
    """Milliseconds of all steps."""
    counts = Counter(actions_of(config, layout))
    return math.fsum(count * ms[action] for action, count in counts.items())


def _of_all_ranks(own: dict[str, Any]) -> dict[str, Any]:
    """Longest times and largest shares of exchange of all processes, and what each has of these."""
    every = {key: _of_each_rank(own[key]) for key in ("ms", "exposed_share", "peak_gpu_bytes")}
    largest = {
        key: {name: max(each[name] for each in every[key]) for name in own[key]}
        for key in ("ms", "exposed_share")
    }
    shares, peaks = every["exposed_share"], every["peak_gpu_bytes"]
    return {**largest, "exposed_shares": shares, "peak_gpu_bytes": peaks}


def _of_each_rank(own: Any) -> list[Any]:
    """What every process has, in their order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, own)
    return values

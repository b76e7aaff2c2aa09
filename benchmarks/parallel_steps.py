"""Steps of full-size transformers on several GPUs, against one GPU of the same machine.

``torchrun --nproc-per-node 4 -m benchmarks.parallel_steps --case hunyuan_720p --json record.json``;
with ``--small`` on CPUs, over gloo. The first process runs all actions alone, then all run them
together: the same weights, latents and config, blocks compiled in both. Each time is that of the
slowest process. Generations of `STEPS` are summed from the steps.

Of each action it says which share of the time is exchange that nothing hides: the time that the
stream on which layers compute spends with packing, with waiting (for slower processes, too) and
with unpacking, between CUDA events around each; the largest share of all processes.

With ``--stock`` also the stock transformer's full step under diffusers' own context parallelism.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import chipsparse
from benchmarks.full_models import MODELS, STEPS, FullModel, Step, call, without_useless_masks
from benchmarks.full_size import SCALE, actions_of
from benchmarks.records import environment
from benchmarks.sampled_checks import check_finite
from benchmarks.transformer_step import (
    attention_backend,
    compiled_blocks,
    mark,
    milliseconds,
    run_timed,
)
from chipsparse import Parallel, ScheduleConfig, SparsityConfig
from chipsparse.config import ActionName
from chipsparse.experiments.timing import time_call
from chipsparse.layout import ModelLayout
from chipsparse.parallel.head_exchange import PARTS, HeadExchange

WAIT = timedelta(minutes=20)  # of the others, while the first process runs alone
# Ten steps; those up to the first sparse one run once before, and compile.
ACTIONS: list[ActionName] = [
    *("dense", "refresh", "sparse", "sparse", "sparse"),
    *("skip", "refresh", "sparse", "sparse", "sparse"),
]
FIRST_SPARSE, LAST = ACTIONS.index("sparse"), len(ACTIONS) - 1


def main() -> None:
    """Measures one case; the first process prints the record."""
    args = parsed()
    cuda, rank, ranks = not args.small, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=WAIT)
    model, dtype = MODELS[args.case], torch.bfloat16 if cuda else torch.float32
    if args.small:
        model = dataclasses.replace(model, tiny={**model.tiny, "num_attention_heads": 2 * ranks})
    transformer = model.make(model.layers_of(args.depth), args.small, device, dtype)
    scale = SCALE if args.small else 1.0
    inputs = model.inputs(scale, transformer.config, STEPS, device, dtype)
    configs = model.early()
    config = configs["sparse"]
    if args.small:  # few tokens make few blocks
        config = config.override({"mlp.block_size": 16, "attention.block_size_q": 16})
    # Nothing of it is sparse: it consists of the same full and skipped steps.
    configs["faithful"] = model.qualities()["faithful"]
    measured = partial(measure, model, transformer, inputs, config, device)
    with torch.no_grad():
        alone = measured(None) if rank == 0 and not args.skip_alone else None
        dist.barrier()
        together = []
        for guidance, parts in product(args.guidance, args.parts):
            parallel = Parallel(
                ulysses=ranks // guidance // args.ring, guidance=guidance, ring=args.ring
            )
            found = measured(parallel, parts)
            slowest = of_all_ranks(found)
            together.append(
                {**dataclasses.asdict(parallel), "parts": parts}
                | slowest
                | {"same_again": found["same_again"]}
                | against(alone, found, slowest["ms"], configs)
            )
        record = {
            "benchmark": "parallel_steps",
            "case": args.case,
            "ranks": ranks,
            "blocks": sum(model.layers),
            "measured_blocks": sum(model.layers_of(args.depth)),
            "dtype": str(dtype).removeprefix("torch."),
            "density": config.attention.density,
            "alone": {name: alone[name] for name in ("ms", "peak_gpu_bytes")} if alone else None,
            "together": together,
            "matmul_tflops": matmul_tflops(device, dtype),
            **environment(device),
        }
        if rank == 0:
            written(record, args.json)
        if args.stock:
            record["stock_ms"] = stock_milliseconds(model, transformer, inputs, device)
            if rank == 0:
                written(record, args.json)
    dist.destroy_process_group()


def written(record: dict[str, Any], file: Path | None) -> None:
    """Prints a record; also to a file."""
    text = json.dumps(record, indent=1)
    print(text)
    if file is not None:
        file.write_text(text + "\n")


def of_all_ranks(found: dict[str, Any]) -> dict[str, Any]:
    """The longest time of each action, the largest share of an exchange that is not hidden, what
    each process takes of its GPU at most, and the shares of each: one that waits has a fast GPU.
    """
    every = {key: of_each_rank(found[key]) for key in ("ms", "exposed_share", "peak_gpu_bytes")}
    slowest: dict[str, Any] = {
        key: {name: max(each[name] for each in every[key]) for name in found[key]}
        for key in ("ms", "exposed_share")
    }
    return slowest | {
        "exposed_shares": every["exposed_share"],
        "peak_gpu_bytes": every["peak_gpu_bytes"],
    }


def of_each_rank(own: Any) -> list[Any]:
    """What every process has, in their order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> list[float]:
    """The rate of one large product on the GPU of each process, all at once."""
    size = 8192 if device.type == "cuda" else 256
    left, right = torch.randn(2, size, size, device=device, dtype=dtype)
    timing = time_call(lambda: left @ right, device)
    return of_each_rank(2 * size**3 / timing.latency_ms / 1e9)


def against(
    alone: dict[str, Any] | None,
    found: dict[str, Any],
    ms: dict[str, float],
    configs: dict[str, SparsityConfig],
) -> dict[str, Any]:
    """How much faster than alone, and how far the output of the last sparse step is.

    Args:
        alone: measured on one GPU, if it was.
        found: measured by this process on all of them.
        ms: times of the slowest process.
        configs: of the generations to sum up.
    """
    of_generations = {
        name: generation(config, ms, found["layout"]) for name, config in configs.items()
    }
    if alone is None:
        return {"generation_ms": of_generations}
    expected = alone["output"].double()
    distance = (found["output"].double() - expected).norm() / expected.norm()
    return {
        "generation_ms": of_generations,
        "speedup": {name: alone["ms"][name] / ms[name] for name in ms},
        "generation_speedup": {
            name: generation(config, alone["ms"], alone["layout"]) / of_generations[name]
            for name, config in configs.items()
        },
        "rel_l2": float(distance),
    }


def generation(config: SparsityConfig, ms: dict[str, float], layout: ModelLayout) -> float:
    """Milliseconds of all steps."""
    return math.fsum(
        count * ms[action] for action, count in Counter(actions_of(config, layout)).items()
    )


def measure(
    model: FullModel,
    transformer: Any,
    inputs: Step,
    config: SparsityConfig,
    device: torch.device,
    parallel: Parallel | None,
    parts: int = PARTS,
) -> dict[str, Any]:
    """Times of the actions in a second generation, and the output of its last sparse step."""
    watched = WatchedExchange(device)

    def step(number: int) -> torch.Tensor:
        watched.step = number
        return all_branches(model, transformer, inputs, number, len(ACTIONS) + 1)

    schedule = ScheduleConfig(
        actions=tuple(ACTIONS), first_dense_layers=config.schedule.first_dense_layers
    )
    calls = [partial(step, number) for number in range(len(ACTIONS))]
    ours = dataclasses.replace(config, schedule=schedule)
    with (
        chipsparse.enable(model.pipe(transformer), ours, parallel=parallel) as handle,
        compiled_blocks(transformer),
    ):
        split = transformer.chipsparse_adapter.split
        if split is not None:
            watched.watch(split.exchange, parts)
        _, first = run_timed(calls[: FIRST_SPARSE + 1], device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        watched.forget()
        times, outputs = run_timed(calls, device)
        plan: Any = handle._adapters[0].session.plan
    exposed = watched.milliseconds(len(calls))
    gc.collect()  # the next one plans with what is free
    if device.type == "cuda":
        torch.cuda.empty_cache()
    check_finite(outputs[LAST])
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    ms, unhidden = (
        {
            "all": math.fsum(steps),
            **{action: of_action(steps, action) for action in dict.fromkeys(ACTIONS)},
        }
        for steps in (times, exposed)
    )
    return {
        "ms": ms,
        "exposed_share": {name: unhidden[name] / ms[name] for name in ms if ms[name]},
        "output": outputs[LAST],
        "layout": plan.layout,
        "same_again": torch.equal(outputs[FIRST_SPARSE], first[-1]),
        "peak_gpu_bytes": peak,
    }


def of_action(times: list[float], action: ActionName) -> float:
    """The median of its steps."""
    return statistics.median(
        time for time, taken in zip(times, ACTIONS, strict=True) if taken == action
    )


def stock_milliseconds(
    model: FullModel, transformer: Any, inputs: Step, device: torch.device
) -> float:
    """Of a full step of the stock transformer, shared as diffusers does it; the slowest process's.

    The first block is not compiled: diffusers' hook on it cannot be.
    """
    from diffusers import ContextParallelConfig

    ranks = dist.get_world_size()
    torch._dynamo.reset()
    for name in model.blocks:
        for block in getattr(transformer, name)[1:]:
            block.compile()
    backend = "_native_cudnn" if device.type == "cuda" else "native"
    with attention_backend(transformer, backend), without_useless_masks(model, transformer):
        # diffusers divides by the number of accelerators, and there may be none.
        counted = torch.accelerator.device_count() or ranks
        with mock.patch.object(torch.accelerator, "device_count", return_value=counted):
            transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ranks))
        step = partial(all_branches, model, transformer, inputs)
        times, outputs = run_timed([partial(step, number, STEPS) for number in range(3)], device)
    check_finite(outputs[-1])
    return float(max(of_each_rank(statistics.median(times[1:]))))


def all_branches(
    model: FullModel, transformer: Any, inputs: Step, number: int, steps: int
) -> torch.Tensor:
    """A step; the output of its last branch, the first that all processes may read.

    With one step more than are taken, a patched transformer keeps its caches behind the last.
    """
    for branch in model.branches:
        output = call(transformer, inputs, branch, number, steps)
    return output


class WatchedExchange:
    """Times what the exchanges of each step add to the stream on which layers compute.

    Args:
        device: of the stream.

    Attributes:
        step: the one that is computed now.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.step = 0
        self.forget()

    def forget(self) -> None:
        """Starts anew."""
        self._spans: list[tuple[int, Any, Any]] = []

    def watch(self, exchange: HeadExchange, parts: int) -> None:
        """Sees an exchange from now on, which is to be made in so many parts at most."""
        exchange.watch, exchange.parts = self._around, parts

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        start = mark(self._device)
        yield
        self._spans.append((self.step, start, mark(self._device)))

    def milliseconds(self, steps: int) -> list[float]:
        """Of each step, once the device is done."""
        found = [0.0] * steps
        for step, start, end in self._spans:
            found[step] += milliseconds(start, end)
        return found


def parsed() -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel_steps")
    parser.add_argument("--case", choices=sorted(MODELS), required=True)
    parser.add_argument(
        "--guidance", type=int, nargs="+", default=[1], choices=(1, 2), help="branches apart"
    )
    parser.add_argument("--ring", type=int, default=1, help="processes that share query rows")
    parser.add_argument("--parts", type=int, nargs="+", default=[PARTS], help="of the heads")
    parser.add_argument("--depth", type=float, default=1.0, help="share of the blocks")
    parser.add_argument("--skip-alone", action="store_true", help="where one GPU cannot hold it")
    parser.add_argument(
        "--stock", action="store_true", help="also stock under diffusers' context parallelism"
    )
    parser.add_argument("--small", action="store_true", help="tiny, on CPUs: a dry run")
    parser.add_argument("--json", type=Path, help="file for the record")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Steps of full-size transformers on several GPUs, against one GPU of the same machine.

``torchrun --nproc-per-node 4 -m benchmarks.parallel_steps --case hunyuan_720p --json record.json``;
with ``--small`` on CPUs, over gloo. The first process runs all actions alone, then all run them
together: the same weights, latents and config. Each time is that of the slowest process.

Of each action it says which share of the time is exchange that nothing hides: the time that the
stream on which layers compute spends with packing, with waiting (for slower processes, too) and
with unpacking, between CUDA events around each; the largest share of all processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import chipsparse
from benchmarks.full_models import MODELS, STEPS, FullModel, Step, call
from benchmarks.full_size import ACTIONS, RUNS, SCALE, of_action, of_steps
from benchmarks.records import environment
from benchmarks.sampled_checks import check_finite
from benchmarks.transformer_step import mark, milliseconds, run_timed
from chipsparse import Parallel, SparsityConfig
from chipsparse.parallel.head_exchange import PARTS, HeadExchange

WAIT = timedelta(minutes=20)  # of the others, while the first process runs alone


def main() -> None:
    """Measures one case; the first process prints the record."""
    args = parsed()
    cuda, rank, ranks = not args.small, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=WAIT)
    parallel = Parallel(
        ulysses=ranks // args.guidance // args.ring, guidance=args.guidance, ring=args.ring
    )
    model, dtype = MODELS[args.case], torch.bfloat16 if cuda else torch.float32
    if args.small:
        model = replace(model, tiny={**model.tiny, "num_attention_heads": 2 * ranks})
    transformer = model.make(model.layers_of(args.depth), args.small, device, dtype)
    scale = SCALE if args.small else 1.0
    inputs = model.inputs(scale, transformer.config, STEPS, device, dtype)
    config = of_steps(model.qualities()[args.quality])
    if args.small:  # few tokens make few blocks
        config = config.override({"mlp.block_size": 16, "attention.block_size_q": 16})
    measured = partial(measure, model, transformer, inputs, config, device)
    with torch.no_grad():
        alone = measured(None) if rank == 0 and not args.skip_alone else None
        dist.barrier()
        found = {parts: measured(parallel, parts) for parts in args.parts}
    together = found[args.parts[-1]]
    slowest = {parts: of_all_ranks(each) for parts, each in found.items()}
    peaks: list[Any] = [None] * ranks
    dist.all_gather_object(peaks, together["peak_gpu_bytes"])
    if rank == 0:
        times = slowest[args.parts[-1]]["ms"]
        record = {
            "benchmark": "parallel_steps",
            "case": args.case,
            "quality": args.quality,
            "ranks": ranks,
            "ulysses": parallel.ulysses,
            "guidance": parallel.guidance,
            "ring": parallel.ring,
            "dtype": str(dtype).removeprefix("torch."),
            "parts": args.parts[-1],
            **slowest[args.parts[-1]],
            "of_other_parts": {parts: slowest[parts] for parts in args.parts[:-1]},
            "peak_gpu_bytes": peaks,
            "same_again": together["same_again"],
            **against(alone, times, together),
            **environment(device),
        }
        text = json.dumps(record, indent=1)
        print(text)
        if args.json is not None:
            args.json.write_text(text + "\n")
    dist.destroy_process_group()


def of_all_ranks(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The longest time of each action, and the largest share of an exchange that is not hidden."""
    all_found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_found, {"ms": found["ms"], "exposed_share": found["exposed_share"]})
    return {
        key: {name: max(each[key][name] for each in all_found) for name in found[key]}
        for key in ("ms", "exposed_share")
    }


def against(alone: dict[str, Any] | None, times: dict[str, float], found: Any) -> dict[str, Any]:
    """How much faster than alone, and how far the output of the last sparse step is."""
    if alone is None:
        return {}
    expected = alone["output"].double()
    distance = (found["output"].double() - expected).norm() / expected.norm()
    return {
        "alone_ms": alone["ms"],
        "alone_peak_gpu_bytes": alone["peak_gpu_bytes"],
        "speedup": {name: alone["ms"][name] / times[name] for name in times},
        "rel_l2": float(distance),
    }


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
        steps = len(ACTIONS) + 1  # caches are freed after the last
        for branch in model.branches:
            output = call(transformer, inputs, branch, number, steps)
        return output

    last = max(number for number, action in enumerate(ACTIONS) if action == "sparse")
    calls = [partial(step, number) for number in range(len(ACTIONS))]
    with chipsparse.enable(model.pipe(transformer), config, parallel=parallel):
        split = transformer.chipsparse_adapter.split
        if split is not None:
            watched.watch(split.exchange, parts)
        _, first = run_timed(calls, device)
        before = first[last].clone()
        del first
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        watched.forget()
        times, outputs = run_timed(calls, device)
    exposed = watched.milliseconds(len(calls))
    check_finite(outputs[last])
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    ms, unhidden = (
        {"all": math.fsum(steps), **{action: of_action(steps, action) for action in RUNS}}
        for steps in (times, exposed)
    )
    return {
        "ms": ms,
        "exposed_share": {name: unhidden[name] / ms[name] for name in ms if ms[name]},
        "output": outputs[last],
        "same_again": torch.equal(outputs[last], before),
        "peak_gpu_bytes": peak,
    }


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
    parser.add_argument("--quality", default="published", help="one with sparse steps")
    parser.add_argument("--guidance", type=int, default=1, choices=(1, 2))
    parser.add_argument("--ring", type=int, default=1, help="processes that share query rows")
    parser.add_argument(
        "--parts",
        type=int,
        nargs="+",
        default=[PARTS],
        help="of the heads; the table has the last",
    )
    parser.add_argument("--depth", type=float, default=1.0, help="share of the blocks")
    parser.add_argument("--skip-alone", action="store_true", help="where one GPU cannot hold it")
    parser.add_argument("--small", action="store_true", help="tiny, on CPUs: a dry run")
    parser.add_argument("--json", type=Path, help="file for the record")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Steps of full-size transformers on several GPUs, against one GPU of the same machine.

``torchrun --nproc-per-node 4 -m benchmarks.parallel_steps --case hunyuan_720p --json record.json``;
with ``--small`` on CPUs, over gloo. The first process runs all actions alone, then all run them
together: the same weights, latents and config. Each time is that of the slowest process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import chipsparse
from benchmarks.full_models import MODELS, STEPS
from benchmarks.full_size import ACTIONS, RUNS, SCALE, of_action, of_steps
from benchmarks.records import environment
from benchmarks.sampled_checks import check_finite
from benchmarks.transformer_step import run_timed
from chipsparse import Parallel, SparsityConfig

WAIT = timedelta(minutes=20)  # of the others, while the first process runs alone


def main() -> None:
    """Measures one case; the first process prints the record."""
    args = parsed()
    cuda, rank, ranks = not args.small, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=WAIT)
    parallel = Parallel(ulysses=ranks // args.guidance, guidance=args.guidance)
    model, dtype = MODELS[args.case], torch.bfloat16 if cuda else torch.float32
    if args.small:
        model = replace(model, tiny={**model.tiny, "num_attention_heads": ranks})
    transformer = model.make(model.layers_of(args.depth), args.small, device, dtype)
    scale = SCALE if args.small else 1.0
    inputs = model.inputs(scale, transformer.config, STEPS, device, dtype)
    quality = model.qualities()[args.quality]
    config = of_steps(quality, first_dense=quality.schedule.first_dense_layers)
    if args.small:  # few tokens make few blocks
        config = config.override({"mlp.block_size": 16, "attention.block_size_q": 16})
    measured = partial(measure, transformer, inputs, model.branches, config, device)
    with torch.no_grad():
        alone = measured(None) if rank == 0 and not args.skip_alone else None
        dist.barrier()
        together = measured(parallel)
    peaks: list[Any] = [None] * ranks
    dist.all_gather_object(peaks, [together["ms"], together["peak_gpu_bytes"]])
    if rank == 0:
        times = {name: max(each[0][name] for each in peaks) for name in together["ms"]}
        record = {
            "benchmark": "parallel_steps",
            "case": args.case,
            "quality": args.quality,
            "ranks": ranks,
            "ulysses": parallel.ulysses,
            "guidance": parallel.guidance,
            "dtype": str(dtype).removeprefix("torch."),
            "ms": times,
            "peak_gpu_bytes": [each[1] for each in peaks],
            "same_again": together["same_again"],
            **against(alone, times, together),
            **environment(device),
        }
        text = json.dumps(record, indent=1)
        print(text)
        if args.json is not None:
            args.json.write_text(text + "\n")
    dist.destroy_process_group()


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
    transformer: Any,
    inputs: Any,
    branches: tuple[str, ...],
    config: SparsityConfig,
    device: torch.device,
    parallel: Parallel | None,
) -> dict[str, Any]:
    """Times of the actions in a second generation, and the output of its last sparse step."""
    pipe = SimpleNamespace(
        components={"transformer": transformer},
        scheduler=None,
        do_classifier_free_guidance=len(branches) > 1,
    )

    def step(number: int) -> torch.Tensor:
        for branch in branches:
            with transformer.cache_context(
                branch, step_index=number, num_inference_steps=len(ACTIONS) + 1
            ):
                output: torch.Tensor = transformer(**inputs(number))[0]
        return output

    last = max(number for number, action in enumerate(ACTIONS) if action == "sparse")
    calls = [partial(step, number) for number in range(len(ACTIONS))]
    with chipsparse.enable(pipe, config, parallel=parallel):
        _, first = run_timed(calls, device)
        before = first[last].clone()
        del first
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        times, outputs = run_timed(calls, device)
    check_finite(outputs[last])
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "ms": {action: of_action(times, action) for action in RUNS} | {"all": math.fsum(times)},
        "output": outputs[last],
        "same_again": torch.equal(outputs[last], before),
        "peak_gpu_bytes": peak,
    }


def parsed() -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel_steps")
    parser.add_argument("--case", choices=sorted(MODELS), required=True)
    parser.add_argument("--quality", default="balanced")
    parser.add_argument("--guidance", type=int, default=1, choices=(1, 2))
    parser.add_argument("--depth", type=float, default=1.0, help="share of the blocks")
    parser.add_argument("--skip-alone", action="store_true", help="where one GPU cannot hold it")
    parser.add_argument("--small", action="store_true", help="tiny, on CPUs: a dry run")
    parser.add_argument("--json", type=Path, help="file for the record")
    return parser.parse_args()


if __name__ == "__main__":
    main()

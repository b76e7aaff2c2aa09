"""Self-attention of a layer as a session runs it: full, refreshed and sparse, against a library.

A refresh is all of it: column sums, the choice of columns, their packed lists and what is cached.
Layers run one behind the other, as in a model, so that the host may be ahead of the GPU.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from typing import Any

import torch

from benchmarks.case_tensors import CaseTensors
from benchmarks.cases import CASES, Case
from benchmarks.kernel_runs import at_most
from benchmarks.offload import layout_of
from benchmarks.records import Record, environment
from benchmarks.run import Run
from benchmarks.sampled_checks import check_finite
from benchmarks.transformer_step import run_timed
from chipsparse import SparsityConfig
from chipsparse.cache.host_memory import HostMemory
from chipsparse.cache.memory_plan import MemoryDemand
from chipsparse.cache.offload import OffloadPool
from chipsparse.report.generation import GenerationReport
from chipsparse.session import Session
from chipsparse.step import StepContext

# tiny-wan at 256x256, 65 frames; guidance branches are calls of their own
TINY_WAN = Case("tiny_wan_256x256x65", 1, 4, 17_408, 64, 256, 1024, 0.20)
ALL_CASES = {**CASES, TINY_WAN.name: TINY_WAN}
DEFAULT_CASES = (
    *("hunyuan_720p", "wan14b_720p", "wan1b_480p", "hunyuan_32k", "flux_1280x768"),
    TINY_WAN.name,
)
COLUMNS = {
    "op": "",
    "case": "",
    "density": ".3f",
    "precision": "",
    "baseline_ms": ".3f",
    "dense_ms": ".3f",
    "refresh_ms": ".3f",
    "latency_ms": ".3f",
    "refresh_ratio": ".2f",
    "speedup": ".2f",
    "ideal": ".1f",
}
# One behind the other: of short sequences enough to hide how long the host needs to begin a step.
LAYERS, LAYERS_OF_LONG, LONG = 12, 3, 40_000
# In the first round kernels are picked and compiled, and memory is taken.
ROUND = ["dense", "refresh", "sparse", "sparse"]
ROUNDS, ROUNDS_OF_LONG = 9, 3
DRIFT = 0.05


def run(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds a record per case and precision of full attention."""
    for name in args.case.split(",") if args.case else DEFAULT_CASES:
        with to.attempt(f"attention_steps, {name}"):
            if name not in ALL_CASES:
                raise ValueError(f"unknown case {name!r}; there are {', '.join(ALL_CASES)}")
            case = at_most(ALL_CASES[name], args.tokens, args.heads)
            for precision in ("bf16", "fp8"):
                to.add(measure(case, precision, device, dtype))
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measure(case: Case, precision: str, device: torch.device, dtype: torch.dtype) -> Record:
    """The record of a case; times are of one layer's call."""
    tensors = CaseTensors(case, device, dtype)
    times = by_action(tensors, precision)
    baseline = tensors.dense.timing.latency_ms
    return {
        "op": "attention_steps",
        "case": case.name,
        "batch": case.batch,
        "heads": case.heads,
        "head_dim": case.head_dim,
        "tokens": case.tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "density": case.density,
        "block_size": 128,
        "precision": precision,
        "backend": "chipsparse",
        "baseline": f"dense {tensors.dense.name}",
        "baseline_ms": baseline,
        "dense_ms": times["dense"],
        "refresh_ms": times["refresh"],
        "latency_ms": times["sparse"],
        "refresh_ratio": times["refresh"] / baseline,
        "speedup": baseline / times["sparse"],
        "ideal": 1 / case.density,
        **environment(device),
    }


def by_action(tensors: CaseTensors, precision: str) -> dict[str, float]:
    """Milliseconds of one layer's call, by action: medians of the measured steps."""
    case = tensors.case
    is_long = case.tokens > LONG
    count = LAYERS_OF_LONG if is_long else LAYERS
    actions = ROUND * (ROUNDS_OF_LONG if is_long else ROUNDS)
    config = SparsityConfig().override(
        {
            "attention.density": case.density,
            "attention.precision": precision,
            "mlp.enabled": False,
            "memory.offload": "never",
            "where_slower": "sparse",
            "schedule.actions": actions,
        }
    )
    layout = layout_of(case, count)
    report = GenerationReport()
    session = Session(config, report, OffloadPool(HostMemory(), report.fall_back))
    times: dict[str, list[float]] = {}
    with torch.no_grad():
        for step, action in enumerate(actions):
            # One more step than there are: caches are freed after the last.
            context = StepContext(1, step, "cond", len(actions) + 1)
            session.begin(context, layout, tensors.device, lambda: MemoryDemand(tensors.dtype))
            query, key, value = (each * (1 + DRIFT * step) for each in tensors.qkv)

            def layers(inputs: tuple[torch.Tensor, ...] = (query, key, value)) -> Any:
                for layer in range(count):
                    output = session.attention[layer](
                        session.state, *inputs, scale=None, unpatched=_fail
                    )
                return output

            (elapsed,), (output,) = run_timed([layers], tensors.device)
            session.end(output)
            check_finite(output)
            if step >= len(ROUND):
                times.setdefault(action, []).append(elapsed / count)
    if report.fallbacks:
        raise ValueError(f"not as planned: {'; '.join(map(str, report.fallbacks))}")
    session.close()
    return {action: statistics.median(found) for action, found in times.items()}


def _fail(*_: Any) -> torch.Tensor:
    raise ValueError("attention was left to the model")

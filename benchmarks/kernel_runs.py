"""Kernels at the named cases: checked on the spot, then timed against the libraries."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks import attention_ops, fp8_mlp_ops, fp8_ops, mlp_ops
from benchmarks.attention_ops import DELTA_RULES
from benchmarks.case_tensors import CaseTensors
from benchmarks.cases import CASES, Case
from benchmarks.kernel_work import Settings, Work
from benchmarks.records import Record, environment
from benchmarks.run import Run
from benchmarks.sampled_checks import check_finite, worst
from chipsparse.experiments.timing import time_call

OPS = {**attention_ops.OPS, **fp8_ops.OPS, **mlp_ops.OPS, **fp8_mlp_ops.OPS}
# Names for several operations at once.
GROUPS = {"fp8_attention": fp8_ops.GROUP}
COLUMNS = {
    "op": "",
    "case": "",
    "backend": "",
    "block_size": "d",
    "density": ".3f",
    "latency_ms": ".3f",
    "baseline": "",
    "baseline_ms": ".3f",
    "speedup": ".2f",
    "ideal": ".1f",
    "of_ideal": ".0%",
    "tflops": ".0f",
    "baseline_tflops": ".0f",
    "gb_per_s": ".0f",
    "rel_error": ".1e",
    "lse_error": ".1e",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Options of the kernel benchmarks alone."""
    group = parser.add_argument_group("kernels")
    group.add_argument(
        "--backend", help="only these, comma-separated; by default all but the reference"
    )
    group.add_argument("--block-size", default="128", help="comma-separated")
    group.add_argument("--keep", type=float, help="keep fraction in place of the cases' own")
    group.add_argument("--delta-rule", choices=DELTA_RULES, default="none")
    group.add_argument("--transient-gb", type=float, default=8.0, help="of column sums at a time")
    group.add_argument("--tokens", type=int, help="at most so many, for a dry run")
    group.add_argument("--heads", type=int, help="at most so many, for a dry run")


def settings_from(args: Namespace) -> list[Settings]:
    """One per block size."""
    return [
        Settings(int(rows), args.keep, args.delta_rule, int(args.transient_gb * 2**30))
        for rows in args.block_size.split(",")
    ]


def at_most(case: Case, tokens: int | None, heads: int | None) -> Case:
    """The case, cut where it is larger."""
    return case.scaled(
        tokens=min(case.tokens, tokens or case.tokens), heads=min(case.heads, heads or case.heads)
    )


def run(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds one record per case, operation, block size and backend, case after case."""
    for name in args.case.split(",") if args.case else CASES:
        with to.attempt(name):
            if name not in CASES:
                raise ValueError(f"unknown case {name!r}; there are {', '.join(CASES)}")
            tensors = CaseTensors(at_most(CASES[name], args.tokens, args.heads), device, dtype)
            for op in filter(OPS.__contains__, args.ops):
                for settings in settings_from(args):
                    with to.attempt(f"{op}, {name}, block size {settings.block_size}"):
                        work = OPS[op](tensors, settings)
                        measure_backends(op, work, tensors, args.backend, to)
                    if op in ("dense_attention", "fp8_quantization", "fp8_dense_attention"):
                        break  # it knows no blocks
        if device.type == "cuda":
            # what one shape leaves in the allocator may not fit the next one
            torch.cuda.empty_cache()


def measure_backends(
    op: str, work: Work, tensors: CaseTensors, forced: str | None, to: Run
) -> None:
    """Adds a record for each backend that can run, or for each of the forced ones."""
    for backend in forced.split(",") if forced else runnable(work):
        with to.attempt(f"{op}, {tensors.case.name}, {backend}"):
            work.operation.choose(*work.inputs, backend=backend)
            record = measure(op, work, tensors, backend)
            to.add(record)
            print(_line(record), flush=True)


def runnable(work: Work) -> Iterator[str]:
    """Backends that can run; the reference, which the others are checked against, if alone."""
    names = [
        each.name
        for each in work.operation.backends
        if each.unsupported_reason(*work.inputs) is None
    ]
    yield from [name for name in names if name != "reference"] or names


def measure(op: str, work: Work, tensors: CaseTensors, backend: str) -> Record:
    """Checks and times each part, then returns the record of them all.

    Raises:
        WrongResultError: a part is wrong.
    """
    latency_ms = baseline_ms = 0.0
    errors, methods = [], set()
    parts = 0
    for part in work.parts():
        result = part.call(backend)
        check_finite(result[0] if isinstance(result, tuple) else result)
        errors += [part.compare(result, sample) for sample in part.samples]
        del result
        parts += 1
        timing = time_call(partial(part.call, backend), tensors.device)
        latency_ms += timing.latency_ms
        methods.add(timing.method)
        if part.baseline is not None:
            baseline_ms += time_call(part.baseline, tensors.device).latency_ms
        del part  # and its tensors, before the next part makes its own
    baseline = work.baseline
    if baseline == "dense":
        baseline = f"dense {tensors.dense.name}"
        baseline_ms = tensors.dense.timing.latency_ms
    case = tensors.case
    record = {
        "op": op,
        "case": case.name,
        "batch": case.batch,
        "heads": case.heads,
        "tokens": case.tokens,
        "head_dim": case.head_dim,
        "dtype": str(tensors.dtype).removeprefix("torch."),
        "backend": backend,
        **work.fields,
        "latency_ms": latency_ms,
        "timed_by": ", ".join(sorted(methods)),
        "parts": parts,
        "baseline": baseline,
        "baseline_ms": None if baseline is None else baseline_ms,
        "speedup": None if baseline is None else baseline_ms / latency_ms,
        "tflops": _per_second(work.flops, latency_ms, 1e12),
        "gb_per_s": _per_second(work.moved_bytes, latency_ms, 1e9),
        **worst(errors),
        **environment(tensors.device),
    }
    return {**record, **_beside_ideal(record)}


def _beside_ideal(record: dict[str, Any]) -> dict[str, float]:
    """What a speed-up is to be read with: its share of the ideal, and the baseline's TFLOP/s.

    Nothing where there is no ideal: the baseline does as much more work as that is.
    """
    if record.get("ideal") is None or record["speedup"] is None:
        return {}
    found = {"of_ideal": record["speedup"] / record["ideal"]}
    if record["tflops"] is not None:
        found["baseline_tflops"] = record["tflops"] / found["of_ideal"]
    return found


def _per_second(amount: int | None, latency_ms: float, unit: float) -> float | None:
    return None if amount is None else amount / (latency_ms * 1e-3) / unit


def _line(record: dict[str, Any]) -> str:
    speedup = "" if record["speedup"] is None else f"  {record['speedup']:.2f}x"
    if "baseline_tflops" in record:
        both = f"{record['tflops']:.3g} TFLOP/s, baseline {record['baseline_tflops']:.3g}"
        speedup += f" ({record['of_ideal']:.0%} of the ideal; {both})"
    rows = f" R{record['block_size']}" if "block_size" in record else ""
    label = f"{record['op']} {record['case']}{rows} {record['backend']}"
    return f"{label:70s} {record['latency_ms']:9.3f} ms{speedup}"

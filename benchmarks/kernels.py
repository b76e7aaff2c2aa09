"""``python -m benchmarks kernels``: kernels at the named cases, checked on the spot, then timed.

``curve`` times sparse attention over the keep fraction and over the tokens. A kernel whose check
fails is not timed.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from functools import partial

import torch

from benchmarks.cases import CASES, Case, check_finite
from benchmarks.kernel_cases import DENSE, KERNELS, Inputs, Kernel, Settings
from benchmarks.records import Record, Run, environment
from chipsparse.experiments.timing import time_call

WITHOUT_BLOCKS = ("dense_attention", "fp8_dense_attention")
COLUMNS = {
    **dict.fromkeys(("op", "case", "backend"), ""),
    "block_size": "d",
    "density": ".3f",
    "latency_ms": ".3f",
    "baseline": "",
    "baseline_ms": ".3f",
    "speedup": ".2f",
    "ideal": ".1f",
    "tflops": ".0f",
    "rel_error": ".1e",
    "lse_error": ".1e",
}
# The curves: shares of the columns, and tokens at one share.
KEEP_FRACTIONS = (0.02, 0.05, 0.07, 0.10, 0.15, 0.20, 0.30, 0.50)
TOKENS = (4352, 8192, 16_384, 32_256, 65_536, 119_056)
TOKENS_KEEP = 0.07
# Heads run one beside the other: a few of a long sequence fill a GPU, and the ratio is the same.
MANY_TOKENS = 40_000
FEW_HEADS = 6
TINY = {"tokens": 300, "heads": 2}


def add_arguments(parser: ArgumentParser) -> None:
    """Options of ``kernels`` and ``curve``."""
    parser.add_argument("--op", help=f"comma-separated, default all: {', '.join(KERNELS)}")
    parser.add_argument("--case", help=f"comma-separated, default all: {', '.join(CASES)}")
    parser.add_argument("--backend", help="comma-separated, default all but the reference")
    parser.add_argument("--block-size", default="128", help="comma-separated")
    rules = ("none", "difference", "means")
    parser.add_argument("--delta-rule", choices=rules, default="none")


def run(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds one record per case, operation, block size and backend, case after case."""
    ops = args.op.split(",") if args.op else [*KERNELS]
    if unknown := [op for op in ops if op not in KERNELS]:
        raise ValueError(f"unknown op {unknown[0]!r}; there are {', '.join(KERNELS)}")
    sizes = [int(rows) for rows in args.block_size.split(",")]
    for name in args.case.split(",") if args.case else CASES:
        with to.attempt(name):
            if name not in CASES:
                raise ValueError(f"unknown case {name!r}; there are {', '.join(CASES)}")
            inputs = Inputs(_cut(CASES[name], args.tiny), device, dtype)
            for op in ops:
                for rows in sizes[: 1 if op in WITHOUT_BLOCKS else None]:
                    settings = Settings(rows, delta_rule=args.delta_rule)
                    measure_backends(op, inputs, settings, args.backend, to)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what one shape leaves may not fit the next one


def run_curve(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds a record per point, of the first backend that runs unless one is forced."""
    base = CASES["hunyuan_720p"]
    points = [
        ("keep", case, keep) for case in (CASES["hunyuan_32k"], base) for keep in KEEP_FRACTIONS
    ]
    points += [("tokens", base.scaled(tokens=n, heads=base.heads), TOKENS_KEEP) for n in TOKENS]
    for curve, case, keep in points:
        heads = FEW_HEADS if case.tokens > MANY_TOKENS else case.heads
        scaled = case.scaled(tokens=case.tokens, heads=heads)
        inputs = Inputs(_cut(scaled, args.tiny), device, dtype)
        settings = Settings(density=keep, delta_rule=args.delta_rule)
        fields = {"op": "attention_curve", "curve": curve}
        measure_backends("column_sparse_attention", inputs, settings, args.backend, to, fields)


def _cut(case: Case, tiny: bool) -> Case:
    """The case, in a dry run with few tokens and heads."""
    return (
        case.scaled(**{n: min(getattr(case, n), most) for n, most in TINY.items()})
        if tiny
        else case
    )


def measure_backends(
    op: str,
    inputs: Inputs,
    settings: Settings,
    forced: str | None,
    to: Run,
    of_curve: Record | None = None,
) -> None:
    """Adds a record for each backend that can run, of a curve the first, or for the forced ones.

    The reference, which the others are checked against, is measured where no other can run.
    """
    make = partial(KERNELS[op], inputs, settings)
    able = False
    names = forced.split(",") if forced else [item.name for item in make().operation.backends]
    for backend in names:
        if able and not forced and (of_curve or backend == names[-1]):
            return
        with to.attempt(f"{op}, {inputs.case.name}, block size {settings.block_size}, {backend}"):
            before = able
            able = True
            try:
                record = measure(op, make(), inputs, backend) | (of_curve or {})
            except ValueError as error:
                if forced or "cannot run here" not in str(error):
                    raise
                able = before
                continue
            to.add(record)
            name = record["case"]
            ms = record["latency_ms"]
            ratio = record["speedup"] or math.nan
            print(f"{op} {name} R{settings.block_size} {backend}: {ms:.3f} ms, {ratio:.2f}x")


def measure(op: str, kernel: Kernel, inputs: Inputs, backend: str) -> Record:
    """Checks and times a kernel; returns its record, or raises `WrongResultError`."""
    result = kernel.call(backend)
    check_finite(result[0] if isinstance(result, tuple) else result)
    errors = [kernel.check(result, sample) for sample in kernel.samples]
    del result
    timing = time_call(partial(kernel.call, backend), inputs.device)
    baseline = kernel.baseline
    baseline_ms = None
    if baseline == DENSE:
        baseline = f"dense {inputs.dense[0]}"
        baseline_ms = inputs.dense[1].latency_ms
    elif kernel.replaces is not None:
        baseline_ms = time_call(kernel.replaces, inputs.device).latency_ms
    case = inputs.case
    latency_ms = timing.latency_ms
    return {
        "op": op,
        "case": case.name,
        **{name: getattr(case, name) for name in ("batch", "heads", "tokens", "head_dim")},
        "dtype": str(inputs.dtype).removeprefix("torch."),
        "backend": backend,
        **kernel.fields,
        "latency_ms": latency_ms,
        "timed_by": timing.method,
        "baseline": baseline,
        "baseline_ms": baseline_ms,
        "speedup": None if baseline_ms is None else baseline_ms / latency_ms,
        "tflops": None if kernel.flops is None else kernel.flops / latency_ms / 1e9,
        **{name: max(error[name] for error in errors) for name in errors[0]},
        **environment(inputs.device),
    }

"""``python -m benchmarks kernels``: kernels at the named cases, checked on the spot, then timed.

``curve`` times sparse attention over the keep fraction and over the tokens. A kernel whose check
fails is not timed.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from typing import Any

import torch

from benchmarks import attention_cases, mlp_cases
from benchmarks.cases import CASES, Case
from benchmarks.kernel_cases import DENSE, KERNELS, Inputs, Kernel, Settings
from benchmarks.kernel_checks import check_finite
from benchmarks.records import Record, Run, environment
from chipsparse.experiments.timing import time_call

__all__ = ["attention_cases", "mlp_cases"]  # they fill the registry
WITHOUT_BLOCKS = ("dense_attention", "fp8_dense_attention")
COLUMNS = {
    **dict.fromkeys(("op", "case", "backend"), ""),
    **{"block_size": "d", "density": ".3f", "latency_ms": ".3f", "baseline": ""},
    **{"baseline_ms": ".3f", "speedup": ".2f", "ideal": ".1f", "tflops": ".0f"},
    **{"rel_error": ".1e", "lse_error": ".1e"},
}
# The curves: shares of the columns, and tokens at one share.
KEEP_FRACTIONS = (0.02, 0.05, 0.07, 0.10, 0.15, 0.20, 0.30, 0.50)
TOKENS, TOKENS_KEEP = (4352, 8192, 16_384, 32_256, 65_536, 119_056), 0.07
# Heads run one beside the other: a few of a long sequence fill a GPU, and the ratio is the same.
MANY_TOKENS, FEW_HEADS = 40_000, 6
TINY = {"tokens": 300, "heads": 2}


def add_arguments(parser: ArgumentParser) -> None:
    """Options of the kernel benchmarks."""
    parser.add_argument("--op", help=f"comma-separated, default all: {', '.join(KERNELS)}")
    parser.add_argument("--case", help=f"comma-separated, default all: {', '.join(CASES)}")
    parser.add_argument("--backend", help="comma-separated, default all but the reference")
    parser.add_argument("--block-size", default="128", help="comma-separated")
    parser.add_argument("--keep", type=float, help="keep fraction in place of the cases' own")
    rules = ("none", "merge", "difference")
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
                    settings = Settings(rows, args.keep, args.delta_rule)
                    measure_backends(op, op, inputs, settings, args.backend, to)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what one shape leaves may not fit the next one


def run_curve(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds a record per point, of the first backend that runs unless one is forced."""
    for curve, case, keeps in curve_cases():
        inputs = Inputs(_cut(case, args.tiny), device, dtype)
        for keep in keeps:
            settings = Settings(density=keep, delta_rule=args.delta_rule)
            names = "attention_curve", "column_sparse_attention"
            measure_backends(*names, inputs, settings, args.backend, to, curve=curve)


def curve_cases() -> list[tuple[str, Case, tuple[float, ...]]]:
    """The curve's name, the case and the keep fractions to measure on it."""
    base = CASES["hunyuan_720p"]
    of_keep = [("keep", case, KEEP_FRACTIONS) for case in (CASES["hunyuan_32k"], base)]
    of_tokens = [("tokens", base.scaled(tokens=tokens), (TOKENS_KEEP,)) for tokens in TOKENS]
    return [
        (curve, case.scaled(heads=FEW_HEADS) if case.tokens > MANY_TOKENS else case, keeps)
        for curve, case, keeps in of_keep + of_tokens
    ]


def _cut(case: Case, tiny: bool) -> Case:
    """The case, in a dry run with few tokens and heads."""
    return case.scaled(**{n: min(getattr(case, n), most) for n, most in TINY.items() if tiny})


def measure_backends(
    op: str,
    kernel: str,
    inputs: Inputs,
    settings: Settings,
    forced: str | None,
    to: Run,
    **fields: Any,
) -> None:
    """Adds a record for each backend that can run, of a curve the first, or for the forced ones.

    The reference, which the others are checked against, is measured where no other can run.
    """
    make, able = partial(KERNELS[kernel], inputs, settings), False
    names = forced.split(",") if forced else [each.name for each in make().operation.backends]
    for backend in names:
        if able and not forced and (fields or backend == names[-1]):
            return
        with to.attempt(f"{op}, {inputs.case.name}, block size {settings.block_size}, {backend}"):
            before, able = able, True
            try:
                record = measure(op, make(), inputs, backend)
            except ValueError as error:
                if forced or "cannot run here" not in str(error):
                    raise
                able = before
                continue
            to.add(record | fields)
            print(_line(record), flush=True)


def measure(op: str, kernel: Kernel, inputs: Inputs, backend: str) -> Record:
    """Checks and times a kernel; returns its record.

    Raises:
        WrongResultError: its result is wrong.
    """
    result = kernel.call(backend)
    check_finite(result[0] if isinstance(result, tuple) else result)
    errors = [kernel.check(result, sample) for sample in kernel.samples]
    del result
    timing = time_call(partial(kernel.call, backend), inputs.device)
    baseline, baseline_ms = kernel.baseline, None
    if baseline == DENSE:
        baseline, baseline_ms = f"dense {inputs.dense[0]}", inputs.dense[1].latency_ms
    elif kernel.replaces is not None:
        baseline_ms = time_call(kernel.replaces, inputs.device).latency_ms
    case, latency_ms = inputs.case, timing.latency_ms
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


def _line(record: Record) -> str:
    speedup = "" if record["speedup"] is None else f"  {record['speedup']:.2f}x"
    if speedup and "ideal" in record:
        speedup += f" ({record['speedup'] / record['ideal']:.0%} of the ideal)"
    rows = f" R{record['block_size']}" if "block_size" in record else ""
    label = f"{record['op']} {record['case']}{rows} {record['backend']}"
    return f"{label:70s} {record['latency_ms']:9.3f} ms{speedup}"

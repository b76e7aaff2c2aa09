"""Compiles the kernels without a GPU: ``python -m benchmarks.compile_report`` says what they use.

Registers per thread, shared memory, matrix products and copies, and what spills: stores to local
memory (STL in the machine code) and loads from it (LDL). A spill between two work items costs
nothing to speak of; one in a hot loop does. A hot loop is an innermost loop of those that multiply
matrices or copy tiles, or that load from global memory where a kernel does neither.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from benchmarks.compiled_cases import CompiledCase, cases
from benchmarks.machine_code import PRODUCTS, hot_loops, instructions

SHARED_BYTES = 232_448  # that a block may have on Hopper: 227 KiB
COUNTED = (*PRODUCTS, "LDGSTS", "UTMALDG", "STL", "LDL")


@dataclass(frozen=True)
class Report:
    """What a compiled kernel uses; counts are of instructions in the machine code."""

    operation: str
    backend: str
    variant: str
    default: bool
    capability: int
    triton: str
    registers: int
    shared_bytes: int
    counts: dict[str, int]
    hot_loops: int
    hot_stores: int  # spills inside the hot loops
    hot_loads: int
    single_stores: int  # of one 16-bit number, to global memory
    single_loads: int


def why_not_here() -> str | None:
    """Why no kernel can be compiled and read here, or None."""
    try:
        from triton import knobs
    except ImportError:
        return "Triton is not installed"
    if knobs.runtime.interpret:
        return "TRITON_INTERPRET replaces the kernels by what Python runs"
    if disassembler() is None:
        return "cuobjdump is neither in Triton's package nor on PATH"
    return None


def disassembler() -> str | None:
    """The cuobjdump that comes with Triton, or any other."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(tool) if os.access(tool, os.X_OK) else shutil.which("cuobjdump")


def report(case: CompiledCase) -> Report:
    """Compiles a case and reads its machine code."""
    import triton

    compiled = case.compile()
    tool = disassembler()
    assert tool is not None
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        code = _output(tool, "--dump-sass", str(cubin))
        usage = _output(tool, "--dump-resource-usage", str(cubin))
    functions = [instructions(text) for text in code.split("Function :")[1:]]
    opcodes = [each.opcode for function in functions for each in function]
    loops = [loop for function in functions for loop in hot_loops(function)]
    in_loops = [each.opcode for loop in loops for each in loop]
    return Report(
        case.operation,
        case.backend,
        case.variant,
        case.default,
        case.capability,
        triton.__version__,
        max(int(number) for number in re.findall(r"\bREG:(\d+)", usage)),
        compiled.metadata.shared,
        {name: opcodes.count(name) for name in COUNTED},
        len(loops),
        in_loops.count("STL"),
        in_loops.count("LDL"),
        *(len(re.findall(rf"\b{each}\.\S*U16\b", code)) for each in ("STG", "LDG")),
    )


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def table(reports: Iterable[Report]) -> str:
    """One line per kernel; spills as stores+loads, in all and in hot loops."""
    lines = [
        f"{'kernel':76} {'regs':>4} {'shared':>7} {'products':>8} {'LDGSTS':>6} "
        f"{'UTMALDG':>7} {'loops':>5} {'spills':>9} {'in loops':>9}"
    ]
    for each in reports:
        name = f"{each.operation} {each.backend} sm_{each.capability} {each.variant}"
        count = each.counts
        lines.append(
            f"{name + ' *' * each.default:76} {each.registers:4} {each.shared_bytes:7} "
            f"{sum(count[name] for name in PRODUCTS):8} "
            f"{count['LDGSTS']:6} {count['UTMALDG']:7} "
            f"{each.hot_loops:5} {count['STL']:>4}+{count['LDL']:<4} "
            f"{each.hot_stores:>4}+{each.hot_loads:<4}"
        )
    return "\n".join([*lines, "* launched by default"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 where a kernel does not compile, 2 where none can be read."""
    parser = argparse.ArgumentParser(description="What the compiled kernels use, without a GPU.")
    parser.add_argument("--json", type=Path, help="also write the reports to this file")
    parser.add_argument("--default", action="store_true", help="only what is launched by default")
    parser.add_argument("--only", default="", help="only kernels whose line contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    args = parser.parse_args(arguments)
    if (reason := why_not_here()) is not None:
        print(reason, file=sys.stderr)
        return 2
    chosen = [
        case for case in cases() if (case.default or not args.default) and args.only in str(case)
    ]
    reports, failed = [], False
    # New processes instead of forks: torch and Triton have threads.
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for case, future in [(case, pool.submit(report, case)) for case in chosen]:
            try:
                reports.append(future.result())
            except Exception as error:
                failed = True
                print(f"{case}: {type(error).__name__}: {error}", file=sys.stderr)
    print(table(reports))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(each) for each in reports], indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())

"""Compiles the kernels without a GPU: ``python -m benchmarks.compile_report`` says what they use.

Registers per thread, shared memory, matrix products and copies, and what spills: stores to local
memory (STL in the machine code) and loads from it (LDL). A spill between two work items costs
nothing to speak of; one in a hot loop does. A hot loop is an innermost loop of those that multiply
matrices or copy tiles, or that load from global memory where a kernel does neither.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.compiled_cases import CompiledCase, cases
from benchmarks.records import Record, table, write

SHARED_BYTES = 232_448  # that a block may have on Hopper: 227 KiB
# Products on Hopper, and on other GPUs; of FP8 those with a Q, of int8 those with an I.
PRODUCTS = ("HGMMA", "HMMA", "QGMMA", "QMMA", "UTCQMMA", "IGMMA", "IMMA", "UTCIMMA")
HOT = {*PRODUCTS, "LDGSTS", "UTMALDG"}
COUNTED = (*PRODUCTS, "LDGSTS", "UTMALDG", "STL", "LDL")
COLUMNS = {
    **dict.fromkeys(("operation", "backend", "kernel", "capability", "variant"), ""),
    **dict.fromkeys(("registers", "shared_bytes", "LDGSTS", "UTMALDG", "STL", "LDL"), "d"),
    **dict.fromkeys(("hot_loops", "hot_stores", "hot_loads"), "d"),
}


def why_not_here() -> str | None:
    """Return why no kernel can be compiled and read here, or None."""
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


def reports(case: CompiledCase) -> list[Record]:
    """The resources of the kernels of a case; counts are of instructions in the machine code."""
    return [
        {
            "operation": kernel.__module__.split(".")[-2],
            "backend": kernel.__module__.split(".")[-1],
            "kernel": kernel.__name__.strip("_").removesuffix("_kernel"),
            "capability": case.capability,
            "variant": case.name,
            "hash": compiled.hash,
            **_read(compiled),
        }
        for kernel, compiled in case.compile()
    ]


def _read(compiled: Any) -> Record:
    """The facts in the machine code of a compiled kernel."""
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
    return {
        "registers": max(int(number) for number in re.findall(r"\bREG:(\d+)", usage)),
        "shared_bytes": compiled.metadata.shared,
        **{name: opcodes.count(name) for name in COUNTED},
        "hot_loops": len(loops),
        "hot_stores": in_loops.count("STL"),  # spills inside the hot loops
        "hot_loads": in_loops.count("LDL"),
        # Of one 16-bit number, to and from global memory.
        "single_stores": len(re.findall(r"\bSTG\.\S*U16\b", code)),
        "single_loads": len(re.findall(r"\bLDG\.\S*U16\b", code)),
    }


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Instruction:
    """One line of machine code: where it is, what it does, and where it may jump to."""

    address: int
    opcode: str
    target: int | None = None
    conditional: bool = True


def instructions(code: str) -> list[Instruction]:
    """Those of one function, as cuobjdump prints them."""
    found = []
    line = r"^\s*/\*([0-9a-f]{4,})\*/\s+(@\S+\s+)?([A-Z]\w*)([^;]*);"
    for address, predicate, opcode, rest in re.findall(line, code, re.MULTILINE):
        target = re.search(r"0x([0-9a-f]+)\s*$", rest) if opcode == "BRA" else None
        always = not predicate and re.fullmatch(r"(\.\w+)*\s*0x[0-9a-f]+\s*", rest) is not None
        found.append(
            Instruction(
                int(address, 16),
                opcode,
                int(target[1], 16) if target else None,
                not always if opcode == "BRA" else bool(predicate),
            ),
        )
    return found


def hot_loops(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """The innermost loops of those that do the work of a function.

    A loop is the code between a branch back and its target, with no end of the function in it:
    rarely executed parts, such as waiting for a barrier again, stand behind the end and jump back.
    """
    hot = HOT if any(line.opcode in HOT for line in code) else {"LDG"}
    spans = [
        (line.target, line.address)
        for line in code
        if line.target is not None and line.target <= line.address
    ]
    loops = {span: [line for line in code if span[0] <= line.address <= span[1]] for span in spans}
    working = {
        span: loop
        for span, loop in loops.items()
        if any(line.opcode in hot for line in loop)
        and not any(line.opcode in ("EXIT", "RET") and not line.conditional for line in loop)
    }
    return [
        loop
        for (first, last), loop in working.items()
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in working)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 where a kernel does not compile, 2 where none can be read."""
    parser = argparse.ArgumentParser(description="What the compiled kernels use, without a GPU.")
    parser.add_argument("--json", type=Path, help="also write the reports to this file")
    parser.add_argument("--only", default="", help="only variants whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    args = parser.parse_args(arguments)
    if (reason := why_not_here()) is not None:
        print(reason, file=sys.stderr)
        return 2
    asked = [case for case in cases() if args.only in case.name]
    # A kernel that several calls launch is reported with the first of them.
    reports_of: dict[tuple[str, int], Record] = {}
    failed = False
    # New processes instead of forks: torch and Triton have threads.
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for case, future in [(case, pool.submit(reports, case)) for case in asked]:
            try:
                for report in future.result():
                    reports_of.setdefault((report.pop("hash"), report["capability"]), report)
            except Exception as error:
                failed = True
                print(f"{case.name}: {type(error).__name__}: {error}", file=sys.stderr)
    records = list(reports_of.values())
    print(table(records, COLUMNS))
    if args.json is not None:
        write(records, args.json)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())

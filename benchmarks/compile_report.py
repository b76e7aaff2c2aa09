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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

SHARED_BYTES = 232_448  # that a block may have on Hopper: 227 KiB
COUNTED = ("HGMMA", "HMMA", "LDGSTS", "UTMALDG", "STL", "LDL")
HOT = {"HGMMA", "HMMA", "LDGSTS", "UTMALDG"}
HOT_ELSEWHERE = {"LDG"}
LEAVING = {"BRA", "BRX", "EXIT", "RET"}  # after these another basic block starts

# Types of arguments by name, for plain Triton; Gluon's are in `gluon_compat`, which explains them.
TRITON_TYPES = {
    "(query|key|value|output|kept|residual)_ptr": "*{half}:16",
    "(lse|lse_dense|lse_previous|kept_lse|kept_mass)_ptr": "*fp32:16",
    "column_sums_ptr": "*bf16:16",
    "(query|key|value|output|kept|residual)_stride_[bhnm]": "i32:16",
    "indices_stride_[bhg]": "i32",
    "(indices_stride_k|residual_stride_d)": "i32:1",
    "(indices|counts|static_counts)_ptr": "*i32:16",
    "(mask|packed|static)_ptr": "*u8:16",
    "sums_ptr": "*{half}:16",
    "static_stride_[bhg]": "i32",
    "heads|rows|row_tiles|blocks|first_unit|columns|num_columns": "i32",
    "row_bytes|keep_count|capacity": "i32",
    "block_size_q": "i32:16",
    "strata|seed_state|turns|loose": "i32",
    "scale|rounding": "fp32",
}

# As for all sizes of the MLPs in the named cases, whose blocks have 128 rows.
MLP_TYPES = {
    "(hidden|weight|gate|bias|gate_bias|cache|delta|addend|result|parts|up)_ptr": "*{half}:16",
    "(means|scores)_ptr": "*fp32:16",
    "(cache|addend)_stride_c": "i32:1",
    "(hidden|weight|gate|cache|delta|addend)_stride_[bnfk]|stride_[bf]": "i32:16",
    "indices_stride_[bg]": "i32:16",
    "rows|channels|neurons|capacity|block_size": "i32:16",
    "all_blocks|keep": "i32",
} | TRITON_TYPES
TOP_TYPES = {"cache_ptr": "*fp32:16", "cache_stride_g": "i32:16", "cache_stride_f": "i32:1"}


@dataclass(frozen=True)
class CompiledCase:
    """One kernel as some launch compiles it.

    Attributes:
        operation: folder of the kernel.
        backend: as it is named there.
        variant: what tells the cases of one backend apart.
        default: launched by default: for a block of 128 rows, and the default delta rule.
        compile: to what Triton returns for a compiled kernel.
        capability: 90 for Hopper.
    """

    operation: str
    backend: str
    variant: str
    default: bool
    compile: Callable[[], Any]
    capability: int = 90


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


def cases() -> list[CompiledCase]:
    """Every kernel in all configurations that the launchers choose from."""
    return [*_gluon(), *_triton_attention(), *_selection(), *_packing(), *_residuals(), *_mlp()]


def _gluon() -> Iterator[CompiledCase]:
    from chipsparse.kernels import gluon_compat

    sparse = import_module("chipsparse.kernels.column_sparse_attention.gluon_sm90")
    for head_dim, rows in sparse.CONFIGS:
        for rule, half in ((None, "bf16"), ("merge", "bf16"), ("merge", "fp16")):
            if half == "fp16" and (head_dim, rows) != (128, 128):
                continue
            yield CompiledCase(
                "column_sparse_attention",
                "gluon_sm90",
                f"D{head_dim} rows{rows} {rule or 'none'} {half}",
                rows == 128 and half == "bf16",
                partial(gluon_compat.compile_column_sparse_attention, head_dim, rows, rule, half),
            )
    for head_dim in (64, 128):
        for sums, rows, half in (
            (True, 128, "bf16"),
            (True, 64, "bf16"),
            (False, 128, "bf16"),
            (True, 128, "fp16"),
        ):
            yield CompiledCase(
                "dense_attention_column_sums",
                "gluon_sm90",
                f"D{head_dim} rows{rows} {'sums' if sums else 'no sums'} {half}",
                sums and rows == 128 and half == "bf16",
                partial(
                    gluon_compat.compile_dense_attention_column_sums,
                    head_dim,
                    with_column_sums=sums,
                    part_rows=rows,
                    half=half,
                ),
            )
    for activation, even, half in (
        ("gelu-tanh", True, "bf16"),
        ("gelu", True, "bf16"),
        ("silu", False, "bf16"),
        ("gelu-tanh", False, "fp16"),
    ):
        yield CompiledCase(
            "sparse_mlp_up",
            "gluon_sm90",
            f"{activation}{'' if even else ' ragged'} {half}",
            even and activation == "gelu-tanh",
            partial(gluon_compat.compile_sparse_mlp_up, activation, even=even, half=half),
        )
    for addend, even, half in ((False, True, "bf16"), (True, True, "bf16"), (True, False, "fp16")):
        yield CompiledCase(
            "sparse_mlp_down",
            "gluon_sm90",
            f"{'addend' if addend else 'alone'}{'' if even else ' ragged'} {half}",
            even,
            partial(gluon_compat.compile_sparse_mlp_down, addend=addend, even=even, half=half),
        )


def _triton_attention() -> Iterator[CompiledCase]:
    for capability in (90, 80):
        for head_dim in (64, 128):
            for rule in ("none", "merge"):
                yield CompiledCase(
                    "column_sparse_attention",
                    "triton",
                    f"D{head_dim} {rule} bf16",
                    True,
                    partial(_triton_sparse, head_dim, rule, capability),
                    capability,
                )
            for sums in (True, False):
                yield CompiledCase(
                    "dense_attention_column_sums",
                    "triton",
                    f"D{head_dim} {'sums' if sums else 'no sums'} bf16",
                    sums,
                    partial(_triton_dense, head_dim, sums, capability),
                    capability,
                )


def _triton_sparse(head_dim: int, rule: str, capability: int) -> Any:
    module = import_module("chipsparse.kernels.column_sparse_attention.triton_kernel")
    constants = {"HEAD_DIM": head_dim, "RULE": rule, "WIDE_OFFSETS": False, "WIDE_PRODUCTS": False}
    return _triton(
        module,
        "_column_sparse_attention_kernel",
        constants | _config(module, head_dim, capability),
        capability,
    )


def _triton_dense(head_dim: int, with_column_sums: bool, capability: int) -> Any:
    module = import_module("chipsparse.kernels.dense_attention_column_sums.triton_kernel")
    constants = {
        "HEAD_DIM": head_dim,
        "WITH_COLUMN_SUMS": with_column_sums,
        "WIDE_PRODUCTS": False,
    }
    return _triton(
        module,
        "_dense_attention_column_sums_kernel",
        constants | _config(module, head_dim, capability),
        capability,
    )


def _config(module: Any, head_dim: int, capability: int) -> dict[str, Any]:
    """The default configuration of a device that is not there."""
    import torch

    class Query:
        device = torch.device("cuda", 0)
        shape = (1, 1, 1, head_dim)

    real = getattr(module, "compute_capability", None)
    module.compute_capability = lambda _: divmod(capability, 10)
    try:
        return dict(module.CONFIGS[module.default_config(Query)])
    finally:
        module.compute_capability = real


def _selection() -> Iterator[CompiledCase]:
    for half, even, static in (
        ("bf16", True, False),
        ("bf16", True, True),
        ("bf16", False, False),
        ("fp32", True, False),
    ):
        yield CompiledCase(
            "column_selection",
            "triton",
            f"select {half}{' ragged' * (not even)}{' static' * static}",
            half == "bf16" and even,
            partial(_select, half, even, static),
        )
    for wide in (False, True):
        variant = f"draw{' wide' * wide}"
        yield CompiledCase("column_selection", "triton", variant, not wide, partial(_draw, wide))


def _select(half: str, even: bool, static: bool) -> Any:
    module = import_module("chipsparse.kernels.column_selection.triton_kernel")
    packed = even and half != "fp32"  # compares two 16-bit sums by one instruction
    constants = {
        "INFINITY": 0x7C00 if half == "fp16" else 0x7F80,
        "EVEN": even,
        "STATIC": static,
        "PACKED": packed,
        "BYTES": module.TILE_BYTES if even else module.TILE_BYTES // 2,
        "SAMPLE": module.SAMPLE_BYTES,
        "num_warps": module.SELECT_WARPS,
        **(module.OCCUPANCY if packed else {}),
    }
    return _triton(module, "_select_kernel", constants, half=half)


def _draw(wide: bool) -> Any:
    module = import_module("chipsparse.kernels.column_selection.triton_kernel")
    constants = {"WIDE": wide, "STRATA": module.STRATA, "num_warps": module.DRAW_WARPS}
    return _triton(module, "_draw_kernel", constants)


def _packing() -> Iterator[CompiledCase]:
    for kernel in ("pack", "unpack"):
        for even in (True, False):
            variant = f"{kernel}{' ragged' * (not even)}"
            yield CompiledCase(
                "mask_packing", "triton", variant, True, partial(_pack, kernel, even)
            )
    for kernel in ("count", "list"):
        yield CompiledCase("mask_packing", "triton", kernel, True, partial(_pack, kernel, True))


def _residuals() -> Iterator[CompiledCase]:
    for half in ("bf16", "fp32"):
        for head_dim in (64, 128):
            variant = f"D{head_dim} {half}"
            yield CompiledCase(
                "merge_residual", "triton", variant, True, partial(_residual, head_dim, half)
            )


def _residual(head_dim: int, dtype: str) -> Any:
    module = import_module("chipsparse.kernels.merge_residual.triton_kernel")
    constants = {
        "WIDTH": head_dim,
        "ROWS": module.TILE_ELEMENTS // head_dim,
        "COLUMNS": head_dim,
        "num_warps": module.WARPS,
    }
    return _triton(module, "_residual_kernel", constants, half=dtype)


def _pack(kernel: str, even: bool) -> Any:
    module = import_module("chipsparse.kernels.mask_packing.triton_kernel")
    sizes = {
        "pack": {"EVEN": even, "BYTES": module.PACK_BYTES, "num_warps": module.PACK_WARPS},
        "unpack": {"EVEN": even, "BYTES": module.PACK_BYTES, "num_warps": module.PACK_WARPS},
        "count": {"WORDS": module.COUNT_WORDS, "num_warps": module.COUNT_WARPS},
        "list": {"STAGED": True, "num_warps": 1},
    }
    return _triton(module, f"_{kernel}_kernel", sizes[kernel])


def _mlp() -> Iterator[CompiledCase]:
    up, down, selection = map(_mlp_module, ("sparse_mlp_up", "sparse_mlp_down", "neuron_selection"))
    for capability in (90, 80):
        with _pretended(up, capability), _pretended(down, capability):
            defaults = {gated: up.default_config(_OnGpu, gated=gated) for gated in (False, True)}
            down_default = down.default_config(_OnGpu)
        with _pretended(selection, capability):
            products = {
                (selection.default_product_config(_OnGpu, blocks, gated=gated), gated)
                for blocks in (32, 64, 256)
                for gated in (False, True)
            }
        for name, config in up.CONFIGS.items():
            for gated in (False, True):
                if not _sums_fit(config, 1 + gated, capability):
                    continue
                yield CompiledCase(
                    "sparse_mlp_up",
                    "triton",
                    f"{name}{' gated' * gated} bf16",
                    name == defaults[gated],
                    partial(_mlp_up, name, gated, capability),
                    capability,
                )
        for name, config in down.CONFIGS.items():
            if not _sums_fit(config, 1, capability):
                continue
            yield CompiledCase(
                "sparse_mlp_down",
                "triton",
                f"{name} bf16",
                name == down_default,
                partial(_mlp_down, name, capability),
                capability,
            )
        for name in selection.PRODUCT_CONFIGS:
            for gated in (False, True):
                if gated and (name, gated) not in products:
                    continue  # two weights at a time leave the larger tiles no room
                yield CompiledCase(
                    "neuron_selection",
                    "triton",
                    f"product {name}{' gated' * gated} bf16",
                    (name, gated) in products,
                    partial(_mean_product, name, gated, capability),
                    capability,
                )
    yield CompiledCase("sparse_mlp_up", "triton", "activate bf16", True, _mlp_activate)
    for name in selection.MEAN_CONFIGS:
        yield CompiledCase(
            "neuron_selection", "triton", f"means {name} bf16", True, partial(_means, name)
        )
    for block, warps in selection.TOP_WARPS:
        for part in sorted({min(block, selection.TOP_PART), block}):
            yield CompiledCase(
                "neuron_selection",
                "triton",
                f"top {part} of {block}",
                block <= 16384,
                partial(_top, block, part, warps),
            )


def _sums_fit(config: Mapping[str, int], products: int, capability: int) -> bool:
    """Whether a configuration is meant for that: Ampere keeps factors in registers as well."""
    sums = products * config["BLOCK_M"] * config["BLOCK_N"] // (32 * config["num_warps"])
    return sums <= config.get("maxnreg", 256) // (2 if capability >= 90 else 4)


class _OnGpu:
    """A tensor of a device that is not there, as a choice of a configuration looks at it."""

    device = None


def _mlp_module(operation: str) -> Any:
    return import_module(f"chipsparse.kernels.{operation}.triton_kernel")


@contextmanager
def _pretended(module: Any, capability: int) -> Iterator[None]:
    real = module.has_large_shared_memory
    module.has_large_shared_memory = lambda _: capability >= 90
    try:
        yield
    finally:
        module.has_large_shared_memory = real


def _mlp_up(name: str, gated: bool, capability: int) -> Any:
    module = _mlp_module("sparse_mlp_up")
    constants = {
        "ACTIVATION": "silu" if gated else "gelu-tanh",
        "GATED": gated,
        "BIAS": True,
        "GATE_BIAS": gated,
        "COUNTS": False,
        "EVEN_ROWS": True,
        "EVEN_CHANNELS": True,
        "WIDE_PRODUCTS": False,
        **module.CONFIGS[name],
    }
    return _triton(module, "_sparse_mlp_up_kernel", constants, capability, types=MLP_TYPES)


def _mlp_activate() -> Any:
    module = _mlp_module("sparse_mlp_up")
    constants = {
        "ACTIVATION": "gelu-tanh",
        "GATED": False,
        "BIAS": True,
        "GATE_BIAS": False,
        "TOKENS": module.ACTIVATE_TOKENS,
        "NEURONS": module.ACTIVATE_NEURONS,
        "num_warps": module.ACTIVATE_WARPS,
    }
    return _triton(module, "_activate_kernel", constants, types=MLP_TYPES)


def _mlp_down(name: str, capability: int) -> Any:
    module = _mlp_module("sparse_mlp_down")
    constants = {
        "ADDEND": True,
        "COUNTS": False,
        "EVEN_ROWS": True,
        "EVEN_CHANNELS": True,
        "EVEN_NEURONS": True,
        "WIDE_OFFSETS": False,
        "WIDE_PRODUCTS": False,
        **module.CONFIGS[name],
    }
    return _triton(module, "_sparse_mlp_down_kernel", constants, capability, types=MLP_TYPES)


def _means(name: str) -> Any:
    module = _mlp_module("neuron_selection")
    return _triton(module, "_means_kernel", module.MEAN_CONFIGS[name], types=MLP_TYPES)


def _mean_product(name: str, gated: bool, capability: int) -> Any:
    module = _mlp_module("neuron_selection")
    constants = {
        "ACTIVATION": "silu" if gated else "none",
        "GATED": gated,
        "BIAS": True,
        "GATE_BIAS": gated,
        "SCORES": True,
        "EVEN_CHANNELS": True,
        "WIDE_PRODUCTS": False,
        **module.PRODUCT_CONFIGS[name],
    }
    types = TOP_TYPES | MLP_TYPES
    return _triton(module, "_product_kernel", constants, capability, types=types)


def _top(block: int, part: int, warps: int) -> Any:
    module = _mlp_module("neuron_selection")
    constants = {"BLOCK": block, "PART": part, "num_warps": warps}
    return _triton(module, "_top_kernel", constants, types=TOP_TYPES | MLP_TYPES)


def _triton(
    module: Any,
    name: str,
    constants: dict[str, Any],
    capability: int = 90,
    *,
    half: str = "bf16",
    types: Mapping[str, str] = TRITON_TYPES,
) -> Any:
    from chipsparse.kernels.gluon_compat import compile_kernel

    options = {key: constants.get(key) for key in ("num_warps", "maxnreg")}
    return compile_kernel(
        getattr(module, name),
        types,
        constants,
        options=options,
        half=half,
        capability=capability,
    )


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
    )


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
            )
        )
    return found


def hot_loops(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """The innermost loops of those that do the work of a function."""
    hot = HOT if any(each.opcode in HOT for each in code) else HOT_ELSEWHERE
    blocks, loops = natural_loops(code)
    working = [
        loop for loop in loops if any(each.opcode in hot for b in loop for each in blocks[b])
    ]
    return [
        [each for block in sorted(loop) for each in blocks[block]]
        for loop in working
        if not any(other < loop for other in working)
    ]


def natural_loops(
    code: Sequence[Instruction],
) -> tuple[list[list[Instruction]], list[frozenset[int]]]:
    """Basic blocks, and the loops as sets of their numbers.

    A branch back to a block that every way here came through closes a loop. Others jump back too:
    rarely executed parts, such as waiting for a barrier again, stand at the end of the code.
    """
    starts = {code[0].address} | {each.target for each in code if each.target is not None}
    blocks: list[list[Instruction]] = []
    for each in code:
        if each.address in starts or not blocks or blocks[-1][-1].opcode in LEAVING:
            blocks.append([])
        blocks[-1].append(each)
    number = {block[0].address: index for index, block in enumerate(blocks)}
    after: list[set[int]] = []
    for index, block in enumerate(blocks):
        last = block[-1]
        ways = {number[last.target]} if last.target in number else set()
        if last.conditional or last.opcode not in LEAVING:
            ways |= {index + 1} & set(range(len(blocks)))
        after.append(ways)
    # What nothing else leads to is jumped to by an address that was computed: a part of the warps.
    entries, reached = [0], _reached(after, [0])
    while len(reached) < len(blocks):
        entries.append(min(set(range(len(blocks))) - reached))
        reached = _reached(after, entries)
    before = [{way for way, ways in enumerate(after) if i in ways} for i in range(len(blocks))]

    # The blocks on every way to a block.
    on_every_way = [frozenset(range(len(blocks)))] * len(blocks)
    changed = True
    while changed:
        changed = False
        for index, ways in enumerate(before):
            common = [] if index in entries else [on_every_way[way] for way in ways]
            new = frozenset({index}).union(frozenset.intersection(*common) if common else ())
            changed |= new != on_every_way[index]
            on_every_way[index] = new

    loops: dict[int, set[int]] = {}
    for head, ways in enumerate(before):
        for tail in ways:
            if head in on_every_way[tail]:
                # All from which the branch back can be reached without passing the head.
                within = [set() if index == head else each for index, each in enumerate(before)]
                loops.setdefault(head, {head}).update(_reached(within, [tail]))
    return blocks, [frozenset(body) for body in loops.values()]


def _reached(after: Sequence[set[int]], entries: Iterable[int]) -> set[int]:
    """The blocks that some way from the entries leads to."""
    reached: set[int] = set()
    waiting = list(entries)
    while waiting:
        block = waiting.pop()
        if block not in reached:
            reached.add(block)
            waiting.extend(after[block])
    return reached


def table(reports: Iterable[Report]) -> str:
    """One line per kernel; spills as stores+loads, in all and in hot loops."""
    lines = [
        f"{'kernel':76} {'regs':>4} {'shared':>7} {'HGMMA':>5} {'HMMA':>5} {'LDGSTS':>6} "
        f"{'UTMALDG':>7} {'loops':>5} {'spills':>9} {'in loops':>9}"
    ]
    for each in reports:
        name = f"{each.operation} {each.backend} sm_{each.capability} {each.variant}"
        count = each.counts
        lines.append(
            f"{name + ' *' * each.default:76} {each.registers:4} {each.shared_bytes:7} "
            f"{count['HGMMA']:5} {count['HMMA']:5} {count['LDGSTS']:6} {count['UTMALDG']:7} "
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
        case
        for case in cases()
        if (case.default or not args.default)
        and args.only in f"{case.operation} {case.backend} sm_{case.capability} {case.variant}"
    ]
    reports, failed = [], False
    # New processes instead of forks: torch and Triton have threads.
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for case, future in [(case, pool.submit(report, case)) for case in chosen]:
            try:
                reports.append(future.result())
            except Exception as error:
                failed = True
                name = f"{case.operation} {case.backend} sm_{case.capability} {case.variant}"
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    print(table(reports))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(each) for each in reports], indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())

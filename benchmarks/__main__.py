"""``python -m benchmarks --op full_size``: runs benchmarks, prints and writes their records.

Kernel operations take ``--op`` and ``--case`` as comma-separated names, as in ``--op
column_sparse_attention,column_selection --case hunyuan_32k,flux_1280x768``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from benchmarks import attention_curve, full_size, kernel_runs, offload
from benchmarks.equal_work import command as equal_work
from benchmarks.records import table
from benchmarks.run import Run
from chipsparse.profiles.profile import ASSETS, bundled_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Each has ``run(args, device, dtype, to)`` and the ``COLUMNS`` of its table, or prints one itself.
MODULES: dict[str, ModuleType] = {
    "attention_curve": attention_curve,
    "full_size": full_size,
    "offload": offload,
    "equal_work": equal_work,
    **dict.fromkeys(kernel_runs.OPS, kernel_runs),
}
OPS = (*MODULES, *kernel_runs.GROUPS)
# The dtype on a GPU and on a CPU, where none is asked for; that of kernels is bfloat16.
DEFAULTS = {
    "equal_work": ("float16", "float32"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the arguments ask for; returns 1 where any of it failed."""
    args = parse(arguments)
    device = torch.device(args.device)
    run = Run(args.json)
    named: dict[ModuleType, str] = {}
    for op in args.ops:
        named.setdefault(MODULES[op], op)  # kernels are run together, case after case
    for module, op in named.items():
        default = DEFAULTS.get(op, ("bfloat16", "bfloat16"))[device.type == "cpu"]
        before = len(run.records)
        module.run(args, device, DTYPES[args.dtype or default], run)
        if hasattr(module, "COLUMNS"):
            print(table(run.records[before:], module.COLUMNS))
    if run.failed:
        print("FAILED: " + "; ".join(run.failed))
    return 1 if run.failed else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of all benchmarks; ``ops`` are the names that ``--op`` joins."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--op", required=True, help=f"comma-separated: {', '.join(OPS)}")
    parser.add_argument(
        "--case",
        help="only these kernel cases, or what equal_work compares whose 'method, variant, "
        "setting' holds this regular expression",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="default: bfloat16 for kernels, float32 for clips on a CPU"
    )
    parser.add_argument("--json", type=Path, help="write the records here")
    parser.add_argument("--figure", type=Path, help="write a PNG of the curves (attention_curve)")
    for module in (kernel_runs, full_size, offload, equal_work):
        module.add_arguments(parser)
    group = parser.add_argument_group("pipelines")
    group.add_argument("--model", type=Path, default=bundled_model())
    group.add_argument("--prompts", type=Path, default=ASSETS / "prompts" / "shapes.txt")
    group.add_argument("--count", type=int, default=16, help="how many prompts")
    group.add_argument(
        "--first", type=int, default=0, help="number of the first one (equal_work), from 0"
    )
    group.add_argument(
        "--sheet", type=Path, help="write a contact sheet of a prompt's clips (equal_work)"
    )
    default = "default the profile's (equal_work)"
    group.add_argument("--steps", type=int, help=f"denoising steps, {default}")
    args = parser.parse_args(arguments)
    args.ops = [op for name in args.op.split(",") for op in kernel_runs.GROUPS.get(name, (name,))]
    for op in args.ops:
        if op not in MODULES:
            parser.error(f"unknown op {op!r}; there are {', '.join(OPS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())

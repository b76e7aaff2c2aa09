"""``python -m benchmarks COMMAND``: measures, prints a table, writes records.

`benchmarks/README.md` names the command of each record under `benchmarks/results/`. Each command
has ``--tiny``: a dry run on a CPU with few tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from benchmarks import kernels, noisy_samplers, steps
from benchmarks.moving_photographs import evaluate
from benchmarks.records import Run, table

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Command(NamedTuple):
    """The measuring function, the options of its module, its table, dtypes on a GPU and a CPU."""

    run: Callable[..., None]
    module: ModuleType
    columns: dict[str, str] | None = None
    dtypes: tuple[str, str] = ("bfloat16", "bfloat16")


COMMANDS = {
    "kernels": Command(kernels.run, kernels, kernels.COLUMNS),
    "curve": Command(kernels.run_curve, kernels, kernels.COLUMNS),
    "steps": Command(steps.run, steps, steps.COLUMNS),
    "offload": Command(steps.run_offload, steps, steps.OFFLOAD_COLUMNS),
    "parallel": Command(steps.run_parallel, steps, dtypes=("bfloat16", "float32")),
    "noisy-samplers": Command(
        noisy_samplers.run,
        noisy_samplers,
        noisy_samplers.COLUMNS,
        ("float32", "float32"),
    ),
    "photographs": Command(evaluate.run, evaluate, dtypes=("bfloat16", "float32")),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the arguments ask for; returns 1 where any of it failed."""
    args = parse(arguments)
    command = COMMANDS[args.command]
    device = torch.device(args.device)
    to = Run(args.json)
    dtype = DTYPES[args.dtype or command.dtypes[device.type == "cpu"]]
    with to.attempt(args.command):
        command.run(args, device, dtype, to)
    if command.columns is not None:
        print(table(to.records, command.columns))
    if to.failed:
        print("FAILED: " + "; ".join(to.failed))
    return 1 if to.failed else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of all commands."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        one = commands.add_parser(name, help=(command.run.__doc__ or "").strip())
        command.module.add_arguments(one)
        one.add_argument("--tiny", action="store_true", help="few tokens: a dry run on a CPU")
        one.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        one.add_argument("--dtype", choices=DTYPES)
        one.add_argument("--json", type=Path, help="write the records here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

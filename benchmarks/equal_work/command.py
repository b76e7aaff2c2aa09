"""The options of ``python -m benchmarks --op equal_work``, and its run."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

import torch

from benchmarks.equal_work.curves import compared
from benchmarks.equal_work.tables import text_of
from benchmarks.records import Run

ROLES = ("calibrating", "compared")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options; model, prompts, steps, sheet, first and count are those of pipelines."""
    group = parser.add_argument_group("equal_work")
    group.add_argument("--role", choices=ROLES, default="compared", help="what the clips are for")
    group.add_argument(
        "--profiles", type=Path, nargs="*", default=[], help="of ours, tuned on other prompts"
    )
    group.add_argument("--size", type=size, help="HEIGHTxWIDTH[xFRAMES], default the profile's")
    group.add_argument("--flow-shift", type=float, help="of noise levels, default the scheduler's")
    group.add_argument(
        "--part", type=part, default=(0, 1), help="I/N: every N-th prompt or setting, from I on"
    )
    group.add_argument(
        "--known", type=Path, nargs="*", default=[], help="files of records to go on from"
    )
    group.add_argument(
        "--calibration",
        type=Path,
        nargs="*",
        default=[],
        help="files of calibrating records of another size, to choose settings by",
    )
    group.add_argument(
        "--again",
        type=Path,
        nargs="*",
        default=[],
        help="files of records: of other methods only the settings that these compare",
    )
    group.add_argument("--calibrating", type=int, default=0, help="number of that prompt, from 0")
    group.add_argument("--best", type=int, help="only so many rivals at each share of the work")
    group.add_argument(
        "--limit", type=float, default=math.inf, help="seconds after which no clip is begun"
    )
    group.add_argument("--compile", action="store_true", help="compile blocks on a CPU, too")


def run(args: argparse.Namespace, device: torch.device, dtype: torch.dtype, results: Run) -> None:
    """Generates what the results lack."""
    from benchmarks.clips import Workload
    from benchmarks.equal_work import run as bench  # imports diffusers

    with results.attempt("equal_work"):
        prompts = args.prompts.read_text(encoding="utf-8").splitlines()
        shift = args.flow_shift
        workload = Workload(args.model, prompts, device, dtype, flow_shift=shift)
        bench.run(args, workload, results)
    print(text_of(compared(results.records)))


def size(text: str) -> tuple[int, ...]:
    """Pixels of a picture or a video."""
    if not re.fullmatch(r"\d+x\d+(x\d+)?", text):
        raise argparse.ArgumentTypeError(f"must be like 256x256x65, got {text!r}")
    return tuple(map(int, text.split("x")))


def part(text: str) -> tuple[int, int]:
    """Which part of how many."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"must be like 0/4 to 3/4, got {text!r}")
    return int(found[1]), int(found[2])

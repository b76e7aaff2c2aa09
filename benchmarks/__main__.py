"""``python -m benchmarks --op quality``: runs benchmarks, prints and writes their records.

Kernel operations take ``--op`` and ``--case`` as comma-separated names, as in ``--op
column_sparse_attention,column_selection --case hunyuan_32k,flux_1280x768``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import (
    attention_curve,
    captured_mass,
    end_to_end,
    full_size,
    kernel_runs,
    mlp_writeback,
    offload,
    quality,
    transformer_step,
)
from benchmarks.clips import Workload
from benchmarks.contact_sheet import contact_sheet
from benchmarks.equal_work import command as equal_work
from benchmarks.kernel_runs import OPS
from benchmarks.records import Record, table
from benchmarks.run import Run
from benchmarks.soak import command as soak
from chipsparse.profiles.profile import ASSETS, bundled_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COLUMNS = {
    "quality": quality.COLUMNS,
    "end_to_end": end_to_end.COLUMNS,
    "captured_mass": captured_mass.COLUMNS,
    "attention_curve": kernel_runs.COLUMNS,
    "transformer_step": transformer_step.COLUMNS,
    "full_size": full_size.COLUMNS,
    "offload": offload.COLUMNS,
    "mlp_writeback": mlp_writeback.COLUMNS,
    "soak": soak.COLUMNS,
    "equal_work": {},  # prints tables of its own
    **dict.fromkeys(OPS, kernel_runs.COLUMNS),
}
PIPELINE_OPS = ("quality", "end_to_end", "captured_mass")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the arguments ask for; returns 1 where any of it failed."""
    args = parse(arguments)
    device = torch.device(args.device)
    run = Run(args.json)
    ops = args.op.split(",")
    kernels = [op for op in ops if op in OPS]
    if kernels:
        kernel_runs.run(kernels, args, device, DTYPES[args.dtype or "bfloat16"], run)
    if "attention_curve" in ops:
        attention_curve.run(args, device, DTYPES[args.dtype or "bfloat16"], run)
        if args.figure is not None:
            with run.attempt("figure"):  # matplotlib may be missing where only kernels are measured
                from benchmarks import curve_figure

                curve_figure.draw(run.records).savefig(args.figure)
    if "transformer_step" in ops:
        transformer_step.run(args, device, DTYPES[args.dtype or "bfloat16"], run)
    if "full_size" in ops:
        full_size.run(args, device, DTYPES[args.dtype or "bfloat16"], run)
    if "offload" in ops:
        offload.run(args, device, DTYPES[args.dtype or "bfloat16"], run)
    if "mlp_writeback" in ops:
        mlp_writeback.run(args, device, DTYPES[args.dtype or "bfloat16"], run)
    if "soak" in ops:
        default = "float32" if device.type == "cpu" else "bfloat16"
        soak.run(args, device, DTYPES[args.dtype or default], run)
    if "equal_work" in ops:
        default = "float32" if device.type == "cpu" else "float16"
        equal_work.run(args, device, DTYPES[args.dtype or default], run)
    pipeline_ops = [op for op in ops if op in PIPELINE_OPS]
    if pipeline_ops:
        last = args.first + args.count
        prompts = args.prompts.read_text(encoding="utf-8").splitlines()[:last]
        workload = Workload(args.model, prompts, device, DTYPES[args.dtype or "float32"])
        for op in pipeline_ops:
            with run.attempt(op):
                run_pipeline(op, workload, args, run)
    for columns in {id(COLUMNS[op]): COLUMNS[op] for op in ops}.values():
        shown = [record for record in run.records if columns_of(record) is columns]
        if columns is soak.COLUMNS:
            shown = [row for record in shown for row in soak.rows(record)]
        if columns:
            print(table(shown, columns))
    if run.failed:
        print("FAILED: " + "; ".join(run.failed))
    return 1 if run.failed else 0


def columns_of(record: Record) -> dict[str, str]:
    """The columns of a record's table: those of its op, unless it names the benchmark."""
    return COLUMNS[record.get("benchmark", record["op"])]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--op", required=True, help=f"comma-separated: {', '.join(COLUMNS)}")
    parser.add_argument(
        "--case",
        help="only these kernel cases, or the quality cases whose name contains this, or what "
        "equal_work compares whose 'method, variant, setting' holds this regular expression",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="default: bfloat16 for kernels, float32 for pipelines"
    )
    parser.add_argument("--json", type=Path, help="write the records here")
    parser.add_argument("--figure", type=Path, help="write a PNG of the curves (attention_curve)")
    kernel_runs.add_arguments(parser)
    transformer_step.add_arguments(parser)
    full_size.add_arguments(parser)
    offload.add_arguments(parser)
    soak.add_arguments(parser)
    equal_work.add_arguments(parser)
    group = parser.add_argument_group("pipelines")
    group.add_argument("--model", type=Path, default=bundled_model())
    group.add_argument("--prompts", type=Path, default=ASSETS / "prompts" / "shapes.txt")
    group.add_argument("--count", type=int, default=16, help="how many prompts")
    group.add_argument(
        "--first", type=int, default=0, help="number of the first one (equal_work, soak), from 0"
    )
    group.add_argument(
        "--sheet",
        type=Path,
        help="write a contact sheet: of dense clips (quality), of a prompt's clips (equal_work)",
    )
    default = "default the profile's (equal_work)"
    group.add_argument("--steps", type=int, help=f"denoising steps, {default}")
    args = parser.parse_args(arguments)
    for op in args.op.split(","):
        if op not in COLUMNS:
            parser.error(f"unknown op {op!r}; there are {', '.join(COLUMNS)}")
    return args


def run_pipeline(op: str, workload: Workload, args: argparse.Namespace, run: Run) -> None:
    if op == "quality":
        records, dense = quality.run(workload, only=args.case, save=run.save)
        if args.sheet is not None:
            contact_sheet(dense.frames).save(args.sheet)
    elif op == "end_to_end":
        records = end_to_end.run(workload)
    else:
        steps = workload.settings().get("num_inference_steps", 50)
        records = captured_mass.run(workload, steps=steps, every=12)
    run.add(*records)


if __name__ == "__main__":
    sys.exit(main())

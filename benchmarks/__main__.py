"""``python -m benchmarks --op quality``: runs one benchmark, prints and writes its records."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks import captured_mass, end_to_end, quality
from benchmarks.clips import Clips, Workload
from benchmarks.records import Record, table, write
from chipsparse.profiles import ASSETS, bundled_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--op", choices=("quality", "end_to_end", "captured_mass"), required=True)
    parser.add_argument("--case", help="only the cases whose name contains this (quality)")
    parser.add_argument("--model", type=Path, default=bundled_model())
    parser.add_argument("--prompts", type=Path, default=ASSETS / "prompts" / "shapes.txt")
    parser.add_argument("--count", type=int, default=16, help="how many prompts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--json", type=Path, help="write the records here")
    parser.add_argument("--sheet", type=Path, help="write a contact sheet of dense clips (quality)")
    args = parser.parse_args()

    prompts = args.prompts.read_text(encoding="utf-8").splitlines()[: args.count]

    def save(records: list[Record]) -> None:
        if args.json is not None:
            write(records, args.json)

    workload = Workload(args.model, prompts, torch.device(args.device), DTYPES[args.dtype])
    if args.op == "quality":
        records, dense = quality.run(workload, only=args.case, save=save)
        columns = quality.COLUMNS
        if args.sheet is not None:
            contact_sheet(dense).save(args.sheet)
    elif args.op == "end_to_end":
        records, columns = end_to_end.run(workload), end_to_end.COLUMNS
    else:
        steps = workload.settings().get("num_inference_steps", 50)
        records, columns = captured_mass.run(workload, steps=steps, every=12), captured_mass.COLUMNS
    save(records)
    print(table(records, columns))


def contact_sheet(clips: Clips, *, frames: int = 8):
    """One row per clip, evenly spaced frames from left to right."""
    from PIL import Image

    picked = torch.linspace(0, clips.frames.shape[1] - 1, frames).round().long()
    rows = clips.frames.cpu()[:, picked].permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)
    return Image.fromarray((rows * 255).round().byte().numpy())


if __name__ == "__main__":
    main()

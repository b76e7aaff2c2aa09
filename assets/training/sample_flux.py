"""A contact sheet of prompts through an exported pipeline folder.

    python sample_flux.py --pipeline ../tiny-flux --out samples.webp

Image number n of the sheet has seed SEED + n. Runs on a GPU where there is one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import save_sheet
from diffusers import DiffusionPipeline
from flux_common import sample_images, still_sheet

PROMPTS = Path(__file__).resolve().parents[1] / "prompts" / "images.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pipeline", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the WebP to write")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="one prompt a line")
    parser.add_argument("--count", type=int, help="the first so many prompts; default: all")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pipeline = DiffusionPipeline.from_pretrained(args.pipeline).to(device)
    prompts = args.prompts.read_text().splitlines()[: args.count]
    images = sample_images(pipeline, prompts, steps=args.steps, seed=args.seed)
    save_sheet(still_sheet(images, prompts), args.out)


if __name__ == "__main__":
    main()

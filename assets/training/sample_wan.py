"""A contact sheet of prompts through an exported pipeline folder, at any size.

    python sample_wan.py --pipeline ../tiny-wan --size 256x65 --out samples.webp

Clip number n of the prompts has seed SEED + n. Nine frames are shown, scaled down to 128x128.
Runs on a GPU where there is one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from common import contact_sheet
from diffusers import DiffusionPipeline

PROMPTS = Path(__file__).resolve().parents[1] / "prompts" / "shapes.txt"
SHOWN_SIDE, SHOWN_FRAMES = 128, 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pipeline", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the WebP to write")
    parser.add_argument("--size", default="128x33", help="SIDExFRAMES")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="one prompt a line")
    parser.add_argument("--first", type=int, default=0, help="number of the first prompt")
    parser.add_argument("--count", type=int, help="so many prompts; default: all")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of prompt number 0")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.float16) if cuda else ("cpu", torch.float32)
    pipeline = DiffusionPipeline.from_pretrained(args.pipeline, torch_dtype=dtype).to(device)
    pipeline.vae.to(torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    side, frames = map(int, args.size.split("x"))
    prompts = args.prompts.read_text().splitlines()
    numbers = list(range(len(prompts)))[args.first :][: args.count]
    clips = []
    for number in numbers:
        clip = pipeline(
            prompts[number],
            height=side,
            width=side,
            num_frames=frames,
            num_inference_steps=args.steps,
            guidance_scale=4.0,
            max_sequence_length=64,
            generator=torch.Generator(device).manual_seed(args.seed + number),
            output_type="pt",
        ).frames[0]  # (F, 3, H, W) in [0, 1]
        picked = clip[torch.linspace(0, len(clip) - 1, min(SHOWN_FRAMES, len(clip))).long()]
        shown = F.interpolate(picked.float(), size=(SHOWN_SIDE, SHOWN_SIDE), mode="area")
        clips.append(shown.mul(2).sub(1).permute(1, 0, 2, 3).cpu())
    contact_sheet(torch.stack(clips), [prompts[n] for n in numbers], args.out, every=1)


if __name__ == "__main__":
    main()

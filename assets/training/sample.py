"""A contact sheet of prompts through an exported pipeline folder, of clips at any size.

    python sample.py --pipeline ../tiny-wan --size 256x65 --out samples.webp
    python sample.py --pipeline ../tiny-flux --out samples.webp

Clip or image number n of the prompts has seed SEED + n. Nine frames of a clip are shown, scaled
down to 128x128. Runs on a GPU where there is one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from common import clip_sheet, save_sheet, still_sheet
from diffusers import DiffusionPipeline
from flux_common import sample_images

PROMPTS = Path(__file__).resolve().parents[1] / "prompts"
SHOWN_SIDE, SHOWN_FRAMES = 128, 9


def sample_clips(
    pipeline: DiffusionPipeline,
    prompts: list[str],
    *,
    size: str,
    steps: int,
    seed: int,
    guidance: float,
) -> torch.Tensor:
    """Some frames (B, 3, F, 128, 128), in [-1, 1], of a clip per prompt; seeds count up."""
    pipeline.vae.to(torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    side, frames = map(int, size.split("x"))
    clips = []
    for number, prompt in enumerate(prompts):
        clip = pipeline(
            prompt,
            height=side,
            width=side,
            num_frames=frames,
            num_inference_steps=steps,
            guidance_scale=guidance,
            max_sequence_length=64,
            generator=torch.Generator(pipeline.device).manual_seed(seed + number),
            output_type="pt",
        ).frames[0]  # (F, 3, H, W) in [0, 1]
        picked = clip[torch.linspace(0, len(clip) - 1, min(SHOWN_FRAMES, len(clip))).long()]
        shown = F.interpolate(picked.float(), size=(SHOWN_SIDE, SHOWN_SIDE), mode="area")
        clips.append(shown.mul(2).sub(1).permute(1, 0, 2, 3).cpu())
    return torch.stack(clips)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pipeline", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the WebP to write")
    parser.add_argument("--size", default="128x33", help="SIDExFRAMES of clips")
    parser.add_argument("--prompts", type=Path, help="one prompt a line")
    parser.add_argument("--first", type=int, default=0, help="number of the first prompt")
    parser.add_argument("--count", type=int, help="so many prompts; default: all")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of prompt number 0")
    parser.add_argument("--shift", type=float, help="of the noise levels; default: the scheduler's")
    parser.add_argument("--guidance", type=float, default=4.0, help="of clips; 1 for none")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    images = DiffusionPipeline.load_config(args.pipeline)["_class_name"] == "FluxPipeline"
    dtype = torch.float16 if cuda and not images else torch.float32
    pipeline = DiffusionPipeline.from_pretrained(args.pipeline, torch_dtype=dtype)
    if args.shift is not None:
        scheduler = pipeline.scheduler
        pipeline.scheduler = scheduler.from_config(scheduler.config, shift=args.shift)
    pipeline.to("cuda" if cuda else "cpu")
    file = args.prompts or PROMPTS / ("images.txt" if images else "shapes.txt")
    prompts = file.read_text().splitlines()[args.first :][: args.count]
    options = {"steps": args.steps, "seed": args.seed + args.first}
    if images:
        sheet = still_sheet(sample_images(pipeline, prompts, **options), prompts)
    else:
        guidance = args.guidance
        clips = sample_clips(pipeline, prompts, size=args.size, guidance=guidance, **options)
        sheet = clip_sheet(clips, prompts, every=1)
    save_sheet(sheet, args.out)


if __name__ == "__main__":
    main()

"""Golden files of one image and one clip; run with `pytest examples/regression`."""

from pathlib import Path

import diffusers
import torch

MODELS = Path(__file__).parents[2] / "assets"  # put your models here
SEED = 0


def generate(model, **settings):
    pipe = diffusers.DiffusionPipeline.from_pretrained(MODELS / model)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(SEED)
    return pipe("a red circle", height=64, width=64, generator=generator, **settings)


def test_image(media_regression):
    image = generate("tiny-flux", num_inference_steps=4, max_sequence_length=64)
    media_regression.check(image, "circle", min_psnr=40, settings={"seed": SEED})


def test_clip(media_regression):
    clip = generate("tiny-wan", num_frames=9, num_inference_steps=4, max_sequence_length=64)
    media_regression.check(clip, "circle-moves", min_psnr=40, min_ssim=0.98)

"""Models with the blocks of FLUX: LongCat-Image, Bria and Ovis-Image."""

import torch
from diffusers import (
    BriaTransformer2DModel,
    LongCatImageTransformer2DModel,
    OvisImageTransformer2DModel,
)

from tests.pipelines.families.family import Family
from tests.pipelines.families.flux import KINDS
from tests.pipelines.families.loop import Loop, strong
from tests.tiny_models import random, seeded

CHANNELS, TEXT, TEXT_DIM = 8, 6, 16
CONFIG = {
    "patch_size": 1,
    "in_channels": CHANNELS,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": TEXT_DIM,
    "axes_dims_rope": (4, 6, 6),
}
VAE = {"spatial_compression_ratio": 8, "temporal_compression_ratio": 1}
IMAGE = {"height": 128, "width": 96}
VARIANTS = {"odd size": {"height": 80, "width": 112}, "batch": {"batch": 2}}


def shape(*, height, width, batch=1, **_):
    return batch, (height // 16) * (width // 16), CHANNELS


def arguments(latents, timestep, branch, *, height, width, text=TEXT, **_):
    rows, columns = torch.meshgrid(
        torch.arange(height // 16), torch.arange(width // 16), indexing="ij"
    )
    prompt = random(1, text, TEXT_DIM, seed=len(branch)).repeat(len(latents), 1, 1)
    return {
        "hidden_states": latents,
        "encoder_hidden_states": prompt,
        "timestep": timestep,
        "img_ids": torch.stack([0 * rows, rows, columns], dim=-1).view(-1, 3).float(),
        "txt_ids": torch.zeros(text, 3),
    }


def divided(latents, timestep, branch, **call):
    return arguments(latents, timestep / 1000, branch, **call)


def longcat():
    return Loop(strong(seeded(LongCatImageTransformer2DModel, **CONFIG)), divided, shape, VAE)


def ovis():
    transformer = seeded(OvisImageTransformer2DModel, **CONFIG, out_channels=CHANNELS)
    return Loop(strong(transformer), divided, shape, VAE)


def bria():
    return Loop(strong(seeded(BriaTransformer2DModel, **CONFIG)), arguments, shape, VAE)


FAMILIES = [
    Family("longcat-image", longcat, IMAGE, VARIANTS, kinds=KINDS, slow=True),
    Family("ovis-image", ovis, IMAGE, VARIANTS, kinds=KINDS, slow=True),
    Family("bria", bria, IMAGE, VARIANTS, kinds=KINDS, slow=True),
]

"""Models with the blocks of FLUX: LongCat-Image, Bria and Ovis-Image."""

from functools import partial

import torch
from diffusers import (
    BriaTransformer2DModel,
    LongCatImageTransformer2DModel,
    OvisImageTransformer2DModel,
)

from tests.pipelines.families import family
from tests.pipelines.families.flux import KINDS
from tests.tiny_models import seeded

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
VARIANTS = {"odd size": family.ODD_IMAGE, "batch": {"batch": 2}}


def arguments(latents, timestep, branch, *, height, width, text=TEXT, **_):
    rows, columns = torch.meshgrid(
        torch.arange(height // 16), torch.arange(width // 16), indexing="ij"
    )
    return {
        "hidden_states": latents,
        "encoder_hidden_states": family.of_branch(latents, branch, text, TEXT_DIM),
        "timestep": timestep,
        "img_ids": torch.stack([0 * rows, rows, columns], dim=-1).view(-1, 3).float(),
        "txt_ids": torch.zeros(text, 3),
    }


def divided(latents, timestep, branch, **call):
    return arguments(latents, timestep / 1000, branch, **call)


def loop(model_class, passed=divided, **config):
    transformer = family.strong(seeded(model_class, **CONFIG, **config))
    return family.Loop(transformer, passed, family.image_tokens(CHANNELS), family.IMAGE_VAE)


MODELS = {
    "longcat-image": partial(loop, LongCatImageTransformer2DModel),
    "ovis-image": partial(loop, OvisImageTransformer2DModel, out_channels=CHANNELS),
    "bria": partial(loop, BriaTransformer2DModel, arguments),
}
FAMILIES = [
    family.Family(name, make, family.IMAGE, VARIANTS, kinds=KINDS) for name, make in MODELS.items()
]

"""Models with the blocks of FLUX: LongCat-Image, Bria and Ovis-Image."""

from functools import partial

import diffusers
import torch

from tests.pipelines.families import family
from tests.pipelines.families.flux import KINDS
from tests.tiny_models import JOINT_CONFIG, seeded

CHANNELS, TEXT, TEXT_DIM = 8, 6, 16
CONFIG = {**JOINT_CONFIG, "in_channels": CHANNELS, "joint_attention_dim": TEXT_DIM}
VARIANTS = {"odd size": family.ODD_IMAGE, "batch": {"batch": 2}}


def arguments(divided, latents, timestep, branch, *, height, width, text=TEXT, **_):
    rows, columns = torch.meshgrid(
        torch.arange(height // 16), torch.arange(width // 16), indexing="ij"
    )
    return {
        "hidden_states": latents,
        "encoder_hidden_states": family.of_branch(latents, branch, text, TEXT_DIM),
        "timestep": timestep / divided,
        "img_ids": torch.stack([0 * rows, rows, columns], dim=-1).view(-1, 3).float(),
        "txt_ids": torch.zeros(text, 3),
    }


def loop(model_class, divided=1000, **config):
    transformer = family.strong(seeded(model_class, **CONFIG, **config))
    passed = partial(arguments, divided)
    return family.Loop(transformer, passed, family.image_tokens(CHANNELS), family.IMAGE_VAE)


MODELS = {
    "longcat-image": partial(loop, diffusers.LongCatImageTransformer2DModel),
    "ovis-image": partial(loop, diffusers.OvisImageTransformer2DModel, out_channels=CHANNELS),
    "bria": partial(loop, diffusers.BriaTransformer2DModel, divided=1),
}
FAMILIES = [
    family.Family(name, make, family.IMAGE, VARIANTS, kinds=KINDS) for name, make in MODELS.items()
]

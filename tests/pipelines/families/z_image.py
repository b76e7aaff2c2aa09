"""Z-Image: prompts that are padded to other lengths, and images that come as a list."""

import diffusers
import torch

from tests.pipelines.families.family import IMAGE as SIZE
from tests.pipelines.families.family import ODD_IMAGE, Family, of_class
from tests.tiny_models import random, seeded, tiny_image_vae

CHANNELS = 4
TEXT_DIM = 16
CONFIG = {
    "in_channels": CHANNELS,
    "dim": 48,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": TEXT_DIM,
    "axes_dims": [8, 8, 8],
    "axes_lens": [256, 32, 32],
}


def transformer():
    """With padding that shows, and layers that change something."""
    made = seeded(diffusers.ZImageTransformer2DModel, **CONFIG)
    with torch.no_grad():
        for seed, token in enumerate((made.x_pad_token, made.cap_pad_token)):
            token.copy_(random(*token.shape, seed=seed))
    return made


def pipeline():
    vae = tiny_image_vae(blocks=4, latent_channels=CHANNELS)  # shrinks by 8
    return of_class(diffusers.ZImagePipeline, vae=vae, transformer=transformer())


def prompts(*lengths, prefix="", seed=1):
    return {
        f"{prefix}prompt_embeds": [
            random(length, TEXT_DIM, seed=seed + i) for i, length in enumerate(lengths)
        ],
    }


GUIDED = {"guidance_scale": 3.0, **prompts(9, prefix="negative_", seed=5)}
IMAGE = {**SIZE, **prompts(7), "guidance_scale": 0.0, "max_sequence_length": 7}
FAMILIES = [
    Family(
        "z-image",
        pipeline,
        IMAGE,
        {
            "odd size": ODD_IMAGE,
            "batch": prompts(7, 30),
            "guided": GUIDED,
            "guided, other lengths": {**GUIDED, **prompts(40)},
        },
        kinds=3,  # those that refine images or prompts are other graphs
    ),
]

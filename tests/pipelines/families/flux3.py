"""FLUX.3: the image, references with grids of their own, and models that take where to jump."""

import torch
from diffusers import Flux3Transformer2DModel

from tests.pipelines.families import family
from tests.tiny_models import random, seeded

CHANNELS, TEXT, TEXT_DIM = 8, 6, 16
SCALE = 0.25  # of rows and columns in position ids
CONFIG = {
    "in_channels": CHANNELS,
    "cond_in_channels": CHANNELS,
    "num_layers": 1,
    "num_single_layers": 2,
    **family.HEADS,
    "joint_attention_dim": TEXT_DIM,
    "timestep_channels": 16,
    "axes_dims_rope": (4, 4, 4, 4),
}


def position_ids(rows, columns, image=0):
    sides = (torch.arange(size, dtype=torch.float) for size in (rows, columns))
    ids = torch.cartesian_prod(torch.zeros(1), *sides, torch.tensor([float(image)]))
    ids[:, 1:3] *= SCALE
    return ids


def arguments(
    latents, timestep, branch, *, height, width, references=(), jumps=False, shorter=0, **_
):
    """The arguments of the denoise block; references are pairs of rows and columns."""
    batch = len(latents)
    text = {"cond": TEXT, "uncond": TEXT - shorter}[branch]
    found = {
        "hidden_states": latents,
        "encoder_hidden_states": family.of_branch(latents, branch, text, TEXT_DIM),
        "timestep": timestep / 1000,
        "img_ids": position_ids(height // 16, width // 16),
        "txt_ids": torch.stack([torch.zeros(text)] * 3 + [torch.arange(text)], dim=-1),
    }
    if jumps:
        found["target_timestep"] = (timestep / 1000 - 0.1).clamp(min=0)
    if references:
        sizes = [(rows, columns, -1 - i) for i, (rows, columns) in enumerate(references)]
        tokens = sum(rows * columns for rows, columns, _ in sizes)
        found["image_cond_ids"] = torch.cat([position_ids(*size) for size in sizes])
        found["image_cond_hidden_states"] = random(batch, tokens, CHANNELS, seed=7)
    return found


def loop(**overrides):
    transformer = seeded(Flux3Transformer2DModel, **CONFIG, **overrides)
    return family.Loop(
        family.strong(transformer), arguments, family.image_tokens(CHANNELS), family.IMAGE_VAE
    )


FAMILIES = [
    family.Family(
        "flux3",
        loop,
        family.IMAGE,
        {
            "odd size": family.ODD_IMAGE,
            "batch": {"batch": 2},
            "prompts of two lengths": {"shorter": 2},
            "references": {"references": ((4, 6), (5, 3))},
        },
        kinds=3,  # blocks of the image alone and of the text alone are other graphs
    ),
    family.Family(
        "flux3, step-distilled",
        lambda: loop(flow_map=True),
        {**family.IMAGE, "jumps": True, "branches": ("cond",)},
        brief=True,
    ),
]

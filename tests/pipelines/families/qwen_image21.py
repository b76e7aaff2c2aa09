"""Qwen-Image 2.1: the first step keeps keys and values of the prompt and of references."""

import torch
from diffusers import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

from tests.pipelines.families.family import HEADS, Family, Loop, image_tokens, of_branch, strong
from tests.pipelines.families.family import IMAGE as SIZE
from tests.tiny_models import random, seeded

CHANNELS, TEXT, TEXT_DIM = 8, 6, 16
CONFIG = {
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "num_layers": 3,
    **HEADS,
    "context_in_dim": TEXT_DIM,
    "axes_dims_rope": (4, 6, 6),
}
FIRST = 1000  # the timestep of the first step


class Arguments:
    """Those of a call, with the keys and values that the first one of a branch has kept."""

    def __init__(self):
        self._kept = {}

    def __call__(
        self,
        latents,
        timestep,
        branch,
        *,
        height,
        width,
        reference=None,
        shorter=0,
        keeps=True,
        padding=0,
        **_,
    ):
        batch, target = len(latents), latents.shape[1]
        text = TEXT - (shorter if branch == "uncond" else 0)
        shapes = [(1, height // 16, width // 16)]
        slots = torch.zeros(1, text, dtype=torch.bool)
        if reference is not None:
            rows, columns = reference
            shapes.insert(0, (1, rows, columns))
            picture = torch.ones(1, rows * columns // 4, dtype=torch.bool)
            slots = torch.cat([slots[:, :3], picture, slots[:, 3:]], dim=1)
            tokens = random(1, rows * columns, CHANNELS, seed=9).repeat(batch, 1, 1)
            latents = torch.cat([tokens, latents], dim=1)
        embeds = of_branch(latents, branch, slots.shape[1], TEXT_DIM)
        slots = torch.cat([slots, torch.ones(1, target // 4, dtype=torch.bool)], dim=1)
        call = {
            "hidden_states": latents,
            "encoder_hidden_states": embeds,
            "timestep": timestep / 1000,
            "img_shapes": [shapes] * batch,
            "img_mask": slots.repeat(batch, 1),
        }
        if padding:
            call["encoder_hidden_states_mask"] = (torch.arange(text) < text - padding)[None]
        if keeps:
            first = timestep[0] == FIRST
            if first:
                self._kept[branch] = QwenImage21KVCache(CONFIG["num_layers"])
            call["kv_cache"] = self._kept[branch]
            call["kv_cache_mode"] = "extract" if first else "cached"
        return call


def loop():
    transformer = strong(seeded(QwenImage21Transformer2DModel, **CONFIG))
    vae = {"spatial_compression_ratio": 16, "temporal_compression_ratio": 1}
    return Loop(
        transformer,
        Arguments(),
        image_tokens(CHANNELS),
        vae,
        # The first call returns all tokens of the sequence, the image's last.
        lambda result, latents: result[0][:, -latents.shape[1] :],
    )


IMAGE = {**SIZE, "max_sequence_length": TEXT}
FAMILIES = [
    Family(
        "qwen-image 2.1",
        loop,
        IMAGE,
        {
            "odd size": {"height": 96, "width": 160},
            "batch": {"batch": 2},
            "prompts of two lengths": {"shorter": 2},
            "reference": {"reference": (4, 6)},
            "a padded prompt": {"padding": 2},
        },
        masked={
            "a padded prompt": "attention runs dense: the prompts of the batch differ in length, so"
        },
        kinds=2,  # the first block gets tokens that are cut from a longer sequence
        unpatched_steps=1,
    )
]

"""Helios and FramePack: earlier frames stand before the present ones."""

import torch
from diffusers import HeliosTransformer3DModel, HunyuanVideoFramepackTransformer3DModel

from tests.pipelines.families import family
from tests.pipelines.families.hunyuan_video import CONFIG, POOLED_DIM, padded
from tests.tiny_models import LATENT_CHANNELS, TEXT_DIM, TRANSFORMER_CONFIG, random

HISTORY = (16, 2, 2)  # frames: long ago, before, and just now
TEXT = 5
IMAGE_TOKENS = 3
IMAGE_DIM = 8


def earlier(latents):
    """Latents and numbers of earlier frames, the last ones first, and numbers of the present."""
    batch, channels, frames, *size = latents.shape
    numbers = torch.arange(sum(HISTORY) + frames).split([*HISTORY, frames])
    pasts = [
        random(1, channels, len(part), *size, seed=9).repeat(batch, 1, 1, 1, 1)
        for part in numbers[:-1]
    ]
    return pasts[::-1], numbers[-2::-1], numbers[-1]


def helios_arguments(latents, timestep, branch, *, history=True, **_):
    batch = len(latents)
    call = {
        "hidden_states": latents,
        "timestep": timestep,
        "encoder_hidden_states": family.of_branch(latents, branch, TEXT, TEXT_DIM),
    }
    if not history:
        return call
    pasts, numbers, present = earlier(latents)
    for name, past, number in zip(("short", "mid", "long"), pasts, numbers, strict=True):
        call[f"latents_history_{name}"] = past
        call[f"indices_latents_history_{name}"] = number.expand(batch, -1)
    return {**call, "indices_hidden_states": present.expand(batch, -1)}


def helios():
    config = {name: value for name, value in TRANSFORMER_CONFIG.items() if "rope" not in name}
    return family.video_loop(
        HeliosTransformer3DModel,
        helios_arguments,
        **config,
        rope_dim=(12, 10, 10),
        is_amplify_history=True,
    )


def framepack_arguments(latents, timestep, branch, *, valid=TEXT, **_):
    batch = len(latents)
    text, mask = padded(valid, seed=len(branch))
    (clean, twice, four_times), numbers, present = earlier(latents)
    return {
        "hidden_states": latents,
        "timestep": timestep,
        "encoder_hidden_states": text.repeat(batch, 1, 1),
        "encoder_attention_mask": mask.repeat(batch, 1),
        "pooled_projections": random(1, POOLED_DIM, seed=5).repeat(batch, 1),
        "image_embeds": random(1, IMAGE_TOKENS, IMAGE_DIM, seed=6).repeat(batch, 1, 1),
        "guidance": torch.full((batch,), 6000.0),
        "indices_latents": present,
        "latents_clean": clean,
        "indices_latents_clean": numbers[0],
        "latents_history_2x": twice,
        "indices_latents_history_2x": numbers[1],
        "latents_history_4x": four_times,
        "indices_latents_history_4x": numbers[2],
    }


def framepack():
    return family.video_loop(
        HunyuanVideoFramepackTransformer3DModel,
        framepack_arguments,
        **CONFIG,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_single_layers=2,
        pooled_projection_dim=POOLED_DIM,
        has_image_proj=True,
        image_proj_dim=IMAGE_DIM,
        has_clean_x_embedder=True,
    )


HELIOS_VARIANTS = {"odd size": family.ODD, "no earlier frames": {"history": False}}
FAMILIES = [
    family.Family("helios", helios, family.VIDEO, HELIOS_VARIANTS),
    family.Family(
        "framepack",
        framepack,
        {**family.VIDEO, "max_sequence_length": TEXT + IMAGE_TOKENS},
        {**family.USUAL, "short prompt": {"valid": 2}},
        kinds=3,  # of the single blocks two: the first gets tokens that nothing was cut from
    ),
]

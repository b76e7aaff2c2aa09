"""Kandinsky 5 and 6: channels stand last; Kandinsky 6 has a stream of sound."""

import torch
from diffusers import Kandinsky5Transformer3DModel, Kandinsky6Transformer3DModel

from tests.pipelines.families.family import USUAL, VAE, VIDEO, Family, Loop, of_branch, strong
from tests.tiny_models import random, seeded

CHANNELS = 4
SOUND = 7
SOUND_CHANNELS = 6
TEXT = 5
TEXT_DIM = 16
POOLED_DIM = 8
CONFIG = {
    "in_visual_dim": CHANNELS,
    "out_visual_dim": CHANNELS,
    "in_text_dim": TEXT_DIM,
    "in_text_dim2": POOLED_DIM,
    "time_dim": 16,
    "model_dim": 48,
    "ff_dim": 96,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (8, 8, 8),
    "visual_cond": False,
}


def shape(*, height, width, num_frames, batch=1, **_):
    return batch, (num_frames - 1) // 4 + 1, height // 8, width // 8, CHANNELS


def arguments(latents, timestep, branch, **_):
    _, frames, rows, columns, _ = latents.shape
    return {
        "hidden_states": latents,
        "timestep": timestep,
        "encoder_hidden_states": of_branch(latents, branch, TEXT, TEXT_DIM),
        "pooled_projections": of_branch(latents, branch, POOLED_DIM),
        "visual_rope_pos": tuple(torch.arange(n) for n in (frames, rows // 2, columns // 2)),
    }


def arguments5(latents, timestep, branch, **call):
    return {**arguments(latents, timestep, branch, **call), "text_rope_pos": torch.arange(TEXT)}


def arguments6(latents, timestep, branch, *, sound=True, types=False, **call):
    passed = arguments(latents, timestep, branch, **call)
    if sound:
        tokens = random(1, SOUND, SOUND_CHANNELS, seed=8).repeat(len(latents), 1, 1)
        passed["audio_hidden_states"] = tokens
    if types:
        frames = torch.zeros(len(latents), latents.shape[1], dtype=torch.long)
        frames[:, -1] = 1
        passed["visual_token_type_ids"] = frames
    return passed


def alive(model):
    """With modulations that change something; at their first values gates are closed."""
    with torch.no_grad():
        for seed, (name, module) in enumerate(model.named_modules()):
            if name.endswith("modulation.out_layer"):
                module.weight.copy_(random(*module.weight.shape, seed=seed) / 8)
                module.bias.copy_(random(*module.bias.shape, seed=seed) / 2)
    return strong(model, factor=2)


def kandinsky5():
    transformer = alive(seeded(Kandinsky5Transformer3DModel, **CONFIG))
    return Loop(transformer, arguments5, shape, VAE, lambda result, _: result)


def kandinsky6():
    transformer = seeded(
        Kandinsky6Transformer3DModel,
        **CONFIG,
        in_audio_dim=SOUND_CHANNELS,
        out_audio_dim=SOUND_CHANNELS,
        model_dim_a=24,
        axes_dims_a=(4, 4, 4),
        visual_token_type_num_embeddings=2,
    )
    return Loop(alive(transformer), arguments6, shape, VAE)


FAMILIES = [
    Family("kandinsky 5", kandinsky5, VIDEO, USUAL, kinds=2),  # the text's blocks, too
    Family(
        "kandinsky 6",
        kandinsky6,
        VIDEO,
        {**USUAL, "no sound": {"sound": False}, "frames of two types": {"types": True}},
        kinds=3,  # the text's blocks for the video, and those for the sound
    ),
]

"""Fibo 2: gist tokens made of the prompt, and images to edit beside the image."""

import torch
from diffusers import BriaFibo2Transformer2DModel

from tests.pipelines.families.family import IMAGE, USUAL_IMAGES, Family, Loop, of_branch, strong
from tests.tiny_models import random, seeded

CHANNELS = 4
TEXT_DIM = 16
CONFIG = {
    "in_channels": CHANNELS,
    "dim": 64,
    "n_layers": 3,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "cap_feat_dim": TEXT_DIM,
    "injection_layer_ids": (1,),
    "perceiver_num_layers": 1,
    "min_num_gist_tokens": 4,
    "max_num_gist_tokens": 12,
    "gist_step": 4,
    "gist_min_text_len": 4,
    "gist_max_text_len": 20,
    "axes_dims": (8, 12, 12),
    "axes_lens": (64, 32, 32),
}
LENGTHS = {"cond": 9, "uncond": 6}  # both have 8 gist tokens


def shape(*, height, width, batch=1, **_):
    return batch, CHANNELS, height // 8, width // 8


def arguments(latents, timestep, branch, *, lengths=LENGTHS, edits=(), **_):
    text = lengths[branch]
    longest = max(text) if isinstance(text, tuple) else text
    mask = None
    if isinstance(text, tuple):
        mask = torch.arange(longest) < torch.tensor(text)[:, None]
    return {
        "hidden_states": latents,
        "timestep": timestep / 1000,
        "encoder_hidden_states": of_branch(latents, branch, 2, longest, TEXT_DIM),
        "encoder_attention_mask": mask,
        "context_latents": [
            random(1, CHANNELS, *size, seed=7).repeat(len(latents), 1, 1, 1) for size in edits
        ]
        or None,
    }


def fibo2():
    transformer = seeded(BriaFibo2Transformer2DModel, **CONFIG)
    with torch.no_grad():
        for layer in transformer.layers:
            if layer.cross_attention is not None:
                layer.cross_attn_gate.fill_(0.5)
    return Loop(strong(transformer), arguments, shape, {"spatial_compression_ratio": 8})


FAMILIES = [
    Family(
        "bria-fibo2",
        fibo2,
        {**IMAGE, "max_sequence_length": 9},
        {
            **USUAL_IMAGES,
            "other lengths": {"lengths": {"cond": 20, "uncond": 4}},
            "editing": {"edits": ((12, 8), (8, 8))},
        },
        kinds=4,  # those that refine, the first of the others, and with cross-attention or without
    ),
    Family(
        "bria-fibo2 masked",
        fibo2,
        IMAGE | {"max_sequence_length": 20, "batch": 2, "lengths": dict.fromkeys(LENGTHS, (20, 4))},
        fallbacks=("the prompts of the batch have gists of 4 to 12 tokens",),
        dense_parts=("attention",),
        brief=True,
    ),
]

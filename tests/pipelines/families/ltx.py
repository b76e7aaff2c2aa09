"""LTX-Video: from text, from a picture with a timestep per token, and from pictures in between."""

import diffusers
import torch

from tests.pipelines.families.family import HEADS, Family, of_class
from tests.tiny_models import random, seeded

CHANNELS = 8  # of the latents
TEXT, TEXT_DIM = 5, 16
LTX_CONFIG = {
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    **HEADS,
    "cross_attention_dim": 32,
    "caption_channels": TEXT_DIM,
    "num_layers": 2,
}


def prompts(batch=1, seed=3, padding=1):
    """Embeddings of prompts whose last tokens are padding, and of the negative ones."""
    mask = (torch.arange(TEXT) < TEXT - padding).long().expand(batch, TEXT)
    return {
        "prompt_embeds": random(batch, TEXT, TEXT_DIM, seed=seed),
        "prompt_attention_mask": mask,
        "negative_prompt_embeds": random(batch, TEXT, TEXT_DIM, seed=seed + 1),
        "negative_prompt_attention_mask": mask,
    }


VIDEO = {**prompts(), "height": 32, "width": 64, "num_frames": 5, "guidance_scale": 3.0}
PICTURE = random(1, 3, 32, 64, seed=1).tanh() / 2 + 0.5
VARIANTS = {
    "odd size": {"height": 96, "width": 32, "num_frames": 3},
    "one frame": {"num_frames": 1},
    "unguided": {"guidance_scale": 1.0},
    "batch": prompts(2),
}
VAE = {  # shrinks space by 8 and time by 2
    "latent_channels": CHANNELS,
    "block_out_channels": (8, 8),
    "decoder_block_out_channels": (8, 8),
    "layers_per_block": (1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1),
    "spatio_temporal_scaling": (True, False),
    "decoder_spatio_temporal_scaling": (True, False),
    "decoder_inject_noise": (False, False, False),
    "spatial_compression_ratio": 8,
    "temporal_compression_ratio": 2,
}


def tiny_ltx_pipeline(pipeline_class=diffusers.LTXPipeline, **overrides):
    """An LTX pipeline of this class, for embedded prompts."""
    more = {"down_block_types": ("LTXVideoDownBlock3D",) * 2, "patch_size": 4}
    vae = seeded(diffusers.AutoencoderKLLTXVideo, seed=1, **VAE, **more)
    transformer = seeded(diffusers.LTXVideoTransformer3DModel, **LTX_CONFIG)
    return of_class(pipeline_class, **{"vae": vae, "transformer": transformer, **overrides})


FAMILIES = [
    Family("ltx", tiny_ltx_pipeline, VIDEO, VARIANTS),
    Family(
        "ltx image to video",
        lambda: tiny_ltx_pipeline(diffusers.LTXImageToVideoPipeline),
        {**VIDEO, "image": PICTURE},
        {"odd size": VARIANTS["odd size"], "unguided": VARIANTS["unguided"]},
    ),
    Family(
        "ltx conditions",
        lambda: tiny_ltx_pipeline(diffusers.LTXConditionPipeline),
        {**VIDEO, "image": PICTURE, "frame_index": 0, "strength": 0.9},
        {
            "no condition": {"image": None},
            "a picture at the end": {"frame_index": 4},
            "two pictures": {"image": [PICTURE, 1 - PICTURE], "frame_index": [0, 2]},
        },
    ),
]

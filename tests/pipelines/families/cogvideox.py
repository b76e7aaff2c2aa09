"""CogVideoX 1.0 and 1.5, text and image to video, with and without rotary embeddings."""

import diffusers
import torch

from tests.pipelines.families.family import HEADS, Family, of_class, picture, strong
from tests.tiny_models import random, seeded

CHANNELS = 4  # of the latents
TEXT = 12
TEXT_DIM = 16
TRANSFORMER = {
    **HEADS,
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "time_embed_dim": 8,
    "text_embed_dim": TEXT_DIM,
    "num_layers": 2,
    "sample_height": 8,
    "sample_width": 6,
    "sample_frames": 9,
    "max_text_seq_length": TEXT,
}
ROTARY = {"use_rotary_positional_embeddings": True}
BOTH = {"in_channels": 2 * CHANNELS}  # the picture's latents stand beside the others
TO_VIDEO = diffusers.CogVideoXImageToVideoPipeline
V15 = {**ROTARY, "patch_size_t": 2, "sample_height": 24, "sample_width": 24}


def tiny_pipeline(
    pipeline_class=diffusers.CogVideoXPipeline,
    scheduler=diffusers.CogVideoXDDIMScheduler,
    **overrides,
):
    """A pipeline of this class; `overrides` are of the transformer's config.

    Its VAE shrinks space by 8 and time by 4, as the real one does.
    """
    vae = seeded(
        diffusers.AutoencoderKLCogVideoX,
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(4,) * 4,
        latent_channels=CHANNELS,
        layers_per_block=1,
        norm_num_groups=2,
    )
    transformer = seeded(diffusers.CogVideoXTransformer3DModel, **{**TRANSFORMER, **overrides})
    parts = {"vae": vae, "transformer": strong(transformer, 20), "scheduler": scheduler()}
    return of_class(pipeline_class, **parts)


def prompts(batch=1):
    return {
        "prompt_embeds": random(batch, TEXT, TEXT_DIM, seed=3),
        "negative_prompt_embeds": random(batch, TEXT, TEXT_DIM, seed=4),
    }


VIDEO = {**prompts(), "height": 64, "width": 48, "num_frames": 9, "guidance_scale": 1.0}
OF_ANOTHER = {name: value for name, value in VIDEO.items() if name != "num_frames"}
CLIP = [picture(seed, 48, 64) for seed in range(9)]
MASK = torch.zeros(1, 1, TEXT + 3 * 4 * 3)
MASK[..., 3:TEXT] = -1e4
IMAGE = {"image": random(1, 3, 64, 48, seed=1).sigmoid()}
GUIDED = {"guidance_scale": 6.0}
ODD_SIZE = {"height": 48, "width": 80, "num_frames": 5}
VARIANTS15 = {"guided": GUIDED, "odd size": ODD_SIZE, "one frame": {"num_frames": 1}}
VARIANTS = {
    **VARIANTS15,
    "batch": prompts(2),
    "a mask of the user's": {"attention_kwargs": {"attention_mask": MASK}},
}
KINDS = 2  # the first block, whose inputs have other strides, and the others

FAMILIES = [
    Family(
        "cogvideox 2b",
        tiny_pipeline,
        VIDEO,
        VARIANTS,
        kinds=KINDS,
        masked={"a mask of the user's": "attention runs dense: the call has a mask of its own"},
    ),
    Family(
        "cogvideox video to video",
        lambda: tiny_pipeline(diffusers.CogVideoXVideoToVideoPipeline, **ROTARY),
        {**OF_ANOTHER, "video": CLIP, "strength": 0.7},
        brief=True,
    ),
    Family(
        "cogvideox control",
        lambda: tiny_pipeline(diffusers.CogVideoXFunControlPipeline, **ROTARY, **BOTH),
        {**OF_ANOTHER, **GUIDED, "control_video": CLIP},
        brief=True,
    ),
    Family("cogvideox 1.5", lambda: tiny_pipeline(**V15), VIDEO, VARIANTS15, kinds=KINDS),
    Family(
        "cogvideox 5b image to video",
        lambda: tiny_pipeline(
            TO_VIDEO,
            diffusers.CogVideoXDPMScheduler,
            **ROTARY,
            **BOTH,
            use_learned_positional_embeddings=True,
        ),
        {**VIDEO, **IMAGE},
        {"guided": GUIDED},
        kinds=KINDS,
    ),
    Family(
        "cogvideox 1.5 image to video",
        lambda: tiny_pipeline(TO_VIDEO, **V15, **BOTH, ofs_embed_dim=8),
        {**VIDEO, **IMAGE},
        {"guided": GUIDED},
        kinds=KINDS,
    ),
]

"""Stable Diffusion 3 and 3.5 medium, from text and images, with one attention a block or two."""

import diffusers

from chipsparse.pipelines.families.stable_diffusion3 import CLIP_TOKENS
from tests.pipelines.changes import with_an_effect
from tests.pipelines.families.family import HEADS, Family, of_class, strong
from tests.tiny_models import random, seeded, tiny_image_vae

PERTURBED = diffusers.StableDiffusion3PAGPipeline
CHANNELS = 16  # of the latents: inpainting pipelines insist
TEXT = 10
TEXT_DIM = 16
TRANSFORMER = {
    "sample_size": 16,
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "num_layers": 3,
    **HEADS,
    "joint_attention_dim": TEXT_DIM,
    "caption_projection_dim": 32,
    "pooled_projection_dim": TEXT_DIM,
    "pos_embed_max_size": 32,
}
MEDIUM = {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1), "num_layers": 4}


def tiny_pipeline(pipeline_class=diffusers.StableDiffusion3Pipeline, components=None, **overrides):
    """A pipeline of this class; `overrides` are of the transformer's config."""
    model = seeded(diffusers.SD3Transformer2DModel, **{**TRANSFORMER, **overrides})
    model = strong(model, 20, ("attn.to_out.0", "ff.net.2"))
    vae = tiny_image_vae(latent_channels=CHANNELS)
    parts = {"transformer": model, "vae": vae, **(components or {})}
    return of_class(pipeline_class, **parts)


def prompts(batch=1):
    return {
        "prompt_embeds": random(batch, TEXT, TEXT_DIM, seed=3),
        "pooled_prompt_embeds": random(batch, TEXT_DIM, seed=4),
        "negative_prompt_embeds": random(batch, TEXT, TEXT_DIM, seed=5),
        "negative_pooled_prompt_embeds": random(batch, TEXT_DIM, seed=6),
    }


PICTURE = {**prompts(), "height": 32, "width": 48, "guidance_scale": 1.0}
# The length of T5's part in the embeddings, which are shorter here than that of CLIP alone.
PICTURE["max_sequence_length"] = TEXT - CLIP_TOKENS
GUIDED = {"guidance_scale": 5.0}
CONTROLLED = {**PICTURE, **GUIDED, "control_image": random(1, 3, 32, 48, seed=2).sigmoid()}
IMAGE = {"image": random(1, 3, 32, 48, seed=1).sigmoid(), "strength": 0.8}


def controlled():
    controlnet = seeded(diffusers.SD3ControlNetModel, **{**TRANSFORMER, "num_layers": 2})
    components = {"controlnet": with_an_effect(controlnet)}
    return tiny_pipeline(diffusers.StableDiffusion3ControlNetPipeline, components)


FAMILIES = [
    Family(
        "sd3",
        tiny_pipeline,
        PICTURE,
        {
            "guided": GUIDED,
            "batch": prompts(2),
            "odd size": {"height": 40, "width": 36},
            "one token": {"height": 4, "width": 4},
        },
        kinds=2,  # the last block makes no text
    ),
    Family(
        "sd3.5 medium",
        lambda: tiny_pipeline(**MEDIUM),
        PICTURE,
        {"guided": GUIDED},
        fallbacks=("the second attention (attn2) of 2 of 4 layers runs dense: only the joint one",),
        kinds=3,  # dual, joint, the last
    ),
    Family(
        "sd3 image to image",
        lambda: tiny_pipeline(diffusers.StableDiffusion3Img2ImgPipeline),
        {**PICTURE, **IMAGE},
        {"guided": GUIDED},
        kinds=2,
    ),
    Family("sd3 controlnet", controlled, CONTROLLED, brief=True),
    Family(
        "sd3 perturbed attention",  # by processors that are exchanged in every call
        lambda: tiny_pipeline(PERTURBED, {"pag_applied_layers": ["blocks.1"]}),
        {**PICTURE, **GUIDED, "pag_scale": 2.0},
        fallbacks=("attention runs dense in 1 of 3 layers (first: layer 1): its processor was",),
        brief=True,
    ),
]

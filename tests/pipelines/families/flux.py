"""FLUX.1 with its pipelines that see other pictures, and models with its blocks."""

from functools import partial

import diffusers
import torch
from PIL import Image

from tests import tiny_models
from tests.pipelines.changes import with_an_effect
from tests.pipelines.families import family
from tests.pipelines.families.family import Family, picture
from tests.tiny_models import FLUX_CONFIG, seeded, tiny_flux_pipeline, tiny_flux_transformer

KINDS = 3  # double, the first single, further single blocks, whose input has other strides
WIDTH = 24
HEIGHT = 32
PICTURE = {"prompt": "a red circle", "height": HEIGHT, "width": WIDTH, "max_sequence_length": 16}
GUIDED = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}
BATCH = {"prompt": ["a red circle", "a blue square"]}
VARIANTS = {
    "guided": GUIDED,
    "batch": BATCH,
    "odd size": {"height": 40, "width": 36},
    "one token": {"height": 4, "width": 4},
}
MASK = Image.new("L", (WIDTH, HEIGHT), 0)
MASK.paste(255, (8, 8, 16, 24))
FIRST, SECOND = (picture(seed, WIDTH, HEIGHT) for seed in (1, 2))
IMAGE = {"image": FIRST, "strength": 0.8}
CONTROLLED = {**PICTURE, "control_image": SECOND}


def guidance_distilled():
    """FLUX.1-dev, which is given its guidance scale."""
    return tiny_flux_pipeline(transformer=tiny_flux_transformer(guidance_embeds=True))


def beside(pipeline_class=diffusers.FluxControlPipeline, more=0):
    """Latents of other pictures, and more channels, stand beside the image's."""
    channels = FLUX_CONFIG["in_channels"]
    transformer = tiny_flux_transformer(in_channels=2 * channels + more, out_channels=channels)
    return tiny_flux_pipeline(pipeline_class, transformer=transformer)


def controlled():
    config = {**FLUX_CONFIG, "num_layers": 1, "num_single_layers": 1}
    controlnet = with_an_effect(seeded(diffusers.FluxControlNetModel, **config))
    return tiny_flux_pipeline(diffusers.FluxControlNetPipeline, controlnet=controlnet)


FAMILIES = [
    Family("flux", guidance_distilled, PICTURE, VARIANTS, kinds=KINDS),
    Family(
        "flux image to image",
        lambda: tiny_flux_pipeline(diffusers.FluxImg2ImgPipeline),
        {**PICTURE, **IMAGE},
        {"guided": GUIDED},
        kinds=KINDS,
    ),
    Family("flux control", beside, CONTROLLED, kinds=KINDS),
    Family(
        "flux fill",  # masked latents, and the 16 pixels of a mask that belong to a token
        lambda: beside(diffusers.FluxFillPipeline, more=16),
        {**PICTURE, "image": FIRST, "mask_image": MASK},
        brief=True,
    ),
    Family(
        "flux kontext",
        lambda: tiny_flux_pipeline(diffusers.FluxKontextPipeline),
        PICTURE | {"image": picture(1, 20, 24), "max_area": HEIGHT * WIDTH, "_auto_resize": False},
        {"guided": GUIDED},
        brief=True,
    ),
    Family("flux controlnet", controlled, CONTROLLED, {"guided": GUIDED}, brief=True),
    Family(
        "chroma",
        tiny_models.tiny_chroma_pipeline,
        {**PICTURE, "guidance_scale": 3.0, "negative_prompt": "a blue square"},
        {"unguided batch": {**BATCH, "guidance_scale": 1.0, "negative_prompt": None}},
        fallbacks=("attention runs dense: the pipeline passes an attention mask",),
        kinds=2,
        dense_parts=("attention",),
    ),
]

# LongCat-Image, Bria and Ovis-Image.
CHANNELS = 8
TEXT = 6
TEXT_DIM = 16
KIN_CONFIG = {**tiny_models.JOINT_CONFIG, "in_channels": CHANNELS, "joint_attention_dim": TEXT_DIM}


def arguments(divided, latents, timestep, branch, *, height, width, text=TEXT, **_):
    sides = (torch.arange(size // 16) for size in (height, width))
    rows, columns = torch.meshgrid(*sides, indexing="ij")
    return {
        "hidden_states": latents,
        "encoder_hidden_states": family.of_branch(latents, branch, text, TEXT_DIM),
        "timestep": timestep / divided,
        "img_ids": torch.stack([0 * rows, rows, columns], dim=-1).view(-1, 3).float(),
        "txt_ids": torch.zeros(text, 3),
    }


def loop(model_class, divided=1000, **config):
    transformer = family.strong(seeded(model_class, **KIN_CONFIG, **config))
    passed = partial(arguments, divided)
    return family.Loop(transformer, passed, family.image_tokens(CHANNELS), family.IMAGE_VAE)


KIN = {
    "longcat-image": partial(loop, diffusers.LongCatImageTransformer2DModel),
    "ovis-image": partial(loop, diffusers.OvisImageTransformer2DModel, out_channels=CHANNELS),
    "bria": partial(loop, diffusers.BriaTransformer2DModel, divided=1),
}
FAMILIES += [
    family.Family(name, make, family.IMAGE, family.USUAL_IMAGES, kinds=KINDS)
    for name, make in KIN.items()
]

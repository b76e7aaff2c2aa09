"""FLUX.1 with its pipelines that see other pictures, and Chroma."""

import torch
from diffusers import FluxControlPipeline, FluxImg2ImgPipeline, FluxInpaintPipeline
from PIL import Image

from tests.pipelines.families.family import Family
from tests.tiny_models import (
    FLUX_CONFIG,
    tiny_chroma_pipeline,
    tiny_flux_pipeline,
    tiny_flux_transformer,
)

KINDS = 3  # double, the first single, further single blocks, whose input has other strides
WIDTH, HEIGHT = 24, 32
PICTURE = {
    "prompt": "a red circle",
    "height": HEIGHT,
    "width": WIDTH,
    "max_sequence_length": 16,
}
GUIDED = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}
BATCH = {"prompt": ["a red circle", "a blue square"]}
ODD_SIZE = {"height": 40, "width": 36}


def picture(seed):
    pixels = torch.randint(
        0, 256, (HEIGHT, WIDTH, 3), generator=torch.Generator().manual_seed(seed)
    )
    return Image.fromarray(pixels.to(torch.uint8).numpy())


MASK = Image.new("L", (WIDTH, HEIGHT), 0)
MASK.paste(255, (8, 8, 16, 24))
IMAGE = {"image": picture(1), "strength": 0.8}


def guidance_distilled():
    """As FLUX.1-dev, which is given its guidance scale."""
    return tiny_flux_pipeline(transformer=tiny_flux_transformer(guidance_embeds=True))


def control():
    """The control picture's latents stand beside the others."""
    channels = FLUX_CONFIG["in_channels"]
    transformer = tiny_flux_transformer(in_channels=2 * channels, out_channels=channels)
    return tiny_flux_pipeline(FluxControlPipeline, transformer=transformer)


FAMILIES = [
    Family(
        "flux",
        guidance_distilled,
        PICTURE,
        {
            "guided": GUIDED,
            "batch": BATCH,
            "odd size": ODD_SIZE,
            "one token": {"height": 4, "width": 4},
        },
        kinds=KINDS,
    ),
    Family(
        "flux image to image",
        lambda: tiny_flux_pipeline(FluxImg2ImgPipeline),
        {**PICTURE, **IMAGE},
        {"guided": GUIDED},
        kinds=KINDS,
    ),
    Family(
        "flux inpainting",
        lambda: tiny_flux_pipeline(FluxInpaintPipeline),
        {**PICTURE, **IMAGE, "mask_image": MASK},
        kinds=KINDS,
    ),
    Family(
        "flux control",
        control,
        {**PICTURE, "control_image": picture(2)},
        kinds=KINDS,
    ),
    Family(
        "chroma",
        tiny_chroma_pipeline,
        {**PICTURE, "guidance_scale": 3.0, "negative_prompt": "a blue square"},
        {"unguided batch": {**BATCH, "guidance_scale": 1.0, "negative_prompt": None}},
        fallbacks=("attention runs dense: the pipeline passes an attention mask",),
        kinds=2,
        dense_parts=("attention",),
    ),
]

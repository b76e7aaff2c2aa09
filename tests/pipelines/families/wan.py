"""Wan 2.1 and 2.2: text and image to video, one expert or two, one timestep or one per token."""

from diffusers import WanImageToVideoPipeline
from transformers import CLIPImageProcessor

from tests import tiny_models
from tests.pipelines.families.family import ODD, Family, wan_like, wan_prompts
from tests.pipelines.families.family import VIDEO as SIZE
from tests.tiny_models import PROMPT, TEXT_DIM, random, tiny_wan_pipeline, tiny_wan_transformer

CLIP_SIZE = {"height": 16, "width": 16}
CHANNELS = 64  # of the blocks: heads times head size
TEXT = 512  # what follows the image's tokens, fixed in the code of the model's cross-attention
VIDEO = {"prompt": PROMPT, **SIZE, "guidance_scale": 4.0, "max_sequence_length": 16}
VARIANTS = {
    "odd size": ODD,
    "one frame": {"num_frames": 1},
    "unguided batch": {"prompt": [PROMPT, "a blue square moves up"], "guidance_scale": 1.0},
}
IMAGE = {"image": random(1, 3, 64, 48, seed=1).sigmoid()}
PROMPTS = {"prompt": None, **wan_prompts()}
UNGUIDED = {"odd size": ODD, "unguided": {"guidance_scale": 1.0}}


def image_to_video(**overrides):
    """The pipeline that begins with a picture; `overrides` replace components."""
    return wan_like(WanImageToVideoPipeline, **{"transformer": tiny_wan_transformer(), **overrides})


def with_clip_embeddings():
    """Wan 2.1: latents, mask and the picture's latents in, and its CLIP embedding beside the text.

    The mask has a channel for each of the four frames that a latent frame stands for.
    """
    return image_to_video(
        transformer=tiny_wan_transformer(
            in_channels=2 * tiny_models.LATENT_CHANNELS + 4,
            image_dim=TEXT_DIM,
            added_kv_proj_dim=CHANNELS,
        ),
        image_encoder=tiny_models.tiny_image_encoder(),
        image_processor=CLIPImageProcessor(size=CLIP_SIZE, crop_size=CLIP_SIZE),
    )


def two_experts():
    """Wan 2.2: the second expert takes over after the first step."""
    return tiny_wan_pipeline(transformer_2=tiny_wan_transformer(seed=9), boundary_ratio=0.95)


FAMILIES = [
    Family("wan 2.1", tiny_wan_pipeline, VIDEO, VARIANTS),
    Family(
        "wan 2.1 image to video",
        with_clip_embeddings,
        {**VIDEO, "prompt": None, **wan_prompts(TEXT), **IMAGE},
        UNGUIDED,
    ),
    Family("wan 2.2 two experts", two_experts, VIDEO, VARIANTS),
    Family(
        "wan 2.2 image to video, a timestep per token",
        lambda: image_to_video(expand_timesteps=True),
        {**VIDEO, **PROMPTS, **IMAGE},
        UNGUIDED,
    ),
]

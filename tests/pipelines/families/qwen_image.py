"""Qwen-Image: from text, from a picture, and inpainting."""

import diffusers
import torch

from tests.pipelines.changes import with_an_effect
from tests.pipelines.families.family import HEADS, Family, of_class, picture
from tests.tiny_models import random, seeded, tiny_wan_vae

CHANNELS = 4  # of the latents
TEXT, TEXT_DIM = 6, 16
WIDTH, HEIGHT = 48, 64
QWEN_CONFIG = {
    "in_channels": 4 * CHANNELS,
    "out_channels": CHANNELS,
    "num_layers": 2,
    **HEADS,
    "joint_attention_dim": TEXT_DIM,
    "axes_dims_rope": (4, 6, 6),
}


def prompts(*lengths, seed=3, negative=()):
    """Embeddings and masks of prompts of these lengths, padded to the longest and one more."""
    call = {}
    for name, sizes in (("prompt", lengths), ("negative_prompt", negative)):
        if sizes:
            longest = max(sizes) + 1
            mask = torch.arange(longest) < torch.tensor(sizes)[:, None]
            call[f"{name}_embeds"] = random(len(sizes), longest, TEXT_DIM, seed=seed)
            call[f"{name}_embeds_mask"] = mask.long()
            seed += 1
    return call


PICTURE = {
    "prompt_embeds": random(1, TEXT, TEXT_DIM, seed=3),
    "height": HEIGHT,
    "width": WIDTH,
    "true_cfg_scale": 1.0,
}
GUIDED = {"negative_prompt_embeds": random(1, TEXT - 2, TEXT_DIM, seed=4), "true_cfg_scale": 3.0}
VARIANTS = {
    "guided by a shorter text": GUIDED,
    "odd size": {"height": 80, "width": 48},
    "batch": {"prompt_embeds": random(2, TEXT, TEXT_DIM, seed=5)},
    "padded": prompts(4),
    "padded and guided": {**prompts(4, negative=(2,)), "true_cfg_scale": 3.0},
    "padded batch of one length": prompts(3, 3),
    "prompts of two lengths": prompts(4, 2),
    "a mask with holes": {**prompts(4), "prompt_embeds_mask": torch.tensor([[1, 0, 1, 1, 0]])},
}
MASKED = "attention runs dense: the text is masked otherwise than by one length for all samples"
IMAGE = {"image": picture(1, WIDTH, HEIGHT), "strength": 0.8}


def tiny_qwen_transformer(*, seed=0, **overrides):
    """A Qwen-Image transformer; `overrides` replace entries of its config."""
    return seeded(diffusers.QwenImageTransformer2DModel, seed=seed, **{**QWEN_CONFIG, **overrides})


def tiny_qwen_pipeline(pipeline_class=diffusers.QwenImagePipeline, **overrides):
    """A Qwen-Image pipeline of this class, for embedded prompts."""
    sizes = {"base_dim": 4, "dim_mult": [1, 1, 1], "temperal_downsample": [False, True]}
    vae = tiny_wan_vae(diffusers.AutoencoderKLQwenImage, seed=1, **sizes)  # shrinks space by 4
    components = {"vae": vae, "transformer": tiny_qwen_transformer(), **overrides}
    return of_class(pipeline_class, **components)


def controlled():
    config = {**QWEN_CONFIG, "num_layers": 1, "extra_condition_channels": 0}
    controlnet = with_an_effect(seeded(diffusers.QwenImageControlNetModel, **config))
    return tiny_qwen_pipeline(diffusers.QwenImageControlNetPipeline, controlnet=controlnet)


FAMILIES = [
    Family(
        "qwen-image",
        tiny_qwen_pipeline,
        PICTURE,
        VARIANTS,
        masked=dict.fromkeys(("prompts of two lengths", "a mask with holes"), MASKED),
    ),
    Family(
        "qwen-image controlnet",
        controlled,
        {**PICTURE, **GUIDED, "control_image": IMAGE["image"]},
        brief=True,
    ),
    Family(
        "qwen-image image to image",
        lambda: tiny_qwen_pipeline(diffusers.QwenImageImg2ImgPipeline),
        {**PICTURE, **IMAGE},
        {"guided": GUIDED},
    ),
]

"""HunyuanVideo and HunyuanVideo 1.5: padded prompts, pictures to begin with, guidance.

The pipelines have no text encoders here: what those would make is given, with padding that is
large, so that a model that sees it shows.
"""

from functools import partial

import diffusers
import torch
from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

from tests.pipelines.families.family import HEADS, Family, of_class, picture, strong
from tests.tiny_models import random, seeded, tiny_image_encoder

CHANNELS = 4  # of the latents
TEXT_DIM = 12
GLYPH_DIM = 10
IMAGE_DIM = 16
POOLED_DIM = 8
PADDED = 11  # tokens of a prompt with its padding
MOST_GLYPHS = 6
VALID = 7
IMAGE_TOKENS = 4
CONFIG = {
    **HEADS,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "text_embed_dim": TEXT_DIM,
    "rope_axes_dim": (4, 6, 6),
}


def padded(*lengths, tokens=PADDED, width=TEXT_DIM, seed=1):
    """Embeddings ``[B, tokens, width]`` of prompts of these lengths, and their mask."""
    mask = torch.arange(tokens) < torch.tensor(lengths)[:, None]
    embeds = random(len(lengths), tokens, width, seed=seed)
    return torch.where(mask[..., None], embeds, 5 * embeds), mask.long()


ENDS = ("attn.to_out.0", "attn.to_add_out", "ff.net.2", "s.0.proj_out")


def vae():
    """Shrinks space by 8 and time by 4, as the real one."""
    return seeded(
        diffusers.AutoencoderKLHunyuanVideo,
        latent_channels=CHANNELS,
        block_out_channels=(4, 4, 4, 4),
        layers_per_block=1,
        norm_num_groups=2,
        mid_block_add_attention=False,
    )


def pipeline(pipeline_class=diffusers.HunyuanVideoPipeline, **overrides):
    """A pipeline of this class; `overrides` are entries of the transformer's config."""
    config = {
        **CONFIG,
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "num_single_layers": 2,
        "pooled_projection_dim": POOLED_DIM,
        **overrides,
    }
    model = seeded(diffusers.HunyuanVideoTransformer3DModel, **config)
    return of_class(pipeline_class, transformer=strong(model, 4, ENDS), vae=vae())


def prompts(*lengths, prefix="", seed=1):
    embeds, mask = padded(*lengths, seed=seed)
    return {
        f"{prefix}prompt_embeds": embeds,
        f"{prefix}prompt_attention_mask": mask,
        f"{prefix}pooled_prompt_embeds": random(len(lengths), POOLED_DIM, seed=seed + 50),
    }


def negative_prompts(*lengths):
    """Negative prompts, for which each step calls the transformer once more."""
    return prompts(*lengths, prefix="negative_", seed=2) | {"true_cfg_scale": 3.0}


VIDEO = {"height": 64, "width": 48, "num_frames": 9, "max_sequence_length": VALID, **prompts(VALID)}
VARIANTS = {
    "short prompt": prompts(2),
    "no padding": prompts(PADDED),
    "odd size": {"height": 80, "width": 48, "num_frames": 5},
    "batch": prompts(VALID, VALID),
    "guided": negative_prompts(4),
    "one frame": {"num_frames": 1},
    "prompts of two lengths": prompts(3, VALID),
    "mask with gaps": {"prompt_attention_mask": prompts(VALID)["prompt_attention_mask"].roll(1, 1)},
}
skyreels = partial(
    pipeline,
    diffusers.HunyuanSkyreelsImageToVideoPipeline,
    in_channels=2 * CHANNELS,
)
TO_VIDEO = partial(pipeline, diffusers.HunyuanVideoImageToVideoPipeline)
CHANNELS_BESIDE = 2 * CHANNELS + 1  # the latents, those of a picture and a mask
GAPS = "attention runs dense: a prompt mask keeps others than the first tokens of a prompt"
LENGTHS = "attention runs dense: the prompts of the batch have {} tokens, so the shorter ones need"
MASKED = {"prompts of two lengths": LENGTHS.format("3 to 7"), "mask with gaps": GAPS}
FROM_PICTURE = {**VIDEO, "image": picture(3, 48, 64)}
IMAGE_VARIANTS = {
    "odd size": {**VARIANTS["odd size"], "image": picture(3, 48, 80)},
    "guided": VARIANTS["guided"],
}


def pipeline15(pipeline_class=diffusers.HunyuanVideo15Pipeline, **components):
    """With a VAE that shrinks space by 16 and time by 4, as the real one."""
    model = seeded(
        diffusers.HunyuanVideo15Transformer3DModel,
        **CONFIG,
        in_channels=CHANNELS_BESIDE,
        out_channels=CHANNELS,
        text_embed_2_dim=GLYPH_DIM,
        image_embed_dim=IMAGE_DIM,
        target_size=64,
    )
    sizes = {"block_out_channels": (8,) * 5, "layers_per_block": 1, "latent_channels": CHANNELS}
    vae = seeded(diffusers.AutoencoderKLHunyuanVideo15, **sizes)
    guider = diffusers.ClassifierFreeGuidance(guidance_scale=3.0)
    parts = {"transformer": strong(model, 4, ENDS), "vae": vae, "guider": guider, **components}
    pipe = of_class(pipeline_class, **parts)
    pipe.vision_num_semantic_tokens = IMAGE_TOKENS
    return pipe


def image_to_video15():
    return pipeline15(
        diffusers.HunyuanVideo15ImageToVideoPipeline,
        image_encoder=tiny_image_encoder(SiglipVisionModel, SiglipVisionConfig, IMAGE_DIM),
        feature_extractor=SiglipImageProcessor(size={"height": 16, "width": 16}),
    )


def prompts15(*lengths, glyphs=None, prefix="", tokens=PADDED, seed=1):
    """The output of both text encoders for prompts of these lengths, with so many glyphs each."""
    embeds, mask = padded(*lengths, tokens=tokens, seed=seed)
    glyphs = [0] * len(lengths) if glyphs is None else glyphs
    glyph_embeds, glyph_mask = padded(*glyphs, tokens=MOST_GLYPHS, width=GLYPH_DIM, seed=seed + 50)
    return {
        f"{prefix}prompt_embeds": embeds,
        f"{prefix}prompt_embeds_mask": mask,
        f"{prefix}prompt_embeds_2": glyph_embeds,
        f"{prefix}prompt_embeds_mask_2": glyph_mask,
    }


def both15(*lengths, **kwargs):
    """The output of `prompts15`, and a negative prompt as long."""
    return prompts15(*lengths, **kwargs) | prompts15(*lengths, **kwargs, prefix="negative_", seed=2)


VIDEO15 = {"height": 96, "width": 64, "num_frames": 9, **both15(VALID, tokens=VALID)}
VARIANTS15 = {
    "padding": both15(VALID),
    "glyphs": prompts15(VALID, glyphs=[4]) | prompts15(3, prefix="negative_", seed=2),
    "odd size": {"height": 80, "width": 112, "num_frames": 5},
    "batch": both15(VALID, VALID, glyphs=[2, 2]),
    "one frame": {"num_frames": 1},
    # Both samples have nine valid tokens, but of other texts.
    "prompts of two lengths": both15(6, 5, glyphs=[3, 4]),
}
MASKED15 = {"prompts of two lengths": LENGTHS.format("5 to 6")}
IMAGE15 = {"image": picture(3, 60, 90), "num_frames": 9, **both15(VALID, glyphs=[3])}

# Both kinds of blocks (the single ones twice: behind the first, the tokens are a part of a longer
# tensor), the patch embedding and the token refiner.
KINDS = 5
FAMILIES = [
    Family("hunyuan video", pipeline, VIDEO, VARIANTS, kinds=KINDS, masked=MASKED),
    Family(
        "hunyuan video image to video, latents side by side",
        partial(TO_VIDEO, in_channels=CHANNELS_BESIDE, image_condition_type="latent_concat"),
        FROM_PICTURE,
        IMAGE_VARIANTS,
        kinds=KINDS,
    ),
    Family(
        "hunyuan video image to video, tokens replaced",
        partial(TO_VIDEO, image_condition_type="token_replace"),
        FROM_PICTURE,
        IMAGE_VARIANTS,
        kinds=2,  # diffusers does not list these blocks among the repeated ones
    ),
    Family("skyreels image to video", skyreels, FROM_PICTURE, kinds=KINDS),
    Family("hunyuan video 1.5", pipeline15, VIDEO15, VARIANTS15, kinds=3, masked=MASKED15),
    Family("hunyuan video 1.5 image to video", image_to_video15, IMAGE15, brief=True),
]

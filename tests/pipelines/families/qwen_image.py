"""Qwen-Image: from text, from a picture, and inpainting; and Qwen-Image 2.1."""

import diffusers
import torch
from diffusers import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

from tests.pipelines.changes import with_an_effect
from tests.pipelines.families import family
from tests.pipelines.families.family import HEADS, Family, of_class, picture, strong
from tests.tiny_models import random, seeded, tiny_wan_vae

CHANNELS = 4  # of the latents
TEXT = 6
TEXT_DIM = 16
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


SIZE = {"height": 64, "width": 48}
PICTURE = {**SIZE, "prompt_embeds": random(1, TEXT, TEXT_DIM, seed=3), "true_cfg_scale": 1.0}
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
IMAGE = {"image": picture(1, 48, 64), "strength": 0.8}
CONTROLLED = {**PICTURE, **GUIDED, "control_image": IMAGE["image"]}


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
    Family("qwen-image controlnet", controlled, CONTROLLED, brief=True),
    Family(
        "qwen-image image to image",
        lambda: tiny_qwen_pipeline(diffusers.QwenImageImg2ImgPipeline),
        {**PICTURE, **IMAGE},
        {"guided": GUIDED},
    ),
]

# Qwen-Image 2.1: the first step keeps keys and values of the prompt and of references.
TOKEN_CHANNELS = 8
CONFIG21 = {
    "in_channels": TOKEN_CHANNELS,
    "out_channels": TOKEN_CHANNELS,
    "num_layers": 3,
    **HEADS,
    "context_in_dim": TEXT_DIM,
    "axes_dims_rope": (4, 6, 6),
}
FIRST = 1000  # the timestep of the first step


class Arguments:
    """Those of a call, with the keys and values that the first one of a branch has kept."""

    def __init__(self):
        self._kept = {}

    def __call__(
        self,
        latents,
        timestep,
        branch,
        *,
        height,
        width,
        reference=None,
        shorter=0,
        keeps=True,
        padding=0,
        **_,
    ):
        batch = len(latents)
        target = latents.shape[1]
        text = TEXT - (shorter if branch == "uncond" else 0)
        shapes = [(1, height // 16, width // 16)]
        slots = torch.zeros(1, text, dtype=torch.bool)
        if reference is not None:
            rows, columns = reference
            shapes.insert(0, (1, rows, columns))
            picture = torch.ones(1, rows * columns // 4, dtype=torch.bool)
            slots = torch.cat([slots[:, :3], picture, slots[:, 3:]], dim=1)
            tokens = random(1, rows * columns, TOKEN_CHANNELS, seed=9).repeat(batch, 1, 1)
            latents = torch.cat([tokens, latents], dim=1)
        embeds = family.of_branch(latents, branch, slots.shape[1], TEXT_DIM)
        slots = torch.cat([slots, torch.ones(1, target // 4, dtype=torch.bool)], dim=1)
        call = {
            "hidden_states": latents,
            "encoder_hidden_states": embeds,
            "timestep": timestep / 1000,
            "img_shapes": [shapes] * batch,
            "img_mask": slots.repeat(batch, 1),
        }
        if padding:
            call["encoder_hidden_states_mask"] = (torch.arange(text) < text - padding)[None]
        if keeps:
            first = timestep[0] == FIRST
            if first:
                self._kept[branch] = QwenImage21KVCache(CONFIG21["num_layers"])
            call["kv_cache"] = self._kept[branch]
            call["kv_cache_mode"] = "extract" if first else "cached"
        return call


def loop():
    transformer = strong(seeded(QwenImage21Transformer2DModel, **CONFIG21))
    vae = {"spatial_compression_ratio": 16, "temporal_compression_ratio": 1}
    return family.Loop(
        transformer,
        Arguments(),
        family.image_tokens(TOKEN_CHANNELS),
        vae,
        # The first call returns all tokens of the sequence, the image's last.
        lambda result, latents: result[0][:, -latents.shape[1] :],
    )


IMAGE21 = {**family.IMAGE, "max_sequence_length": TEXT}
FAMILIES += [
    Family(
        "qwen-image 2.1",
        loop,
        IMAGE21,
        {
            "odd size": {"height": 96, "width": 160},
            "batch": {"batch": 2},
            "prompts of two lengths": {"shorter": 2},
            "reference": {"reference": (4, 6)},
            "a padded prompt": {"padding": 2},
        },
        masked={
            "a padded prompt": (
                "attention runs dense: the prompts of the batch differ in length, so"
            ),
        },
        kinds=2,  # the first block gets tokens that are cut from a longer sequence
        unpatched_steps=1,
    ),
]

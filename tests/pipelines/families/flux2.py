"""FLUX.2, dev and Klein, and FLUX.3, with and without reference images."""

import diffusers
import torch

from tests.pipelines.families import family
from tests.pipelines.families.family import HEADS, Family, of_class, picture, strong
from tests.tiny_models import random, seeded

CHANNELS = 4  # of the latents
TEXT = 6
TEXT_DIM = 16
FLUX2_CONFIG = {
    "in_channels": 4 * CHANNELS,
    "num_layers": 2,
    "num_single_layers": 2,
    **HEADS,
    "joint_attention_dim": TEXT_DIM,
    "timestep_guidance_channels": 32,
    "axes_dims_rope": (4, 4, 4, 4),
}
SIZE = {"height": 64, "width": 48}
PICTURE = {**SIZE, "prompt_embeds": random(1, TEXT, TEXT_DIM, seed=3), "guidance_scale": 3.0}
REFERENCES = [picture(1, 64, 72), picture(2, 80, 64)]
VARIANTS = {
    "odd size": {"height": 80, "width": 56},
    "batch": {"prompt_embeds": random(2, TEXT, TEXT_DIM, seed=5)},
    "one token": {"height": 8, "width": 8},
    "a reference": {"image": REFERENCES[0]},
    "two references": {"image": REFERENCES},
}
GUIDED = {"negative_prompt_embeds": random(1, TEXT, TEXT_DIM, seed=4)}


def tiny_flux2_transformer(**overrides):
    """A FLUX.2 transformer; `overrides` replace entries of its config, e.g. `guidance_embeds`."""
    model = seeded(diffusers.Flux2Transformer2DModel, **{**FLUX2_CONFIG, **overrides})
    return strong(model, 8, ("ff.linear_out", "attn.to_out"))


def tiny_flux2_pipeline(pipeline_class=diffusers.Flux2Pipeline, **overrides):
    """A FLUX.2 pipeline of this class, for embedded prompts; its VAE shrinks by 4."""
    vae = seeded(
        diffusers.AutoencoderKLFlux2,
        seed=1,
        block_out_channels=(8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=CHANNELS,
        mid_block_add_attention=False,
    )
    components = {"vae": vae, "transformer": tiny_flux2_transformer(), **overrides}
    return of_class(pipeline_class, **components)


def klein(pipeline_class=diffusers.Flux2KleinPipeline, **overrides):
    """Klein takes no guidance scale; the base models are guided."""
    transformer = tiny_flux2_transformer(guidance_embeds=False)
    return tiny_flux2_pipeline(pipeline_class, transformer=transformer, **overrides)


FAMILIES = [
    Family("flux2", tiny_flux2_pipeline, PICTURE, VARIANTS, kinds=2),
    Family(
        "flux2 klein",
        klein,
        {**PICTURE, **GUIDED},
        {"distilled": {"guidance_scale": 1.0}, "a reference": VARIANTS["a reference"]},
        kinds=2,
    ),
    Family(
        "flux2 klein that keeps keys",  # of its references, from the first step on
        lambda: klein(diffusers.Flux2KleinKVPipeline),
        {name: value for name, value in PICTURE.items() if name != "guidance_scale"},
        {"two references": VARIANTS["two references"]},
        masked={
            "two references": "attention runs dense: the pipeline keeps the keys and values of its "
            "reference images",
        },
        brief=True,
    ),
]

# FLUX.3: references have grids of their own, and there are models that take where to jump.
TOKEN_CHANNELS = 8
SCALE = 0.25  # of rows and columns in position ids
FLUX3_CONFIG = {
    "in_channels": TOKEN_CHANNELS,
    "cond_in_channels": TOKEN_CHANNELS,
    "num_layers": 1,
    "num_single_layers": 2,
    **family.HEADS,
    "joint_attention_dim": TEXT_DIM,
    "timestep_channels": 16,
    "axes_dims_rope": (4, 4, 4, 4),
}


def position_ids(rows, columns, image=0):
    sides = (torch.arange(size, dtype=torch.float) for size in (rows, columns))
    ids = torch.cartesian_prod(torch.zeros(1), *sides, torch.tensor([float(image)]))
    ids[:, 1:3] *= SCALE
    return ids


def arguments(
    latents,
    timestep,
    branch,
    *,
    height,
    width,
    references=(),
    jumps=False,
    shorter=0,
    **_,
):
    """The arguments of the denoise block; references are pairs of rows and columns."""
    batch = len(latents)
    text = {"cond": TEXT, "uncond": TEXT - shorter}[branch]
    found = {
        "hidden_states": latents,
        "encoder_hidden_states": family.of_branch(latents, branch, text, TEXT_DIM),
        "timestep": timestep / 1000,
        "img_ids": position_ids(height // 16, width // 16),
        "txt_ids": torch.stack([torch.zeros(text)] * 3 + [torch.arange(text)], dim=-1),
    }
    if jumps:
        found["target_timestep"] = (timestep / 1000 - 0.1).clamp(min=0)
    if references:
        sizes = [(rows, columns, -1 - i) for i, (rows, columns) in enumerate(references)]
        tokens = sum(rows * columns for rows, columns, _ in sizes)
        found["image_cond_ids"] = torch.cat([position_ids(*size) for size in sizes])
        found["image_cond_hidden_states"] = random(batch, tokens, TOKEN_CHANNELS, seed=7)
    return found


def flux3(**overrides):
    transformer = seeded(diffusers.Flux3Transformer2DModel, **FLUX3_CONFIG, **overrides)
    return family.Loop(
        family.strong(transformer),
        arguments,
        family.image_tokens(TOKEN_CHANNELS),
        family.IMAGE_VAE,
    )


FAMILIES += [
    family.Family(
        "flux3",
        flux3,
        family.IMAGE,
        {
            **family.USUAL_IMAGES,
            "prompts of two lengths": {"shorter": 2},
            "references": {"references": ((4, 6), (5, 3))},
        },
        kinds=3,  # blocks of the image alone and of the text alone are other graphs
    ),
    family.Family(
        "flux3, step-distilled",
        lambda: flux3(flow_map=True),
        {**family.IMAGE, "jumps": True, "branches": ("cond",)},
        brief=True,
    ),
]

"""Models with the blocks of Wan: VACE, Animate, SkyReels V2 and ChronoEdit."""

from functools import partial

import diffusers
import torch

from tests.pipelines.families import family
from tests.tiny_models import LATENT_CHANNELS, TEXT_DIM, TRANSFORMER_CONFIG, random, seeded

TEXT = 5  # tokens
FACE = 16  # pixels of a side


def text(latents, timestep, branch, **_):
    """The arguments that all of these models have."""
    return {
        "hidden_states": latents,
        "timestep": timestep,
        "encoder_hidden_states": family.of_branch(latents, branch, TEXT, TEXT_DIM),
    }


def vace():
    transformer = seeded(
        diffusers.WanVACETransformer3DModel,
        **TRANSFORMER_CONFIG,
        vace_layers=[0, 2],
        # A control video has twice the channels, and a mask of 8 by 8 pixels for each of them.
        vace_in_channels=2 * LATENT_CHANNELS + 64,
    )
    return family.wan_like(diffusers.WanVACEPipeline, transformer=family.strong(transformer))


def animate_arguments(latents, timestep, branch, **_):
    """The first frame is a reference; the others have poses, and faces for all their pictures."""
    batch, _, frames, rows, columns = latents.shape
    mask_and_picture = random(1, LATENT_CHANNELS + 4, frames, rows, columns, seed=5)
    pose = random(1, LATENT_CHANNELS, frames - 1, rows, columns, seed=6)
    face = random(1, 3, 4 * (frames - 2) + 1, FACE, FACE, seed=7)
    if branch != "cond":
        face = torch.zeros_like(face)
    pictures, poses, faces = (
        part.to(latents).repeat(batch, 1, 1, 1, 1) for part in (mask_and_picture, pose, face)
    )
    return {
        **text(latents, timestep, branch),
        "hidden_states": torch.cat([latents, pictures], dim=1),
        "pose_hidden_states": poses,
        "face_pixel_values": faces,
    }


def animate(**overrides):
    config = {
        **TRANSFORMER_CONFIG,
        "in_channels": 2 * LATENT_CHANNELS + 4,
        "latent_channels": LATENT_CHANNELS,
        "image_dim": None,
        "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
        "motion_encoder_size": FACE,
        "motion_style_dim": 8,
        "motion_dim": 4,
        "motion_encoder_dim": 8,
        "face_encoder_hidden_dim": 16,
        "face_encoder_num_heads": 2,
        "inject_face_latents_blocks": 3,
        **overrides,
    }
    model_class = diffusers.WanAnimateTransformer3DModel
    return family.video_loop(model_class, animate_arguments, **config)


def forced_arguments(latents, timestep, branch, **_):
    """With diffusion forcing: frames that are given have timesteps close to 0."""
    timesteps = timestep[:, None].repeat(1, latents.shape[2])
    timesteps[:, 0] = 20
    return {
        **text(latents, timestep, branch),
        "timestep": timesteps,
        "enable_diffusion_forcing": True,
        "fps": torch.ones(len(latents), dtype=torch.long),
    }


def skyreels(arguments=text, **more):
    model_class = diffusers.SkyReelsV2Transformer3DModel
    return family.video_loop(model_class, arguments, **TRANSFORMER_CONFIG, **more)


forced = partial(skyreels, forced_arguments, inject_sample_info=True)
chrono_edit = partial(
    family.video_loop,
    diffusers.ChronoEditTransformer3DModel,
    text,
    **TRANSFORMER_CONFIG,
)
VARIANTS = {**family.USUAL, "unguided": {"branches": ("cond",)}}
UNGUIDED = {**family.VIDEO, "branches": ("cond",)}
FAMILIES = [
    family.Family(
        "wan vace",
        vace,
        {**family.wan_prompts(), **family.VIDEO, "guidance_scale": 4.0},
        {"odd size": family.ODD, "unguided": {"guidance_scale": 1.0}},
        kinds=3,  # the first block of the control video has a projection more
    ),
    family.Family("wan animate", animate, family.VIDEO, VARIANTS),
    family.Family("skyreels v2", skyreels, family.VIDEO, VARIANTS),
    family.Family("skyreels v2, forced", forced, UNGUIDED, brief=True),
    family.Family(
        "skyreels v2, blocks of frames",
        lambda: skyreels(num_frame_per_block=2),
        {**UNGUIDED, "num_frames": 13},
        fallbacks=("attention runs dense: the model masks later blocks of frames",),
        dense_parts=("attention",),
        brief=True,
    ),
    family.Family(
        "chrono edit",
        chrono_edit,
        {**family.VIDEO, "num_frames": 5},
        {"batch": {"batch": 2}},
    ),
]

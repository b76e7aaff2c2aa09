"""LTX-Video, with timesteps per token and pictures in between, and LTX-2 with sound."""

import diffusers
import torch

from tests.pipelines.families.family import HEADS, Family, of_class, streams
from tests.tiny_models import random, seeded

CHANNELS = 8  # of the latents
TEXT = 5
TEXT_DIM = 16
LTX_CONFIG = {
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    **HEADS,
    "cross_attention_dim": 32,
    "caption_channels": TEXT_DIM,
    "num_layers": 2,
}


def prompts(batch=1, seed=3, padding=1):
    """Embeddings of prompts whose last tokens are padding, and of the negative ones."""
    mask = (torch.arange(TEXT) < TEXT - padding).long().expand(batch, TEXT)
    return {
        "prompt_embeds": random(batch, TEXT, TEXT_DIM, seed=seed),
        "prompt_attention_mask": mask,
        "negative_prompt_embeds": random(batch, TEXT, TEXT_DIM, seed=seed + 1),
        "negative_prompt_attention_mask": mask,
    }


VIDEO = {**prompts(), "height": 32, "width": 64, "num_frames": 5, "guidance_scale": 3.0}
PICTURE = random(1, 3, 32, 64, seed=1).tanh() / 2 + 0.5
VARIANTS = {
    "odd size": {"height": 96, "width": 32, "num_frames": 3},
    "one frame": {"num_frames": 1},
    "unguided": {"guidance_scale": 1.0},
    "batch": prompts(2),
}
VAE = {  # shrinks space by 8 and time by 2
    "latent_channels": CHANNELS,
    "block_out_channels": (8, 8),
    "decoder_block_out_channels": (8, 8),
    "layers_per_block": (1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1),
    "spatio_temporal_scaling": (True, False),
    "decoder_spatio_temporal_scaling": (True, False),
    "decoder_inject_noise": (False, False, False),
    "spatial_compression_ratio": 8,
    "temporal_compression_ratio": 2,
}


def tiny_ltx_pipeline(pipeline_class=diffusers.LTXPipeline, **overrides):
    """An LTX pipeline of this class, for embedded prompts."""
    more = {"down_block_types": ("LTXVideoDownBlock3D",) * 2, "patch_size": 4}
    vae = seeded(diffusers.AutoencoderKLLTXVideo, seed=1, **VAE, **more)
    transformer = seeded(diffusers.LTXVideoTransformer3DModel, **LTX_CONFIG)
    return of_class(pipeline_class, **{"vae": vae, "transformer": transformer, **overrides})


FAMILIES = [
    Family("ltx", tiny_ltx_pipeline, VIDEO, VARIANTS),
    Family(
        "ltx image to video",
        lambda: tiny_ltx_pipeline(diffusers.LTXImageToVideoPipeline),
        {**VIDEO, "image": PICTURE},
        {"odd size": VARIANTS["odd size"], "unguided": VARIANTS["unguided"]},
    ),
    Family(
        "ltx conditions",
        lambda: tiny_ltx_pipeline(diffusers.LTXConditionPipeline),
        {**VIDEO, "image": PICTURE, "frame_index": 0, "strength": 0.9},
        {
            "no condition": {"image": None},
            "a picture at the end": {"frame_index": 4},
            "two pictures": {"image": [PICTURE, 1 - PICTURE], "frame_index": [0, 2]},
        },
    ),
]

# LTX-2: video and sound, and all its kinds of guidance.
SOUND_CHANNELS = 2
MEL_BINS = 16  # which shrink fourfold
LTX2_CONFIG = {
    **LTX_CONFIG,
    "audio_in_channels": SOUND_CHANNELS * MEL_BINS // 4,
    "audio_out_channels": SOUND_CHANNELS * MEL_BINS // 4,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 16,
    "vae_scale_factors": (2, 8, 8),
}


class Connectors(diffusers.ModelMixin):
    """In the place of what makes text for both streams of the text encoder's states."""

    def __init__(self):
        super().__init__()
        self.sound = torch.nn.Linear(TEXT_DIM, TEXT_DIM)

    def forward(self, embeds, mask, padding_side):
        return embeds, self.sound(embeds), mask


def ltx2_vae():
    return seeded(
        diffusers.AutoencoderKLLTX2Video,
        **VAE,
        down_block_types=("LTX2VideoDownBlock3D",) * 2,
        downsample_type=("spatiotemporal", "spatial"),
        upsample_type=("spatiotemporal", "spatial"),
        upsample_residual=(False, False),
        upsample_factor=(1, 1),
    )


def ltx2_pipeline(pipeline_class=diffusers.LTX2Pipeline, **overrides):
    """A pipeline of this class; `overrides` are entries of the transformer's config."""
    transformer = seeded(diffusers.LTX2VideoTransformer3DModel, **{**LTX2_CONFIG, **overrides})
    audio_vae = seeded(
        diffusers.AutoencoderKLLTX2Audio,
        base_channels=SOUND_CHANNELS * MEL_BINS // 4,
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        latent_channels=SOUND_CHANNELS,
        mel_bins=MEL_BINS,
    )
    parts = {"vae": ltx2_vae(), "audio_vae": audio_vae, "connectors": seeded(Connectors)}
    return of_class(pipeline_class, transformer=transformer, **parts)


LTX2_VIDEO = {
    **VIDEO,
    **prompts(padding=0),
    "stg_scale": 0.0,
    "audio_stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_modality_scale": 1.0,
}
LTX2_VARIANTS = {
    **VARIANTS,
    "batch": prompts(2, padding=0),
    "a block without attention": {"stg_scale": 1.0, "spatio_temporal_guidance_blocks": [1]},
    "streams apart": {"modality_scale": 3.0},
}
FAMILIES += [
    Family("ltx-2", ltx2_pipeline, LTX2_VIDEO, LTX2_VARIANTS, result=streams),
    Family(
        "ltx-2.3",
        lambda: ltx2_pipeline(
            gated_attn=True,
            cross_attn_mod=True,
            audio_gated_attn=True,
            audio_cross_attn_mod=True,
            perturbed_attn=True,
            rope_type="split",
        ),
        LTX2_VIDEO,
        {"a block without attention": LTX2_VARIANTS["a block without attention"]},
        brief=True,
    ),
    Family(
        "ltx-2 image to video",
        lambda: ltx2_pipeline(diffusers.LTX2ImageToVideoPipeline),
        {**LTX2_VIDEO, "image": PICTURE, "image_crf": 0},
        {"odd size": LTX2_VARIANTS["odd size"]},
        brief=True,
    ),
]

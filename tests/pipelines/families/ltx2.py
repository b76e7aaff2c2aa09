"""LTX-2: video and sound, and all its kinds of guidance."""

import diffusers
import torch

from tests.pipelines.families.family import Family, of_class
from tests.tiny_models import random, seeded

CHANNELS = 8  # of the video's latents
SOUND_CHANNELS, MEL_BINS = 2, 16  # of the sound's, which shrink fourfold
TEXT, TEXT_DIM = 5, 16
CONFIG = {
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "cross_attention_dim": 32,
    "audio_in_channels": SOUND_CHANNELS * MEL_BINS // 4,
    "audio_out_channels": SOUND_CHANNELS * MEL_BINS // 4,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 16,
    "caption_channels": TEXT_DIM,
    "vae_scale_factors": (2, 8, 8),
    "num_layers": 2,
}


class Connectors(diffusers.ModelMixin):
    """In the place of what makes text for both streams of the text encoder's states."""

    def __init__(self):
        super().__init__()
        self.sound = torch.nn.Linear(TEXT_DIM, TEXT_DIM)

    def forward(self, embeds, mask, padding_side):
        return embeds, self.sound(embeds), mask


def prompts(batch=1, seed=3):
    mask = torch.ones(batch, TEXT, dtype=torch.long)
    return {
        "prompt_embeds": random(batch, TEXT, TEXT_DIM, seed=seed),
        "prompt_attention_mask": mask,
        "negative_prompt_embeds": random(batch, TEXT, TEXT_DIM, seed=seed + 1),
        "negative_prompt_attention_mask": mask,
    }


def vae():
    """Shrinks space by 8 and time by 2."""
    return seeded(
        diffusers.AutoencoderKLLTX2Video,
        latent_channels=CHANNELS,
        block_out_channels=(8, 8),
        down_block_types=("LTX2VideoDownBlock3D",) * 2,
        decoder_block_out_channels=(8, 8),
        layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, False),
        decoder_spatio_temporal_scaling=(True, False),
        decoder_inject_noise=(False, False, False),
        downsample_type=("spatiotemporal", "spatial"),
        upsample_type=("spatiotemporal", "spatial"),
        upsample_residual=(False, False),
        upsample_factor=(1, 1),
        spatial_compression_ratio=8,
        temporal_compression_ratio=2,
    )


def sound_vae():
    return seeded(
        diffusers.AutoencoderKLLTX2Audio,
        base_channels=SOUND_CHANNELS * MEL_BINS // 4,
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        latent_channels=SOUND_CHANNELS,
        mel_bins=MEL_BINS,
    )


def transformer(**overrides):
    return seeded(diffusers.LTX2VideoTransformer3DModel, **{**CONFIG, **overrides})


def pipeline(pipeline_class=diffusers.LTX2Pipeline, **overrides):
    """A pipeline of this class; `overrides` are entries of the transformer's config."""
    parts = {
        "vae": vae(),
        "audio_vae": sound_vae(),
        "connectors": seeded(Connectors),
        "transformer": transformer(**overrides),
    }
    return of_class(pipeline_class, **parts)


VIDEO = {
    **prompts(),
    "height": 32,
    "width": 64,
    "num_frames": 5,
    "guidance_scale": 3.0,
    "stg_scale": 0.0,
    "audio_stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_modality_scale": 1.0,
}
VARIANTS = {
    "odd size": {"height": 96, "width": 32, "num_frames": 3},
    "one frame": {"num_frames": 1},
    "unguided": {"guidance_scale": 1.0},
    "batch": prompts(2),
    "a block without attention": {"stg_scale": 1.0, "spatio_temporal_guidance_blocks": [1]},
    "streams apart": {"modality_scale": 3.0},
}
FAMILIES = [
    Family("ltx-2", pipeline, VIDEO, VARIANTS, slow=True),
    Family(
        "ltx-2.3",
        lambda: pipeline(
            gated_attn=True,
            cross_attn_mod=True,
            audio_gated_attn=True,
            audio_cross_attn_mod=True,
            perturbed_attn=True,
            rope_type="split",
        ),
        VIDEO,
        {"a block without attention": VARIANTS["a block without attention"]},
        brief=True,
    ),
    Family(
        "ltx-2 image to video",
        lambda: pipeline(diffusers.LTX2ImageToVideoPipeline),
        {**VIDEO, "image": random(1, 3, 32, 64, seed=1).tanh() / 2 + 0.5, "image_crf": 0},
        {"odd size": VARIANTS["odd size"]},
        brief=True,
    ),
]

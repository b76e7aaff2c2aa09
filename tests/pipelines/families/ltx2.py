"""LTX-2: video and sound, and all its kinds of guidance."""

import diffusers
import torch

from tests.pipelines.families import ltx
from tests.pipelines.families.family import Family, of_class, streams
from tests.tiny_models import seeded

SOUND_CHANNELS, MEL_BINS = 2, 16  # of the sound's, which shrink fourfold
CONFIG = {
    **ltx.LTX_CONFIG,
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
        self.sound = torch.nn.Linear(ltx.TEXT_DIM, ltx.TEXT_DIM)

    def forward(self, embeds, mask, padding_side):
        return embeds, self.sound(embeds), mask


def vae():
    return seeded(
        diffusers.AutoencoderKLLTX2Video,
        **ltx.VAE,
        down_block_types=("LTX2VideoDownBlock3D",) * 2,
        downsample_type=("spatiotemporal", "spatial"),
        upsample_type=("spatiotemporal", "spatial"),
        upsample_residual=(False, False),
        upsample_factor=(1, 1),
    )


def pipeline(pipeline_class=diffusers.LTX2Pipeline, **overrides):
    """A pipeline of this class; `overrides` are entries of the transformer's config."""
    transformer = seeded(diffusers.LTX2VideoTransformer3DModel, **{**CONFIG, **overrides})
    audio_vae = seeded(
        diffusers.AutoencoderKLLTX2Audio,
        base_channels=SOUND_CHANNELS * MEL_BINS // 4,
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        latent_channels=SOUND_CHANNELS,
        mel_bins=MEL_BINS,
    )
    parts = {"vae": vae(), "audio_vae": audio_vae, "connectors": seeded(Connectors)}
    return of_class(pipeline_class, transformer=transformer, **parts)


VIDEO = {
    **ltx.VIDEO,
    **ltx.prompts(padding=0),
    "stg_scale": 0.0,
    "audio_stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_modality_scale": 1.0,
}
VARIANTS = {
    **ltx.VARIANTS,
    "batch": ltx.prompts(2, padding=0),
    "a block without attention": {"stg_scale": 1.0, "spatio_temporal_guidance_blocks": [1]},
    "streams apart": {"modality_scale": 3.0},
}
FAMILIES = [
    Family("ltx-2", pipeline, VIDEO, VARIANTS, result=streams),
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
        {**VIDEO, "image": ltx.PICTURE, "image_crf": 0},
        {"odd size": VARIANTS["odd size"]},
        brief=True,
    ),
]

"""Mochi, whose prompts are padded, and the padding masked."""

import diffusers
import torch

from chipsparse.pipelines.families.mochi import GAPS
from tests.pipelines.families.family import Family, of_class
from tests.tiny_models import random, seeded

CHANNELS = 12  # of the latents
TEXT = 12
TEXT_DIM = 16
TRANSFORMER = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 3,
    "pooled_projection_dim": 16,
    "in_channels": CHANNELS,
    "text_embed_dim": TEXT_DIM,
    "time_embed_dim": 8,
    "max_sequence_length": TEXT,
}


def tiny_transformer():
    """Like a trained one it rotates: a new one does not."""
    transformer = diffusers.MochiTransformer3DModel(**TRANSFORMER)
    torch.nn.init.normal_(transformer.pos_frequencies)
    return transformer


def tiny_pipeline():
    """With a VAE that shrinks space by 8 and time by 6, as the real one does."""
    vae = seeded(
        diffusers.AutoencoderKLMochi,
        encoder_block_out_channels=(32,) * 4,
        decoder_block_out_channels=(32,) * 4,
        layers_per_block=(1,) * 5,
        add_attention_block=(False,) * 5,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    parts = {"vae": vae, "transformer": seeded(tiny_transformer), "scheduler": scheduler}
    return of_class(diffusers.MochiPipeline, **parts)


def prompts(*lengths, negative=()):
    """Prompts with so many tokens before the padding, which holds other values than zeros."""
    call = {}
    for name, sizes, seed in (("prompt", lengths, 3), ("negative_prompt", negative, 4)):
        if sizes:
            places = torch.arange(TEXT).expand(len(sizes), TEXT)
            call[f"{name}_embeds"] = random(len(sizes), TEXT, TEXT_DIM, seed=seed)
            call[f"{name}_attention_mask"] = places < torch.tensor(sizes)[:, None]
    return call


GUIDED = {**prompts(7, negative=[3]), "guidance_scale": 4.5}
WITH_A_GAP = GUIDED["prompt_attention_mask"] & (torch.arange(TEXT) != 2)
VIDEO = {**prompts(TEXT), "height": 64, "width": 48, "num_frames": 13, "guidance_scale": 1.0}

FAMILIES = [
    Family(
        "mochi",
        tiny_pipeline,
        VIDEO,
        {
            "guided": GUIDED,
            "guided by nothing": {**prompts(7, negative=[0]), "guidance_scale": 4.5},
            "guided, equal lengths": {**prompts(5, negative=[5]), "guidance_scale": 4.5},
            "batch": prompts(5, 5),
            "guided batch": {**prompts(2, 9, negative=[9, 1]), "guidance_scale": 4.5},
            "odd size": {"height": 48, "width": 80, "num_frames": 7},
            "one frame": {"num_frames": 1},
            "a mask with gaps": {**GUIDED, "prompt_attention_mask": WITH_A_GAP},
        },
        masked={"a mask with gaps": f"attention runs dense: {GAPS}"},
        kinds=2,  # the last block makes no text
    ),
]

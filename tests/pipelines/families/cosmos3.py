"""Cosmos 3: video and images, conditions, sound and actions, of a prompt that it reads itself."""

from types import SimpleNamespace

import diffusers
import torch
from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import CosmosActionCondition

from tests.pipelines.families.family import Family, streams, strong
from tests.tiny_models import FLOW, LATENT_CHANNELS, quiet, random, seeded, tiny_wan_vae

SOUND_DIM = 6
SOUND_HOP = 40
SOUND_RATE = 1000
ACTION_DIM = 12
CONFIG = {
    "head_dim": 16,
    "hidden_size": 24,  # fewer than those of all heads
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "latent_channel": LATENT_CHANNELS,
    "patch_latent_dim": 4 * LATENT_CHANNELS,
    "rope_axes_dim": (2, 3, 3),
    "vocab_size": 100,
    "sound_gen": True,
    "sound_dim": SOUND_DIM,
    "action_gen": True,
    "action_dim": ACTION_DIM,
}


class Words:
    """A tokenizer with a token for each word."""

    eos_token_id = 1

    def convert_tokens_to_ids(self, _token):
        return 2

    def apply_chat_template(self, conversations, **_options):
        words = " ".join(each["content"] for each in conversations).split()
        return SimpleNamespace(input_ids=[3 + sum(map(ord, word)) % 90 for word in words])


class Sound(torch.nn.Module):
    """In the place of what makes a waveform of sound latents, which stay as they are."""

    _hop_size = SOUND_HOP
    config = SimpleNamespace(sampling_rate=SOUND_RATE)

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    @property
    def dtype(self):
        return self.weight.dtype

    def decode(self, latents):
        return latents


class Pipeline(diffusers.Cosmos3OmniPipeline):
    """The real one; it has no name for how long a prompt is, which families are to tell."""

    def __call__(self, *args, max_sequence_length=None, **kwargs):
        return super().__call__(*args, **kwargs)


def transformer(**overrides):
    """With blocks that change something, and embeddings that are not zeros, as they start."""
    made = seeded(diffusers.Cosmos3OmniTransformer, **{**CONFIG, **overrides})
    strong(made, 10, ("to_add_out", "mlp_moe_gen.down_proj"))
    with torch.no_grad():
        made.audio_modality_embed.copy_(random(24, seed=1))
        made.action_modality_embed.copy_(random(24, seed=2))
    return made


def pipeline(**overrides):
    made = Pipeline(
        transformer=transformer(**overrides),
        text_tokenizer=Words(),
        vae=tiny_wan_vae(),
        scheduler=diffusers.UniPCMultistepScheduler(**FLOW),
        enable_safety_checker=False,
        default_use_system_prompt=False,
    )
    made.sound_tokenizer = Sound()
    return quiet(made)


def picture(frames=1, height=128, width=96, seed=4):
    """``[F, 3, H, W]`` in 0..1."""
    return random(frames, 3, height, width, seed=seed).sigmoid()


def action(mode, **given):
    """Four actions, and the five frames around them."""
    if "video" not in given:
        given["image"] = picture(height=192, width=320)[0]
    condition = CosmosActionCondition(mode, 4, "av", resolution_tier=256, **given)
    return {"action": condition, "num_frames": None, "height": None, "width": None}


VIDEO = {
    "prompt": "a red circle moves left",
    "negative_prompt": "a blue square grows now",
    "num_frames": 9,
    "height": 128,
    "width": 96,
    "guidance_scale": 3.0,
    "add_resolution_template": False,
    "add_duration_template": False,
    "max_sequence_length": 7,  # with two that the pipeline adds
}
VARIANTS = {
    "odd size": {"height": 120, "width": 152},
    "not guided": {"guidance_scale": 1.0},
    "one frame": {"num_frames": 1, "height": 160},
    "first frame": {"image": picture()},
    "first frames": {"video": picture(5), "condition_frame_indexes_vision": (0, 1)},
    "sound, prompts of two lengths": {"enable_sound": True, "add_resolution_template": True},
    "policy": action("policy"),
    "forward dynamics": action("forward_dynamics", raw_actions=random(4, 9, seed=6)),
}
FAMILIES = [
    Family("cosmos 3", pipeline, VIDEO, VARIANTS, result=streams),
    Family(
        "cosmos 3, an activation without a kernel",
        lambda: pipeline(hidden_act="relu2", qk_norm_for_text=False, use_und_k_norm_for_gen=True),
        VIDEO,
        fallbacks=("MLP runs dense in 2 of 2 layers", "its activation relu2 is not supported"),
        dense_parts=("mlp",),
        brief=True,
    ),
]

"""MiniMax-H3: text alone, with keyframes and with references, through the parts of its pipeline."""

from types import SimpleNamespace

import torch
from diffusers import MiniMaxH3Scheduler, MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3 import before_denoise as h3

from tests.pipelines.families.family import HEADS, Family
from tests.tiny_models import random, seeded

# Of the latents.
CHANNELS = 4
AUDIO_CHANNELS = 6
TEXT = 9
TEXT_DIM = 16
SPACE = 16  # pixels of a latent
KEYFRAME_NOISE = 0.999  # the timestep at which its pipeline holds keyframes
VAE_CONFIG = {  # what a config file says of its VAE
    "latent_channels": CHANNELS,
    "spatial_downsample_factors": (2, 2, 2, 2, 1, 1),
    "temporal_downsample_factors": (1, 2, 2, 1, 1, 1),
    "clip_length": 17,
    "token_drop": 3,
}
H3_CONFIG = {
    **HEADS,
    "hidden_size": 24,  # fewer than those of all heads, as of the real one
    "num_layers": 3,
    "num_refiner_layers": 1,
    "ffn_dim": 40,
    "in_channels": CHANNELS,
    "audio_in_channels": AUDIO_CHANNELS,
    "text_dim": TEXT_DIM,
    "freq_dim": 16,
    "time_embed_hidden_dim": 24,
    "time_embed_dim": 16,
    "rope_freq_dim": 2,
}


def tiny_h3_transformer(*, seed=0, **overrides):
    return seeded(MiniMaxH3Transformer3DModel, seed=seed, **{**H3_CONFIG, **overrides})


def rows_of_video(latents):
    """``[B, C, F, H, W]`` as rows ``[B, N, 4 C]``; 2x2 latents make one."""
    batch, channels, frames, rows, columns = latents.shape
    patches = latents.view(batch, channels, frames, rows // 2, 2, columns // 2, 2)
    return patches.permute(0, 2, 3, 5, 1, 4, 6).reshape(batch, -1, 4 * channels)


class H3Loop:
    """The denoising loop of MiniMax-H3 around a transformer, from embedded prompts to latents.

    It packs the sequence and its timesteps with the functions of diffusers' own pipeline. Video and
    audio latents come out in one tensor ``[B, numbers]``.
    """

    def __init__(self, transformer):
        self.transformer = transformer
        self.scheduler = MiniMaxH3Scheduler(12.0)
        self.audio_scheduler = MiniMaxH3Scheduler(3.0)
        self.vae = SimpleNamespace(config=VAE_CONFIG)
        self.components = {"transformer": transformer, "scheduler": self.scheduler}

    def to(self, device, dtype):
        self.transformer.to(device, dtype)
        return self

    @torch.no_grad()
    def __call__(
        self,
        *,
        prompt_embeds,
        height,
        width,
        num_frames,
        num_inference_steps,
        generator,
        keyframes=(),
        references=(),
        vision_rows=0,
        **_,
    ):
        device = self.transformer.device
        batch = prompt_embeds.shape[0]
        size = (num_frames - 5) // 17 * 5 + 2, height // SPACE, width // SPACE
        sounds = round(num_frames / 24 * 40)
        tags = torch.ones(prompt_embeds.shape[1], dtype=torch.long)
        tags[2 : 2 + vision_rows] = 0
        shapes = [(1, *size[1:])] * len(keyframes)
        shapes += [shape for kind, shape in references if kind != "audio"]
        conditions = [random(1, CHANNELS, *shape, seed=11) for shape in shapes]
        counts = [count for kind, count in references if kind == "audio"]
        audios = [random(count, AUDIO_CHANNELS, seed=12) for count in counts]
        layout = (*size, sounds, (1, 2, 2), 2, 2, 0)
        if references:
            kinds = [SimpleNamespace(kind=kind, has_audio=False) for kind, _ in references]
            packed = h3.MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
                tags,
                kinds,
                conditions,
                audios,
                *layout,
            )
        else:
            packed = h3.MiniMaxH3PrepareLayoutStep.build_packed_sequence(tags, *layout, keyframes)
        *rows, condition_rows, audio_rows = packed
        names = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
        where = {name: value.to(device) for name, value in zip(names, rows, strict=True)}

        def noise(*shape):
            return torch.randn(batch, *shape, generator=generator)

        def together(before, own):
            return torch.cat([*(each.expand(batch, -1, -1) for each in before), own], 1).to(device)

        video = together(
            [rows_of_video(each) for each in conditions],
            rows_of_video(noise(CHANNELS, *size)),
        )
        audio = together([each[None] for each in audios], noise(2 * sounds, AUDIO_CHANNELS))
        for scheduler in (self.scheduler, self.audio_scheduler):
            scheduler.set_timesteps(num_inference_steps + 1)  # it counts the end as a step
        for at, audio_at in zip(
            self.scheduler.timesteps,
            self.audio_scheduler.timesteps,
            strict=True,
        ):
            times = float(at), float(audio_at), max(float(at), KEYFRAME_NOISE), 1.0
            timestep, timestep_indices = h3.MiniMaxH3SetTimestepsStep.build_row_timesteps(
                rows[2],
                rows[3],
                condition_rows,
                audio_rows,
                tags.numel(),
                *times,
            )
            velocity, audio_velocity = self.transformer(
                hidden_states=video,
                audio_hidden_states=audio,
                encoder_hidden_states=prompt_embeds.to(device),
                timestep=timestep.to(device),
                timestep_indices=timestep_indices.to(device),
                attention_kwargs=None,
                return_dict=False,
                **where,
            )
            for scheduler, time, latents, change, first in (
                (self.scheduler, at, video, velocity, condition_rows),
                (self.audio_scheduler, audio_at, audio, audio_velocity, audio_rows),
            ):
                own = (change[:, first:].float(), time, latents[:, first:])
                latents[:, first:] = scheduler.step(*own, return_dict=False)[0]
        own = video[:, condition_rows:], audio[:, audio_rows:]
        return (torch.cat([each.flatten(1) for each in own], dim=1),)


def tiny_h3_pipeline(**overrides):
    return H3Loop(tiny_h3_transformer(**overrides))


SIZE = {"height": 8 * SPACE, "width": 12 * SPACE, "num_frames": 22}  # 7 frames of latents
VIDEO = {**SIZE, "prompt_embeds": random(1, TEXT, TEXT_DIM, seed=3)}
VARIANTS = {
    "odd size": {"height": 6 * SPACE, "width": 14 * SPACE, "num_frames": 39},
    "batch": {"prompt_embeds": random(2, TEXT, TEXT_DIM, seed=5)},
    "first frame": {"keyframes": ("first",)},
    "first and last frame": {"keyframes": ("first", "last"), "vision_rows": 4},
    "references": {
        "references": (("image", (1, 10, 6)), ("audio", 14), ("video", (3, 4, 8))),
        "vision_rows": 3,
    },
}

# Graphs as without chipsparse: of the token refiner, and of blocks with one timestep or several.
FAMILIES = [Family("minimax h3", tiny_h3_pipeline, VIDEO, VARIANTS, kinds=3)]

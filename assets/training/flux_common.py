"""What the scripts of the tiny Flux share: stills to train on, the pipeline, its images."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
import torch
from common import Batches, Example, load_examples
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from flow_matching import SHIFT
from flux_text import TextEncoders
from PIL import Image
from still_captions import describe_still
from still_scenes import sample_still, stage_still
from torch.nn.attention import SDPBackend, sdpa_kernel


def make_still(rng: np.random.Generator) -> Example:
    """The staging arrays of a still and its caption."""
    still = sample_still(rng)
    caption = describe_still(still, rng)
    return stage_still(still, rng), caption


def load_stills(*, seed: int, first: int, batch: int, workers: int) -> Batches:
    """`load_examples` of stills."""
    return load_examples(make_still, seed=seed, first=first, batch=batch, workers=workers)


def attention_without_cudnn() -> AbstractContextManager[None]:
    """Keeps attention off cuDNN, which PyTorch prefers on Hopper from 2.11 on.

    There its backward pass has had faults with sequences whose length, like that of ours (1024 + 64
    tokens), is no multiple of 128: pytorch issues 169849 and 196678.
    """
    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )


def new_pipeline(
    vae: AutoencoderKL, encoders: TextEncoders, transformer: FluxTransformer2DModel
) -> FluxPipeline:
    """The pipeline made of the given parts."""
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=vae,
        text_encoder=encoders.clip,
        tokenizer=encoders.clip_tokenizer,
        text_encoder_2=encoders.t5,
        tokenizer_2=encoders.t5_tokenizer,
        transformer=transformer,
    )


def sample_images(
    pipeline: FluxPipeline, prompts: list[str], *, steps: int, seed: int = 0, batch: int = 16
) -> list[Image.Image]:
    """One 256x256 image per prompt with guidance 4 against the empty prompt; seeds count up."""
    device = pipeline.transformer.device
    images = []
    pipeline.set_progress_bar_config(disable=True)
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]
        cast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
        with attention_without_cudnn(), cast:
            images += pipeline(
                part,
                negative_prompt=[""] * len(part),
                true_cfg_scale=4.0,
                height=256,
                width=256,
                num_inference_steps=steps,
                max_sequence_length=64,
                generator=[
                    torch.Generator(device).manual_seed(seed + first + i) for i in range(len(part))
                ],
            ).images
    return images

"""Whole pipelines that denoise a video in sections, one loop after another within a call.

FramePack, Animate and long LTX videos have encoders that are not here: their outputs are given.
"""

import functools

import diffusers

from tests.pipelines.families import history, hunyuan_video, ltx, wan_kin
from tests.pipelines.families.family import of_class, picture, wan_like, wan_prompts
from tests.tiny_models import FLOW, random

STEPS = 6
SIZE = {"height": 64, "width": 48, "num_inference_steps": STEPS}
PROMPTS = {**wan_prompts(), "max_sequence_length": 16, "guidance_scale": 4.0}
UNIPC = functools.partial(diffusers.UniPCMultistepScheduler, **FLOW)


def forcing(pipeline_class=diffusers.SkyReelsV2DiffusionForcingPipeline):
    """SkyReels V2: several windows of a long video; blocks may wait for those before."""
    transformer = wan_kin.skyreels().transformer
    return wan_like(pipeline_class, transformer=transformer, scheduler=UNIPC())


def pyramid():
    """Helios: chunks of frames, each at three sizes."""
    transformer = history.helios().transformer
    scheduler = diffusers.HeliosScheduler(gamma=0.25)
    return wan_like(diffusers.HeliosPyramidPipeline, transformer=transformer, scheduler=scheduler)


def animate():
    """Wan Animate: segments of the driving video."""
    transformer = wan_kin.animate(image_dim=8).transformer
    pipe = wan_like(diffusers.WanAnimatePipeline, transformer=transformer, scheduler=UNIPC())
    pipe.encode_image = lambda *_, **__: random(1, 5, 8, seed=5)
    return pipe


def long_ltx():
    """LTX-Video: windows, each of which leaves out the last timestep of its schedule."""
    scheduler = diffusers.LTXEulerAncestralRFScheduler()
    pipe = ltx.tiny_ltx_pipeline(diffusers.LTXI2VLongMultiPromptPipeline, scheduler=scheduler)
    pipe.encode_prompt = lambda *_, **__: tuple(ltx.prompts().values())
    return pipe


def framepack():
    """FramePack: sections, each with a schedule of its own."""
    parts = {"transformer": history.framepack().transformer, "vae": hunyuan_video.vae()}
    pipe = of_class(diffusers.HunyuanVideoFramepackPipeline, **parts)
    tokens = random(1, history.IMAGE_TOKENS, history.IMAGE_DIM, seed=6)
    pipe.encode_image = lambda *_, **__: tokens
    return pipe


def _pictures(count, width, height):
    return [picture(3, width, height).rotate(20 * number) for number in range(count)]


FORCED = {**SIZE, **PROMPTS, "prompt": None, "num_frames": 17, "base_num_frames": 17}
LAGGING = FORCED | {"ar_step": 2}
LONG = {"base_num_frames": 17, "overlap_history": 5, "num_frames": 25}
# What makes it, a call of it, and how many sections that has.
PIPELINES = {
    "forcing": (forcing, FORCED, 1),
    "a lag": (forcing, LAGGING, 1),
    "blocks that wait": (forcing, LAGGING | {"causal_block_size": 2, "num_frames": 13}, 1),
    "windows with a lag": (forcing, LAGGING | LONG | {"addnoise_condition": 20}, 2),
    "from a video with a lag": (
        functools.partial(forcing, diffusers.SkyReelsV2DiffusionForcingVideoToVideoPipeline),
        LAGGING | LONG | {"video": _pictures(17, 48, 64)},
        2,
    ),
    "helios pyramid": (
        pyramid,
        {
            **PROMPTS,
            "height": 128,
            "width": 128,
            "num_frames": 9,
            "num_latent_frames_per_chunk": 2,
            "pyramid_num_inference_steps_list": [STEPS] * 3,
        },
        6,
    ),
    "animate": (
        animate,
        {
            **SIZE,
            **PROMPTS,
            **wan_prompts(512),
            "image": picture(3, 48, 64),
            "pose_video": _pictures(17, 48, 64),
            "face_video": _pictures(17, wan_kin.FACE, wan_kin.FACE),
            "segment_frame_length": 9,
        },
        2,
    ),
    "long ltx": (
        long_ltx,
        {
            "prompt": "",
            "height": 32,
            "width": 64,
            "num_frames": 17,
            "guidance_scale": 3.0,
            "num_inference_steps": STEPS + 1,
            "temporal_tile_size": 8,
            "temporal_overlap": 4,
        },
        4,
    ),
    "framepack": (
        framepack,
        {
            **SIZE,
            **hunyuan_video.prompts(history.TEXT),
            **hunyuan_video.negative_prompts(history.TEXT),
            "image": picture(3, 48, 64),
            "num_frames": 9,
            "latent_window_size": 2,
        },
        2,
    ),
}

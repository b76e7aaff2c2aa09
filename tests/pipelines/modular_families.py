"""Model families that diffusers runs by plain and by modular pipelines, the latter made of both.

The blocks that encode prompts and decode latents are left out: the calls give embeddings, and the
tests compare latents. A guider has what a plain pipeline takes as an argument of its call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from diffusers import ClassifierFreeGuidance

from tests.pipelines.families import flux, flux2, hunyuan_video, ltx, qwen_image, wan
from tests.pipelines.families import stable_diffusion3 as sd3
from tests.tiny_models import TEXT_DIM, random

LEFT_OUT = ("text_encoder", "vae_encoder", "image_encoder", "controlnet_vae_encoder", "decode")


@dataclass(frozen=True)
class Both:
    """One model, with a pipeline of either kind."""

    blocks: str  # name of the modular pipeline's blocks in diffusers
    make: Callable[[], Any]  # a new plain pipeline
    call: Mapping[str, Any]  # of the plain one; what the modular one knows goes to it, too
    guidance: float | None = None  # scale of the modular pipeline's guiders, if it has any
    same: bool = True  # both give the same bits: not where the plain one guides in a batch

    def modular(self, plain: Any | None = None, left_out: Sequence[str] = LEFT_OUT) -> Any:
        """A modular pipeline of the same components as a plain one, without some blocks."""
        blocks = getattr(diffusers, self.blocks)()
        for name in left_out:
            blocks.sub_blocks.pop(name, None)
        pipe = blocks.init_pipeline()
        pipe.set_progress_bar_config(disable=True)
        plain = self.make() if plain is None else plain
        wanted = {*pipe._component_specs, *pipe._config_specs}
        has = {**plain.config, **plain.components}
        pipe.update_components(**{name: item for name, item in has.items() if name in wanted})
        pipe.vae = plain.vae  # which tells the sizes of latents
        for name in wanted:
            if name.startswith("guider"):
                made = ClassifierFreeGuidance(guidance_scale=self.guidance)
                pipe.update_components(**{name: made})
        return pipe

    def generate(self, pipe: Any, *, steps: int = 6, **changes: Any) -> torch.Tensor:
        """The scheduler's result at the last step of a call of a pipeline of either kind."""
        options = {**self.call, **changes, "num_inference_steps": steps}
        options["generator"] = torch.Generator().manual_seed(0)
        found: list[torch.Tensor] = []
        step = pipe.scheduler.step

        def look(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            found[:] = result[:1]
            return result

        pipe.scheduler.step = look
        try:
            if isinstance(pipe, diffusers.ModularPipeline):
                names = set(pipe.blocks.input_names)
                pipe(**{name: value for name, value in options.items() if name in names})
            else:
                pipe(**options, output_type="latent")
        finally:
            del pipe.scheduler.step
        return found[0]


FLUX_PROMPT = {
    "prompt": None,
    "prompt_embeds": random(1, 16, TEXT_DIM, seed=3),
    "pooled_prompt_embeds": random(1, TEXT_DIM, seed=4),
}
WAN = {**wan.VIDEO, **wan.PROMPTS, "latents": random(1, 4, 3, 8, 6, seed=5)}
KLEIN = {**flux2.PICTURE, **flux2.GUIDED}
QWEN = {**qwen_image.PICTURE, **qwen_image.VARIANTS["padded and guided"]}
SD3 = {**sd3.PICTURE, **sd3.GUIDED}
FAMILIES = {
    "wan": Both("WanBlocks", wan.tiny_wan_pipeline, WAN, 4.0),
    "wan 2.2 two experts": Both("Wan22Blocks", wan.two_experts, WAN, 4.0),
    "flux": Both("FluxAutoBlocks", flux.guidance_distilled, {**flux.PICTURE, **FLUX_PROMPT}),
    "flux2": Both("Flux2AutoBlocks", flux2.tiny_flux2_pipeline, flux2.PICTURE),
    "flux2 klein": Both("Flux2KleinBaseAutoBlocks", flux2.klein, KLEIN, 3.0),
    "flux2 klein distilled": Both(
        "Flux2KleinAutoBlocks",
        flux2.klein,
        {**KLEIN, "guidance_scale": 1.0},
    ),
    "qwen-image": Both("QwenImageAutoBlocks", qwen_image.tiny_qwen_pipeline, QWEN, 3.0),
    "sd3": Both("StableDiffusion3AutoBlocks", sd3.tiny_pipeline, SD3, 5.0, same=False),
    "ltx": Both("LTXAutoBlocks", ltx.tiny_ltx_pipeline, ltx.VIDEO, 3.0, same=False),
    "hunyuan video 1.5": Both(
        "HunyuanVideo15AutoBlocks",
        hunyuan_video.pipeline15,
        hunyuan_video.VIDEO15,
        3.0,
    ),
}

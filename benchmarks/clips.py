"""Paired generation: the same prompts and seeds, dense and sparse, as pixels.

An image is a clip of one frame.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import chipsparse
from chipsparse.profiles.profile import Profile, find_profile
from chipsparse.report.generation import GenerationReport, StepTimer


@dataclass(frozen=True)
class Clips:
    """A batch of generated clips.

    Attributes:
        frames: float32 ``[B, F, H, W, C]`` in 0..1, on the pipeline's device.
        seconds: time of the denoising loop, from the first transformer call to the last step; that
            of the device where it is a GPU.
        report: what the patched pipeline did, or None for a dense run.
    """

    frames: torch.Tensor
    seconds: float
    report: GenerationReport | None


class Workload:
    """A model, its profile and a list of prompts; seeds are the prompts' numbers."""

    def __init__(
        self, model: Path, prompts: list[str], device: torch.device, dtype: torch.dtype
    ) -> None:
        from diffusers import DiffusionPipeline

        self.name = model.name
        self.pipe: Any = DiffusionPipeline.from_pretrained(str(model), dtype=dtype)
        self.pipe.to(device)
        self.pipe.set_progress_bar_config(disable=True)
        self.device = device
        self.prompts = prompts
        self.profile: Profile = find_profile(model, type(self.pipe.transformer).__name__)

    @classmethod
    def of(cls, args: Namespace, device: torch.device, dtype: torch.dtype) -> Workload:
        """The model and the first prompts that the command asks for."""
        prompts = args.prompts.read_text(encoding="utf-8").splitlines()
        return cls(args.model, prompts[: args.first + args.count], device, dtype)

    @property
    def makes_images(self) -> bool:
        """Whether the pipeline makes images and no videos."""
        return not hasattr(self.pipe, "video_processor")

    def settings(self, **changes: Any) -> dict[str, Any]:
        """Arguments of the pipeline call: the profile's, with changes."""
        return {k: v for k, v in vars(self.profile.generation).items() if v is not None} | changes

    def generate(
        self,
        config: chipsparse.SparsityConfig | None,
        *,
        prompts: list[str] | None = None,
        first_seed: int = 0,
        **changes: Any,
    ) -> Clips:
        """Generates one clip per prompt in one batch; ``config`` None runs the stock pipeline."""
        prompts = self.prompts if prompts is None else prompts
        clock = _LoopClock(self.pipe, self.device)
        arguments = self.settings(**changes) | {
            "prompt": prompts,
            "generator": [
                torch.Generator().manual_seed(first_seed + i) for i in range(len(prompts))
            ],
            # A video is decoded clip by clip: the VAE needs much memory for each.
            "output_type": "pt" if self.makes_images else "latent",
            "callback_on_step_end": clock.step_ended,
        }
        if arguments.get("true_cfg_scale", 1) > 1:  # without a prompt, guidance would be left out
            arguments["negative_prompt"] = [""] * len(prompts)
        handle = None if config is None else chipsparse.enable(self.pipe, config)
        try:
            output = self.pipe(**arguments)
        finally:
            clock.remove()
            if handle is not None:
                handle.disable()
        report = None if handle is None else handle.report
        if self.makes_images:
            frames = output.images.permute(0, 2, 3, 1)[:, None].float()
        else:
            frames = self.decode(output.frames)
        return Clips(frames, clock.seconds(), report)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents to frames, clip by clip, as the pipeline does."""
        vae = self.pipe.vae
        shape = (1, vae.config.z_dim, 1, 1, 1)
        mean = torch.tensor(vae.config.latents_mean).view(shape).to(latents)
        std = torch.tensor(vae.config.latents_std).view(shape).to(latents)
        scaled = (latents * std + mean).to(vae.dtype)
        clips = [
            self.pipe.video_processor.postprocess_video(
                vae.decode(clip[None], return_dict=False)[0], output_type="pt"
            )[0]
            for clip in scaled
        ]
        return torch.stack(clips).permute(0, 1, 3, 4, 2).float()


def asked_for(args: Namespace) -> dict[str, Any]:
    """The settings of a generation that a command's ``--steps`` and ``--size`` change."""
    steps = {"num_inference_steps": args.steps} if args.steps else {}
    return steps | dict(zip(("height", "width", "num_frames"), args.size or (), strict=False))


class _LoopClock:
    """Times the denoising loop alone: no text encoding, no decoding; the host waits for nothing."""

    def __init__(self, pipe: Any, device: torch.device) -> None:
        self._device = device
        self._timer: StepTimer | None = None
        self._hook = pipe.transformer.register_forward_pre_hook(self._call_begins)

    def _call_begins(self, *_: Any) -> None:
        self._timer = StepTimer(self._device)
        self._hook.remove()  # no step is captured while a hook runs with the model

    def step_ended(self, _pipe: Any, _step: int, _timestep: Any, tensors: Any) -> Any:
        """Callback of the pipeline."""
        assert self._timer is not None
        self._timer.stop()
        return tensors

    def seconds(self) -> float:
        """From the first transformer call to the end of the last step."""
        seconds = None if self._timer is None else self._timer.seconds()
        assert seconds is not None
        return seconds

    def remove(self) -> None:
        self._hook.remove()

"""Paired generation: the same prompts and seeds, dense and sparse, as pixels.

An image is a clip of one frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import chipsparse
from chipsparse.pipelines.flow_shift import with_flow_shift
from chipsparse.profiles.profile import Profile, find_profile
from chipsparse.report.generation import GenerationReport, StepTimer


@dataclass(frozen=True)
class Clip:
    """A generated clip.

    Attributes:
        frames: float32 ``[F, H, W, C]`` in 0..1, on the pipeline's device.
        seconds: time of the denoising loop, from the first transformer call to the last step; that
            of the device where it is a GPU.
        report: what the patched pipeline did, or None for a dense run.
    """

    frames: torch.Tensor
    seconds: float
    report: GenerationReport | None


class Workload:
    """A model, its profile and a list of prompts; seeds are the prompts' numbers.

    ``flow_shift`` None leaves the scheduler as it is.
    """

    def __init__(
        self,
        model: Path,
        prompts: list[str],
        device: torch.device,
        dtype: torch.dtype,
        *,
        flow_shift: float | None = None,
    ) -> None:
        from diffusers import DiffusionPipeline

        self.name = model.name
        self.pipe: Any = DiffusionPipeline.from_pretrained(str(model), dtype=dtype)
        if flow_shift is not None:
            self.pipe.scheduler = with_flow_shift(self.pipe.scheduler, flow_shift)
        self.pipe.to(device)
        self.pipe.set_progress_bar_config(disable=True)
        self.device = device
        self.prompts = prompts
        self.profile: Profile = find_profile(model, type(self.pipe.transformer).__name__)

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
        prompt: str,
        *,
        seed: int = 0,
        **changes: Any,
    ) -> Clip:
        """Generates a clip; ``config`` None runs the stock pipeline."""
        clock = _LoopClock(self.pipe, self.device)
        arguments = self.settings(**changes) | {
            "prompt": prompt,
            "generator": torch.Generator().manual_seed(seed),
            "output_type": "pt",
            "callback_on_step_end": clock.step_ended,
        }
        if arguments.get("true_cfg_scale", 1) > 1:  # without a prompt, guidance would be left out
            arguments["negative_prompt"] = ""
        handle = None if config is None else chipsparse.enable(self.pipe, config)
        try:
            output = self.pipe(**arguments)
        finally:
            clock.remove()
            if handle is not None:
                handle.disable()
        report = None if handle is None else handle.report
        frames = output.images if self.makes_images else output.frames[0]
        return Clip(frames.permute(0, 2, 3, 1).float(), clock.seconds(), report)


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

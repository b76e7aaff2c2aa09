"""``python -m benchmarks noisy-samplers``: skipped steps with samplers that add noise.

The bundled tiny-wan, whose weights are trained; nothing is sparse, so that the loss is that of the
skipped steps. For each sampler and list of full steps two ways to skip are compared with all steps
computed: as chipsparse does, and with the model's last output as it was.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import diffusers
import torch

import chipsparse
from benchmarks.records import Run, environment
from chipsparse.config import ByCost
from chipsparse.profiles.profile import bundled_model, find_profile
from chipsparse.skip import timetable

PROMPTS = (
    "a red circle moves left over a blue gradient",
    "a large yellow square bounces over purple stripes",
    "a green triangle moves up over a red gradient",
)
QUALITIES = ("faithful", "balanced", "fast")
SHIFT = 3.0
SAMPLERS: dict[str, Callable[[], Any]] = {
    "Euler, no noise": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=SHIFT),
    "Euler, stochastic": lambda: diffusers.FlowMatchEulerDiscreteScheduler(
        shift=SHIFT,
        stochastic_sampling=True,
    ),
    "LCM": lambda: diffusers.FlowMatchLCMScheduler(shift=SHIFT),
    "LTX ancestral, eta 1": lambda: diffusers.LTXEulerAncestralRFScheduler(eta=1.0),
    "LTX ancestral, eta 0.6": lambda: diffusers.LTXEulerAncestralRFScheduler(eta=0.6),
    "LTX ancestral, eta 0.3": lambda: diffusers.LTXEulerAncestralRFScheduler(eta=0.3),
    "SDE-DPM-Solver++": lambda: diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=SHIFT,
        algorithm_type="sde-dpmsolver++",
    ),
}
COLUMNS = {
    "sampler": "",
    "steps": "",
    "quality": "",
    "full": "",
    "psnr_db": ".1f",
    "worst_psnr_db": ".1f",
    "held_psnr_db": ".1f",
    "held_worst_psnr_db": ".1f",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument("--steps", type=int, nargs="+", default=[12, 20, 50])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--sampler", choices=SAMPLERS, nargs="+", default=list(SAMPLERS))


def run(args: argparse.Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Quality of skipped steps with samplers that add noise."""
    pipe = diffusers.WanPipeline.from_pretrained(str(bundled_model()), torch_dtype=dtype).to(device)
    clips = Clips(pipe, PROMPTS, size=8 if args.tiny else 16)
    profile = find_profile(None, "WanTransformer3DModel")
    for steps in [12] if args.tiny else args.steps:
        for sampler in args.sampler:
            seeds = range(1 if args.tiny else args.seeds)
            dense = [clips.make(SAMPLERS[sampler](), seed, steps) for seed in seeds]
            for quality in QUALITIES:
                schedule = profile.qualities[quality].schedule
                if isinstance(schedule.form, ByCost):
                    schedule = replace(schedule, form=schedule.form.skipping)
                config = profile.qualities[quality].override(
                    {"schedule": schedule, "mlp.density": "dense"},
                )
                full = timetable.Schedule(schedule, timetable.Run(steps)).full_steps()
                found = {
                    "": [clips.make(SAMPLERS[sampler](), seed, steps, config) for seed in seeds],
                    "held_": [
                        clips.make(SAMPLERS[sampler](), seed, steps, held_behind=full)
                        for seed in seeds
                    ],
                }
                record = {"sampler": sampler, "steps": steps, "quality": quality}
                record |= {"full": len(full), "seeds": len(seeds)}
                for way, results in found.items():
                    decibels = [psnr(*pair) for pair in zip(results, dense, strict=True)]
                    record[f"{way}psnr_db"] = sum(decibels) / len(decibels)
                    record[f"{way}worst_psnr_db"] = min(decibels)
                to.add({**record, **environment(device)})


class Clips:
    """Generates latents in a loop of one's own, so that all samplers and ways go the same way."""

    def __init__(self, pipe: Any, prompts: Sequence[str], *, size: int) -> None:
        self._pipe = pipe
        self._size = size
        self._embeddings = [
            pipe.encode_prompt(prompt, max_sequence_length=64)[0] for prompt in prompts
        ]

    def make(
        self,
        scheduler: Any,
        seed: int,
        steps: int,
        config: chipsparse.SparsityConfig | None = None,  # None: without chipsparse
        held_behind: Collection[int] | None = None,  # steps behind which the output is held
    ) -> torch.Tensor:
        """Return latents ``[1, C, 3, size, size]``."""
        if config is None:
            return self._loop(scheduler, seed, steps, held_behind)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", chipsparse.QualityWarning)
            with chipsparse.enable(self._pipe, config) as handle, handle.generation(scheduler):
                return self._loop(scheduler, seed, steps, None)

    @torch.no_grad()
    def _loop(
        self,
        scheduler: Any,
        seed: int,
        steps: int,
        computed: Collection[int] | None,
    ) -> torch.Tensor:
        transformer = self._pipe.transformer
        device = transformer.device
        scheduler.set_timesteps(steps, device=device)
        start = torch.Generator().manual_seed(seed)
        noise = torch.Generator().manual_seed(seed + 50)
        shape = (1, transformer.config.in_channels, 3, self._size, self._size)
        latents = torch.randn(shape, generator=start).to(device, transformer.dtype)
        prompt = self._embeddings[seed % len(self._embeddings)]
        output = None
        for step, timestep in enumerate(scheduler.timesteps):
            if computed is None or step in computed:
                output = transformer(latents, timestep.expand(1), prompt, return_dict=False)[0]
            (latents,) = scheduler.step(
                output,
                timestep,
                latents,
                generator=noise,
                return_dict=False,
            )
        return latents.float().cpu()


def psnr(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the PSNR of latents in dB, to the range of the expected ones."""
    error = (found - expected).square().mean().item()
    extent = (expected.max() - expected.min()).item()
    return math.inf if error == 0 else 10 * math.log10(extent**2 / error)

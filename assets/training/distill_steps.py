"""Distills tiny-wan to a few steps without guidance.

    python distill_steps.py --start ../tiny-wan --out runs/eight --count 8 \
        --canvas 256x65:2:1 --seconds 400
    python sample.py --pipeline runs/eight/pipeline --size 256x65 --steps 8 --guidance 1 \
        --out samples.webp

From the noise level at which one of the --count steps begins, the teacher, guided, goes to where
that step ends in --substeps smaller ones. The student is to get there in one call, with the prompt
alone. This is progressive distillation (Salimans and Ho, "Progressive distillation for fast
sampling of diffusion models", 2022) of a guided model (Meng et al., "On distillation of guided
diffusion models", 2023), without its halvings: the teacher stays the same. It begins at clips with
noise or, in a share of --rollout, at what the student makes of pure noise in the steps before.

Writes to OUT what `train_sizes.py` writes, and OUT/pipeline with a profile for so many steps. Any
number of GPUs, as there.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from export import replace_folder
from text import new_tokenizer, tokenize
from torch import Tensor
from train_sizes import TEXT_LENGTH, Canvas, begin, new_parser, parse_arguments, train
from train_transformer import Denoiser
from training import Training


class StepLoss:
    """The squared error of the velocity with which the student goes through a step.

    Args:
        training: of the student
        teacher: stays as it is
        start: folder of its pipeline
        count: steps of the student
        substeps: of the teacher in each of them
        guidance: of the teacher
        rollout: share of the batches that begin where the student itself comes to
        compile_: whether to compile the teacher's blocks
    """

    def __init__(
        self,
        training: Training,
        teacher: Denoiser,
        start: Path,
        *,
        count: int,
        substeps: int,
        guidance: float,
        rollout: float,
        compile_: bool,
    ) -> None:
        self.student, self.teacher = training.model, teacher
        self.substeps, self.guidance, self.rollout = substeps, guidance, rollout
        self.tokenizer = new_tokenizer()
        if compile_:
            self.teacher.transformer.compile_repeated_blocks(dynamic=True)
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(start / "scheduler")
        scheduler.set_timesteps(count)
        self.levels: list[float] = scheduler.sigmas.tolist()

    def __call__(
        self, _canvas: Canvas, latents: Tensor, ids: Tensor, *_small: Tensor
    ) -> tuple[Tensor, bool]:
        """The loss of clips at a random step, and that it counts."""
        step = int(torch.randint(len(self.levels) - 1, ()))
        level, end = self.levels[step : step + 2]
        noise = torch.randn(latents.shape, device=latents.device)
        with torch.autocast(latents.device.type, torch.bfloat16):
            with torch.no_grad():
                if torch.rand(()) < self.rollout:
                    began = self._by_student(noise, ids, step)
                else:
                    began = (1.0 - level) * latents.float() + level * noise
                ended = self._by_teacher(began, ids, level, end)
            velocity = self._velocity(began, ids, level)
        return F.mse_loss(velocity, (ended - began) / (end - level)), True

    def _velocity(self, latents: Tensor, ids: Tensor, level: float) -> Tensor:
        sigma = torch.full((len(ids),), level, device=latents.device)
        return self.student(latents, sigma, ids, text_length=TEXT_LENGTH).float()

    def _by_student(self, latents: Tensor, ids: Tensor, steps: int) -> Tensor:
        for now, then in itertools.pairwise(self.levels[: steps + 1]):
            latents = latents + (then - now) * self._velocity(latents, ids, now)
        return latents

    def _by_teacher(self, latents: Tensor, ids: Tensor, level: float, end: float) -> Tensor:
        empty = tokenize(self.tokenizer, [""] * len(ids)).to(ids.device)
        both = torch.cat([ids, empty])
        levels = torch.linspace(level, end, self.substeps + 1).tolist()
        for now, then in itertools.pairwise(levels):
            velocity = guided_velocity(self.teacher, latents, now, both, self.guidance)
            latents = latents + (then - now) * velocity
        return latents


def guided_velocity(
    model: Denoiser, latents: Tensor, level: float, ids: Tensor, guidance: float
) -> Tensor:
    """The velocity at a noise level, with classifier-free guidance, in float32.

    Args:
        ids: those of the latents, then as many of the empty prompt
    """
    sigma = torch.full((len(ids),), level, device=latents.device)
    both = model(latents.repeat(2, 1, 1, 1, 1), sigma, ids, text_length=64).float()
    with_text, without = both.chunk(2)
    return without + guidance * (with_text - without)


def profile_of(canvas: Canvas, count: int) -> str:
    """A profile for the student: YAML."""
    generation = {
        "height": canvas.side,
        "width": canvas.side,
        "num_frames": canvas.frames,
        "num_inference_steps": count,
        "guidance_scale": 1.0,
        "max_sequence_length": TEXT_LENGTH,
    }
    profile = {
        "model_class": "WanTransformer3DModel",
        "description": f"tiny-wan, distilled to {count} steps without guidance.",
        "generation": generation,
        "sparsity": {
            "attention": {"density": 0.2, "random_fraction": 0.01, "delta_rule": "difference"},
            "mlp": {"enabled": False},
            "schedule": {"few_steps": count},
            "tile": [4, 4, 8],
            "where_slower": "sparse",
        },
    }
    return yaml.safe_dump(profile, sort_keys=False)


def save_pipeline(student: Denoiser, args: argparse.Namespace) -> None:
    """Writes OUT/pipeline: the parts of --start with the student's transformer, and a profile."""
    pipeline = DiffusionPipeline.from_pretrained(args.start)
    pipeline.transformer.load_state_dict(student.transformer.state_dict())
    out = args.out / "pipeline"
    replace_folder(pipeline, out)
    (out / "chipsparse.yaml").write_text(profile_of(args.canvas[0], args.count))


def main() -> None:
    parser = new_parser(__doc__, lr=3e-4)
    parser.add_argument("--count", type=int, default=8, help="steps of the student")
    parser.add_argument("--substeps", type=int, default=4, help="of the teacher in each of them")
    parser.add_argument("--guidance", type=float, default=4.0, help="of the teacher")
    parser.add_argument("--rollout", type=float, default=0.5)
    args = parse_arguments(parser)
    if any(canvas.seen is not None for canvas in args.canvas):
        parser.error("--canvas: students see whole clips, so no /SEEN")
    training, clips, teacher = begin(args)
    loss = StepLoss(
        training,
        teacher,
        args.start,
        count=args.count,
        substeps=args.substeps,
        guidance=args.guidance,
        rollout=args.rollout,
        compile_=not args.no_compile,
    )
    if train(training, clips, loss, args):
        save_pipeline(training.average, args)


if __name__ == "__main__":
    main()

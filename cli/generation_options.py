"""What every command about a generation takes: the model, what to make, how sparse, where."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chipsparse.cli.errors import UserError
from chipsparse.cli.option_checks import (
    check_branches,
    check_device,
    check_dtype,
    check_flow_shift,
    check_guidance,
    check_memory,
    check_model,
    check_positive,
    check_profile,
    check_quality_name,
    check_seed,
    check_steps,
)
from chipsparse.cli.options import PrintOptions, model_option, option
from chipsparse.cli.prompts import typed_prompt
from chipsparse.common.byte_sizes import parse_bytes

if TYPE_CHECKING:
    import torch

FROM_PROFILE = "from the profile"
generation_option = partial(option, panel="Generation")
sparsity_option = partial(option, panel="Sparsity")


def seed_option(*, before: str) -> Any:
    """``--seed``, in front of another option of the help."""
    return generation_option(
        help="Seed of the noise; the same one gives the same result.",
        default=0,
        before=before,
        check=check_seed,
    )


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(PrintOptions):
    """What the user typed; None where an option was left out."""

    model: str | None = model_option(
        help="Model folder in diffusers format, or a Hugging Face hub name.",
        shown="the bundled tiny model",
        check=check_model,
    )
    device: str = model_option(
        help="cpu, cuda, cuda:N, or auto: a GPU if there is one.",
        default="auto",
        check=check_device,
    )
    dtype: str = model_option(
        help="float32, bfloat16, float16, or auto: bfloat16 on a GPU, float32 on a CPU.",
        default="auto",
        check=check_dtype,
    )
    gpus: int | None = model_option(
        help="GPUs of this machine that make it together; with --device cpu so many processes.",
        shown="1, or as many as torchrun started",
        check=check_positive,
    )
    guidance_parallel: int | None = model_option(
        help="How many of those GPUs compute guidance branches of their own: 2, where the model's "
        "guidance is two calls per step.",
        shown="1",
        check=check_branches,
    )
    height: int | None = generation_option(
        help="Height in pixels.", shown=FROM_PROFILE, check=check_positive
    )
    width: int | None = generation_option(
        help="Width in pixels.", shown=FROM_PROFILE, check=check_positive
    )
    frames: int | None = generation_option(
        help="Number of frames; models of images have none.",
        shown=FROM_PROFILE,
        check=check_positive,
    )
    steps: int | None = generation_option(
        help="Number of denoising steps.", shown=FROM_PROFILE, check=check_steps
    )
    guidance_scale: float | None = generation_option(
        help="How closely to follow the prompt; 1 turns guidance off.",
        shown=FROM_PROFILE,
        check=check_guidance,
    )
    flow_shift: float | None = generation_option(
        help="Shift of the noise levels towards the noisy end, of schedulers of flow matching; "
        "larger sizes want more.",
        shown="the scheduler's own",
        check=check_flow_shift,
    )
    negative_prompt: str | None = generation_option(
        help="What not to show.", shown="none", read=typed_prompt
    )
    config: Path | None = sparsity_option(
        help="Profile (YAML) that says what is computed when.",
        shown="the model's own",
        check=check_profile,
    )
    quality: str | None = sparsity_option(
        help="Quality of the profile: faithful (closest to dense), balanced, fast, or published "
        "(few full steps, all others sparse).",
        shown="balanced",
        check=check_quality_name,
    )
    vram: str | None = sparsity_option(
        help="GPU memory for all, weights included, such as 24G.",
        shown="what is free",
        check=check_memory,
    )
    ram: str | None = sparsity_option(
        help="Host memory for caches, such as 64G.",
        shown="most of what is free",
        check=check_memory,
    )

    def check_vram(self, device: torch.device) -> None:
        """Raises `UserError` for a budget of GPU memory on a CPU."""
        if self.vram is not None and device.type != "cuda":
            raise UserError(f"--vram {self.vram} has no effect on a CPU; use --ram")

    def memory_budgets(self) -> dict[str, int]:
        """What ``--vram`` and ``--ram`` change in a `SparsityConfig`; they were checked before."""
        budgets = {"memory.vram": self.vram, "memory.ram": self.ram}
        return {name: parse_bytes(text) for name, text in budgets.items() if text is not None}

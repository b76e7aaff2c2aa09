"""What is wrong with an option whatever the model and the device; needs no torch.

Each check takes what the user typed and raises `UserError`; None, an option that was left out, is
always right.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from chipsparse.cli.errors import UserError
from chipsparse.common.byte_sizes import parse_bytes
from chipsparse.profiles.profile import load_profile
from chipsparse.profiles.qualities import check_quality

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
OTHER_DEVICE = re.compile(r"(cpu|meta|mps|xpu|hpu|mtia|xla)(:\d+)?")  # that PyTorch knows
MOST_STEPS = 1000  # that a schedule of diffusers tells apart
MOST_FPS = 1000  # beyond it, timestamps fall together
MOST_GUIDANCE = 1000.0  # far beyond any picture, and far from where float32 overflows
SEEDS = 2**64  # that PyTorch's generator takes


def check_positive(option: str, number: int | None) -> None:
    """A count that must be 1 or more."""
    if number is not None and number < 1:
        raise UserError(f"{option} {number} is too small; it must be at least 1")


def check_steps(steps: int | None) -> None:
    """A number of denoising steps."""
    check_positive("--steps", steps)
    if steps is not None and steps > MOST_STEPS:
        raise UserError(f"--steps {steps} is too large; it must be at most {MOST_STEPS}")


def check_fps(fps: int | None) -> None:
    """Frames per second."""
    check_positive("--fps", fps)
    if fps is not None and fps > MOST_FPS:
        raise UserError(f"--fps {fps} is too large; it must be at most {MOST_FPS}")


def check_guidance(scale: float | None) -> None:
    """A guidance scale."""
    if scale is None:
        return
    if not math.isfinite(scale):
        raise UserError(f"--guidance-scale {scale} must be a finite number")
    if not 0 <= scale <= MOST_GUIDANCE:
        raise UserError(
            f"--guidance-scale {scale:g} is out of range; it must be from 0 to {MOST_GUIDANCE:g}"
        )


def check_seed(seed: int | None, *, count: int = 1) -> None:
    """The first of so many seeds."""
    if seed is None:
        return
    if not 0 <= seed < SEEDS:
        raise UserError(f"--seed {seed} is out of range; it must be from 0 to 2^64 - 1")
    if seed + count > SEEDS:
        raise UserError(f"--seed {seed}: {count} seeds from there on go beyond 2^64 - 1")


def check_device(name: str | None) -> None:
    """How a device is spelled, not whether it is there."""
    if name is not None and not DEVICE.fullmatch(name):
        problem = "not supported" if OTHER_DEVICE.fullmatch(name) else "no device"
        raise UserError(f"--device {name} is {problem}; use auto, cpu, cuda or cuda:N")


def check_dtype(name: str | None) -> None:
    """The name of a dtype."""
    if name is not None and name not in DTYPES:
        raise UserError(f"--dtype {name} is not known; use one of {', '.join(DTYPES)}")


def check_memory(option: str, text: str | None) -> None:
    """An amount of memory."""
    if text is not None:
        try:
            parse_bytes(text)
        except ValueError as error:
            raise UserError(f"{option}: {error}") from error


def check_model(location: str | None) -> None:
    """The name of a model, and that of a folder that must be here."""
    if location is None:
        return
    if not location.strip():
        raise UserError("--model is empty; leave it out for the bundled tiny model")
    if not is_here(location) and not could_be_hub_name(location):
        raise UserError(f"the model folder {location} does not exist")


def check_readable(option: str, path: Path | None) -> None:
    """A file to read."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; name a file")
    if not path.exists():
        raise UserError(f"{option} {path} does not exist")
    if not os.access(path, os.R_OK):
        raise UserError(f"{option} {path} cannot be read")


def check_profile(path: Path | None) -> None:
    """A profile, in itself."""
    if path is not None:
        try:
            load_profile(path)
        except ValueError as error:
            raise UserError(str(error)) from error


def check_quality_name(name: str | None) -> None:
    """The name of a quality, not whether the profile has it."""
    if name is not None:
        try:
            check_quality(name)
        except ValueError as error:
            raise UserError(f"--quality: {error}") from error


def is_here(location: str) -> bool:
    """Whether a model's folder is on this machine."""
    return Path(location).expanduser().exists()


def could_be_hub_name(location: str) -> bool:
    """Whether it has the form ``owner/name``."""
    owner, slash, name = location.partition("/")
    return bool(slash and owner and name) and "/" not in name and owner[0] not in ".~"


# By the name of a command's parameter, so that an option means the same in every command.
CHECKS: dict[str, Callable[[Any], None]] = {
    "steps": check_steps,
    "height": lambda value: check_positive("--height", value),
    "width": lambda value: check_positive("--width", value),
    "frames": lambda value: check_positive("--frames", value),
    "num": lambda value: check_positive("--num", value),
    "fps": check_fps,
    "guidance_scale": check_guidance,
    "seed": check_seed,
    "device": check_device,
    "dtype": check_dtype,
    "vram": lambda value: check_memory("--vram", value),
    "ram": lambda value: check_memory("--ram", value),
    "model": check_model,
    "config": check_profile,
    "quality": check_quality_name,
}


def check_values(values: Mapping[str, Any]) -> None:
    """Checks every option that `CHECKS` knows."""
    for name, value in values.items():
        if name in CHECKS:
            CHECKS[name](value)

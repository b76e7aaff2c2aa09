"""What is wrong with an option whatever the model and the device; needs no torch.

Each check takes the option's name and what the user typed for it, and raises `UserError`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.common.byte_sizes import parse_bytes
from chipsparse.profiles.profile import MOST_STEPS, load_profile
from chipsparse.profiles.qualities import check_quality

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,2})?")
OTHER_DEVICE = re.compile(r"(cpu|meta|mps|xpu|hpu|mtia|xla)(:\d+)?")  # that PyTorch knows
MOST_FPS = 1000  # beyond it, timestamps fall together
DEFAULT_FPS = 16
MOST_GUIDANCE = 1000.0  # far beyond any use, and far from where float32 overflows
MOST_FLOW_SHIFT = 1000.0  # likewise
SEEDS = 2**64  # that PyTorch's generator takes
MOST_SEEDS, MOST_CLIPS = 100_000, 1_000_000  # of a prompt and of a command, listed beforehand


def check_positive(option: str, number: float, *, most: int | None = None) -> None:
    """A count that must be 1 or more."""
    if number < 1:
        raise UserError(f"{option} {number} is too small; it must be at least 1")
    if most is not None and number > most:
        raise UserError(f"{option} {number} is too large; it must be at most {most}")


check_steps = partial(check_positive, most=MOST_STEPS)
check_fps = partial(check_positive, most=MOST_FPS)
check_num = partial(check_positive, most=MOST_SEEDS)


def read_fps(text: str) -> float:
    """Frames per second of ``24``, ``23.976`` or ``24000/1001``; whole ones as a whole number."""
    try:
        rate = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise UserError(
            f"--fps {text} is no rate; give a number such as 24 or 23.976, or 24000/1001"
        ) from None
    return rate.numerator if rate.denominator == 1 else float(rate)


def check_count(what: str, count: int) -> None:
    """How many clips something asks for."""
    if count > MOST_CLIPS:
        raise UserError(f"{what} asks for {count} clips; one command makes at most {MOST_CLIPS}")


def check_one_of(option: str, name: str, *, names: Sequence[str]) -> None:
    """One of several names."""
    if name not in names:
        raise UserError(f"{option} {name} is not known; use one of {', '.join(names)}")


check_dtype = partial(check_one_of, names=DTYPES)


def check_branches(option: str, branches: int) -> None:
    """A number of guidance branches."""
    if branches not in (1, 2):
        raise UserError(f"{option} {branches} must be 1 or 2: with the prompt, and without")


def check_guidance(option: str, scale: float) -> None:
    """A guidance scale."""
    if not math.isfinite(scale):
        raise UserError(f"{option} {scale} must be a finite number")
    if not 0 <= scale <= MOST_GUIDANCE:
        raise UserError(
            f"{option} {scale:g} is out of range; it must be from 0 to {MOST_GUIDANCE:g}"
        )


def check_flow_shift(option: str, shift: float) -> None:
    """A flow shift, not whether the scheduler has one."""
    if not 0 < shift <= MOST_FLOW_SHIFT:  # nor is NaN
        raise UserError(
            f"{option} {shift:g} is out of range; it must be above 0 and at most "
            f"{MOST_FLOW_SHIFT:g}"
        )


def check_seed(option: str, seed: int, *, count: int = 1) -> None:
    """The first of so many seeds."""
    if not 0 <= seed < SEEDS:
        raise UserError(f"{option} {seed} is out of range; it must be from 0 to 2^64 - 1")
    if seed + count > SEEDS:
        raise UserError(f"{option} {seed}: {count} seeds from there on go beyond 2^64 - 1")


def check_device(option: str, name: str) -> None:
    """How a device is spelled, not whether it is there."""
    if not DEVICE.fullmatch(name):
        problem = "not supported" if OTHER_DEVICE.fullmatch(name) else "no device"
        raise UserError(f"{option} {name} is {problem}; use auto, cpu, cuda or cuda:N")


def check_memory(option: str, text: str) -> None:
    """An amount of memory."""
    with user_errors(ValueError, what=option):
        parse_bytes(text)


def check_model(option: str, location: str) -> None:
    """The name of a model, and that of a folder that must be here."""
    if not location.strip():
        raise UserError(f"{option} is empty; leave it out for the bundled tiny model")
    if not is_here(location) and not could_be_hub_name(location):
        raise UserError(f"the model folder {location} does not exist")


def check_readable(option: str, path: Path) -> None:
    """A file to read."""
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; name a file")
    if not path.exists():
        raise UserError(f"{option} {path} does not exist")
    if not path.is_file():  # a pipe may never end, and cannot be read twice
        raise UserError(f"{option} {path} is no regular file")
    if not os.access(path, os.R_OK):
        raise UserError(f"{option} {path} cannot be read")


def check_profile(_: str, path: Path) -> None:
    """A profile, in itself."""
    with user_errors(ValueError):
        load_profile(path)


def check_quality_name(option: str, name: str) -> None:
    """The name of a quality, not whether the profile has it."""
    with user_errors(ValueError, what=option):
        check_quality(name)


def is_here(location: str) -> bool:
    """Whether a model's folder is on this machine."""
    return Path(location).expanduser().exists()


def could_be_hub_name(location: str) -> bool:
    """Whether it has the form ``owner/name``."""
    owner, slash, name = location.partition("/")
    return bool(slash and owner and name) and "/" not in name and owner[0] not in ".~"

"""The golden pictures of the regression tests, which `media_regression` writes in `test_sparse`.

``pytest tests/regression/test_sparse.py --update-golden`` makes them anew, in float32 on the CPU.
Run it only after a change that is meant to change results, and look at the pictures then.
"""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import torch
from PIL import Image

FOLDER = Path(__file__).parent / "golden" / "test_sparse"
FRAMES = 3  # of a clip
# The golden pictures of one case, float32 ``[1, H, F * W, C]`` in 0..1.
Golden = namedtuple("Golden", ["dense", "sparse"])


def strip(frames):
    """A few frames of a clip ``[F, H, W, C]`` in 0..1 side by side, uint8 ``[1, H, F * W, C]``."""
    count = min(FRAMES, len(frames))
    chosen = frames[torch.linspace(0, len(frames) - 1, count).round().long()]
    joined = chosen.permute(1, 0, 2, 3).flatten(1, 2)
    return (joined * 255).round().byte()[None]


def paths(case):
    """The golden pictures of a case, dense and sparse."""
    return FOLDER / f"dense-{case.name}.png", FOLDER / f"sparse-{case.name}.png"


def read(case):
    return Golden(*map(_read, paths(case)))


def _read(path):
    with Image.open(path) as image:
        assert image.mode == "RGB", f"{path.name}: {image.mode}"
        # A copy: PIL's memory is read-only.
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.view(1, image.height, image.width, 3).float() / 255

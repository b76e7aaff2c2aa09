"""The golden results of the regression tests: lossless pictures in ``assets/golden``.

``python -m tests.regression.golden [NAME ...]`` makes those of the named cases (of all by default)
anew, in float32 on the CPU, and prints how far they are from the files that they replace. To be run
only after a change that is meant to change results; look at the pictures before committing them.
"""

from __future__ import annotations

import sys
from collections import namedtuple

import torch
from PIL import Image

from chipsparse.experiments.quality import psnr
from chipsparse.profiles.profile import ASSETS
from tests.regression.cases import CASES
from tests.regression.runs import Runs

FOLDER = ASSETS / "golden"
FRAMES = 3  # of a clip
# The golden results of one case, float32 ``[F, H, W, C]`` as `shown` gives them.
Golden = namedtuple("Golden", ["dense", "sparse"])


def shown(frames):
    """The frames of a clip ``[F, H, W, C]`` that golden files hold, rounded to 8 bits as there."""
    count = min(FRAMES, len(frames))
    chosen = frames[torch.linspace(0, len(frames) - 1, count).round().long()]
    return (chosen * 255).round() / 255


def read(case):
    return Golden(*(_read(path, case) for path in paths(case)))


def paths(case):
    """The golden files of a case, dense and sparse: frames side by side."""
    return FOLDER / f"{case.name}-dense.webp", FOLDER / f"{case.name}-sparse.webp"


def _read(path, case):
    with Image.open(path) as image:
        assert image.mode == "RGB", f"{path.name}: {image.mode}"
        # A copy: PIL's memory is read-only.
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        strip = pixels.view(image.height, image.width, 3).float() / 255
    frames = strip.unflatten(1, (-1, case.arguments.get("width", image.height)))
    return frames.permute(1, 0, 2, 3)


def write(case, runs):
    """Makes the golden results of a case anew; says of each how far it is from what it replaces."""
    for path, result in zip(paths(case), (runs.dense(case), runs.sparse(case)), strict=True):
        frames = shown(result.frames)
        change = _change(_read(path, case), frames) if path.exists() else "new"
        FOLDER.mkdir(exist_ok=True)
        pixels = (frames.permute(1, 0, 2, 3).flatten(1, 2) * 255).round().byte()
        Image.fromarray(pixels.numpy()).save(path, lossless=True, quality=100, method=6)
        yield f"{path.name}: {change}"


def _change(before, now):
    if before.shape != now.shape:
        return f"{list(now.shape)}, was {list(before.shape)}"
    return f"{psnr(before, now):.2f} dB from the file before"


def main(names):
    unknown = sorted(set(names) - set(CASES))
    if unknown:
        sys.exit(f"unknown cases {', '.join(unknown)}; there are {', '.join(CASES)}")
    runs = Runs(torch.device("cpu"), torch.float32)
    for name in names or CASES:
        for line in write(CASES[name], runs):
            print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""LPIPS where torchmetrics and its weights are on this machine already; nothing is downloaded.

Zhang et al. 2018, "The unreasonable effectiveness of deep features as a perceptual metric", with
AlexNet. torchmetrics brings the weights of the metric itself; those of AlexNet are torchvision's,
in the cache of torch.hub.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

import torch

from chipsparse.common.errors import first_line
from chipsparse.experiments.quality import PerceptualDistance

INSTALL = "pip install 'chipsparse[lpips]'"
MODULES = ("torchmetrics.image.lpip", "torchvision.models")
LEAST_SIDE = 32  # of a frame: AlexNet leaves nothing of smaller ones


@dataclass(frozen=True)
class Lpips:
    """The metric, or why there is none."""

    measure: PerceptualDistance | None  # of two frames; None where it is not available
    why_not: str | None  # in a few words; None where it is available


def find_lpips(height: int, width: int) -> Lpips:
    """LPIPS for frames of this size."""
    if min(height, width) < LEAST_SIDE:
        return Lpips(None, f"frames are smaller than {LEAST_SIDE}x{LEAST_SIDE}")
    modules = []
    for name in MODULES:
        package = name.partition(".")[0]
        try:
            modules.append(importlib.import_module(name))
        except ModuleNotFoundError:
            return Lpips(None, f"{package} is not installed ({INSTALL})")
        except Exception as error:  # such as a torchvision built for another torch
            return Lpips(None, f"{package} cannot be imported: {first_line(error)}")
    lpip, models = modules
    # The file from which torchvision reads the weights before it would download them.
    file_name = models.AlexNet_Weights.DEFAULT.url.rpartition("/")[2]
    weights = Path(torch.hub.get_dir()) / "checkpoints" / file_name
    if not weights.is_file():
        return Lpips(None, f"the weights of AlexNet are not in {weights.parent}")
    metric = lpip.LearnedPerceptualImagePatchSimilarity(net_type="alex", normalize=True)

    def measure(a: torch.Tensor, b: torch.Tensor) -> float:
        first, second = (frame.permute(0, 3, 1, 2).float() for frame in (a, b))
        with torch.inference_mode():
            return float(metric(first, second))

    return Lpips(measure, None)

"""The check of the regression tests: what is wrong with a dense and a sparse result."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chipsparse.experiments.quality import flicker, psnr, ssim
from tests.regression.cases import Bounds, Case
from tests.regression.golden import Golden, shown

LEAST_FLICKER_FRAMES = 3


@dataclass(frozen=True)
class Closeness:
    """How close a sparse result is.

    Attributes:
        psnr: in dB, against dense of the same machine.
        ssim: likewise.
        flicker: flicker as a multiple of dense's; None for an image.
        golden: PSNR in dB against the golden sparse result.
        golden_dense: PSNR in dB of the dense result against the golden one.
    """

    psnr: float
    ssim: float
    flicker: float | None
    golden: float
    golden_dense: float


def closeness(dense: torch.Tensor, sparse: torch.Tensor, golden: Golden) -> Closeness:
    """Compares results ``[F, H, W, C]`` with each other and with the golden ones."""
    is_clip = len(dense) >= LEAST_FLICKER_FRAMES
    return Closeness(
        psnr=psnr(dense, sparse),
        ssim=ssim(dense, sparse),
        flicker=flicker(sparse) / flicker(dense) if is_clip else None,
        golden=psnr(golden.sparse, shown(sparse)),
        golden_dense=psnr(golden.dense, shown(dense)),
    )


def violations(case: Case, found: Closeness, *, half: bool = False) -> list[str]:
    """Every bound of the case that is broken, in words; none where all is well.

    With ``half`` the results are of fp16 or bf16, and the golden dense result, which says whether
    the machine computes the *model* as others do, is not looked at.
    """
    bounds: Bounds = case.bounds
    golden = bounds.golden_half if half else bounds.golden
    at_least = [
        ("PSNR against dense", found.psnr, bounds.psnr),
        ("SSIM against dense", found.ssim, bounds.ssim),
        ("PSNR against the golden sparse result", found.golden, golden),
    ]
    if not half:
        at_least.append(("PSNR of dense against the golden", found.golden_dense, golden))
    broken = [
        f"{case.name}: {name} is {value:.4g}, below {least:g}"
        for name, value, least in at_least
        if not value >= least  # NaN breaks every bound
    ]
    if found.flicker is not None and bounds.flicker is not None:
        most = bounds.flicker
        if not 1 / most <= found.flicker <= most:
            broken.append(
                f"{case.name}: flicker is {found.flicker:.4g} times dense's, "
                f"beyond a factor of {most:g}"
            )
    return broken

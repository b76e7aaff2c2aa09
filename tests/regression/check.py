"""The check of the regression tests: what is wrong with a dense and a sparse result."""

from __future__ import annotations

from dataclasses import dataclass

from chipsparse.experiments.quality import flicker, psnr, ssim
from tests.regression.golden import strip

LEAST_FLICKER_FRAMES = 3


@dataclass(frozen=True)
class Closeness:
    """How close a sparse result is, and a dense one to the golden files; PSNRs are in dB."""

    psnr: float  # against dense of the same machine
    ssim: float  # against the same
    flicker: float | None  # as a multiple of dense's; None for an image
    golden: float  # PSNR against the golden sparse result
    golden_dense: float  # PSNR of the dense result against the golden one


def closeness(dense, sparse, golden):
    """Compares results ``[F, H, W, C]`` with each other and with the golden ones."""
    is_clip = len(dense) >= LEAST_FLICKER_FRAMES
    return Closeness(
        psnr=psnr(dense, sparse),
        ssim=ssim(dense, sparse),
        flicker=flicker(sparse) / flicker(dense) if is_clip else None,
        golden=psnr(golden.sparse, strip(sparse).float() / 255),
        golden_dense=psnr(golden.dense, strip(dense).float() / 255),
    )


def violations(case, found, *, half=False):
    """Every bound of the case that is broken, in words; none where all is well.

    With ``half`` the results are of fp16 or bf16, and the golden dense result, which says whether
    the machine computes the *model* as others do, is not looked at.
    """
    bounds = case.bounds
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
    most = bounds.flicker
    if found.flicker is not None and most is not None and not 1 / most <= found.flicker <= most:
        flickers = f"flicker is {found.flicker:.4g} times dense's, beyond a factor of {most:g}"
        broken.append(f"{case.name}: {flickers}")
    return broken

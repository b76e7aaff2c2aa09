"""Dense clips that are kept in files, and how far others are from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from chipsparse.cli.errors import user_errors
from chipsparse.common.finished_files import place
from chipsparse.common.scratch import scratch_folder
from chipsparse.experiments.quality import PerceptualDistance, compare_clips


def keep_frames(file: Path, frames: np.ndarray) -> None:
    """Writes frames in a folder, made if it is not there: all of them, or raises `UserError`."""
    what = f"the dense clips in {file.parent} could not be written"
    with user_errors(OSError, what=what):
        file.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(file.parent) as scratch:
            np.save(scratch / file.name, frames)
            place({file: scratch / file.name}, scratch=scratch)


def quality(
    dense: np.ndarray, made: np.ndarray, perceptual: PerceptualDistance | None
) -> dict[str, float | None]:
    """How far a clip is from dense, as it is kept: a PSNR of None is none at all.

    Args:
        dense: uint8 ``[F, H, W, 3]``.
        made: likewise.
        perceptual: measures LPIPS; None where it is not measured.
    """
    found = compare_clips(dense, made, perceptual=perceptual)
    psnr_db = None if found.identical else found.psnr_db
    return {"psnr_db": psnr_db, "ssim": found.ssim, "lpips": found.lpips}

"""`chipsparse.compare`: two clips in Python."""

from __future__ import annotations

import os

from chipsparse.cli.media.read import read_frames
from chipsparse.common.errors import user_errors
from chipsparse.experiments.comparison import ClipComparison, comparison_of
from chipsparse.experiments.frames import Frames, check_fit
from chipsparse.experiments.lpips import find_lpips
from chipsparse.experiments.quality import compare_clips

Source = Frames | str | os.PathLike[str]


def compare(a: Source, b: Source, *, lpips: bool = False) -> ClipComparison:
    """Compare clip B with clip A: PSNR, SSIM, flicker and largest pixel difference.

    >>> result = chipsparse.compare(dense.frames[0], "out.mp4")
    >>> result.psnr, result.worst.frame, result.worst.psnr

    Args:
        a: The reference: a PIL image, an array ``[F, H, W, C]``, a tensor ``[F, C, H, W]``, a
            list of any of them, a batch of one clip, or a pipeline's output. Floats lie in
            [0, 1]. Or a path: .mp4, .webm, .gif, .png (also numbered, ``out.png`` for
            ``out-000.png`` and so on), a folder of .png, or a list of files.
        b: The clip to measure, in any of these forms; it needs not be that of ``a``.
        lpips: Also measure LPIPS, which needs the extra ``lpips`` and AlexNet's weights.

    Returns:
        The metrics over the whole clip, of each frame and of the worst frame. Pixels are compared
        as 8-bit values.

    Raises:
        ValueError: The clips differ in size or length, a file cannot be read, values are no
            pixels, or LPIPS is asked for and missing.
    """
    with user_errors(ValueError, what="a"):
        first = read_frames(a)
    with user_errors(ValueError, what="b"):
        second = read_frames(b)
    check_fit(first, second)
    height, width = first.shape[1:3]
    distance = None
    if lpips:
        found = find_lpips(height, width)
        if found.measure is None:
            raise ValueError(f"LPIPS cannot be measured: {found.why_not}")
        distance = found.measure
    quality = compare_clips(first, second, perceptual=distance)
    return comparison_of(quality, height, width)

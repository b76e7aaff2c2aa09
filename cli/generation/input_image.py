"""The image that a pipeline starts from: `--image`, read and brought to the size that is made."""

from __future__ import annotations

import math
from pathlib import Path

from PIL import Image, ImageOps

from chipsparse.cli.errors import user_errors
from chipsparse.cli.option_checks import check_readable

Size = tuple[int, int]  # height and width in pixels


def read_image(path: Path) -> Image.Image:
    """The image in a file, upright and in RGB, transparent parts white.

    Of an animation it is the first frame. Raises `UserError` for what cannot be read.
    """
    check_readable("--image", path)
    wrong = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
    with (
        user_errors(*wrong, what=f"--image {path} is no image that can be read"),
        Image.open(path) as opened,
    ):
        upright = ImageOps.exif_transpose(opened)
        if upright.has_transparency_data:
            coloured = upright.convert("RGBA")
            white = Image.new("RGBA", coloured.size, "white")
            return Image.alpha_composite(white, coloured).convert("RGB")
        return upright.convert("RGB")


def size_like(
    image: Image.Image, *, asked: tuple[int | None, int | None], usual: Size, multiples: Size
) -> Size:
    """The size to make of an image: its shape, as far as the user asks for no other.

    Args:
        asked: height and width that the user typed; one alone fixes the other by the shape.
        usual: what the profile or the pipeline makes, which fixes how many pixels there are where
            neither is asked for.
        multiples: of which height and width must be.
    """
    shape = image.width / image.height
    height, width = asked
    if height is None and width is None:
        wide = math.sqrt(usual[0] * usual[1] * shape)
        return _rounded(wide / shape, multiples[0]), _rounded(wide, multiples[1])
    if height is None:
        assert width is not None
        height = _rounded(width / shape, multiples[0])
    elif width is None:
        width = _rounded(height * shape, multiples[1])
    return height, width


def fitted(image: Image.Image, size: Size) -> Image.Image:
    """The image at a size: scaled until it covers it, and cut alike on both sides."""
    height, width = size
    return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)


def _rounded(length: float, multiple: int) -> int:
    return max(1, round(length / multiple)) * multiple

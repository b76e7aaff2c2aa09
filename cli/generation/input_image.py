"""The image that a pipeline starts from: `--image`, read and brought to the size that is made."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.option_checks import check_readable

Size = tuple[int, int]  # height and width in pixels
WIDE = ("I", "F")  # modes of 32 bits
MOST_OF_16_BITS = 2**16 - 1


def read_image(path: Path) -> Image.Image:
    """The image in a file, upright and in RGB, transparent parts white.

    Of an animation it is the first frame. Raises `UserError` for what cannot be read.
    """
    check_readable("--image", path)
    with (  # a damaged file makes decoders raise anything
        user_errors(Exception, what=f"--image {path} is no image that can be read"),
        Image.open(path) as opened,
    ):
        return shown(_in_eight_bits(ImageOps.exif_transpose(opened), path, opened.format))


def shown(image: Image.Image) -> Image.Image:
    """What a viewer shows of an image: upright, in RGB, transparent parts white."""
    upright = ImageOps.exif_transpose(image)
    if upright.has_transparency_data:
        coloured = upright.convert("RGBA")
        white = Image.new("RGBA", coloured.size, "white")
        return Image.alpha_composite(white, coloured).convert("RGB")
    return upright.convert("RGB")


def _in_eight_bits(image: Image.Image, path: Path, form: str | None) -> Image.Image:
    """An image with 8 bits per channel, of one with 16; raises `UserError` for one with 32.

    What white is in those is not known. Pillow opens some of 16 bits in the mode of 32.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and form in ("PNG", "PPM")):
        values = np.asarray(image)
        if values.min() >= 0 and values.max() <= MOST_OF_16_BITS:
            return Image.fromarray(np.rint(values / 257).astype(np.uint8))
    if image.mode in WIDE:
        raise UserError(f"--image {path} does not have 8 bits per channel (its mode: {image.mode})")
    return image


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

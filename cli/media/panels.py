"""Clips beside and above each other in one clip, each under its label, and their difference.

Frames are uint8 arrays `[F, H, W, 3]`. A heat-map is black where two clips are the same, and white
where they differ most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

GAP_PIXELS = 4
# From no difference to the largest on the scale; each is lighter than the one before.
COLOURS = ((0, 0, 0), (50, 10, 120), (180, 30, 110), (245, 130, 30), (255, 225, 90), (255,) * 3)
FACTORS = (64, 32, 16, 8, 4, 2, 1)
SATURATED_SHARE = 0.005

Panel = tuple[np.ndarray, str]  # the frames of one clip, and the label above them


def difference_rows(
    reference: Panel,
    others: Sequence[Panel],
    *,
    factor: int | None,
    in_one_row: bool = False,
) -> tuple[list[list[Panel | None]], int]:
    """Return panels of clips of one shape, of their absolute difference, and the factor of these.

    Without a factor one is chosen for all. Heat-maps stand under their clips, or ``in_one_row``
    behind them.
    """
    differences = [difference(reference[0], frames) for frames, _ in others]
    used = factor or choose_factor(differences)
    clips: list[Panel | None] = [reference, *others]
    label = f"difference x{used}"
    maps: list[Panel | None] = [(heat_map(values, used), label) for values in differences]
    return ([[*clips, *maps]] if in_one_row else [clips, [None, *maps]]), used


def stack_panels(rows: Sequence[Sequence[Panel | None]]) -> np.ndarray:
    """Return rows of clips of one shape, from top to bottom, as one clip; None stays black."""
    panels = [panel for row in rows for panel in row if panel is not None]
    count, height, width, _ = panels[0][0].shape
    font = ImageFont.load_default(size=max(10, min(28, height // 20)))
    strip = (int(font.getbbox("".join(label for _, label in panels))[3]) + 6) // 2 * 2
    down = strip + height + GAP_PIXELS
    right = width + GAP_PIXELS
    sides = len(rows) * down - GAP_PIXELS, len(rows[0]) * right - GAP_PIXELS
    stacked = np.zeros((count, *sides, 3), np.uint8)
    for row, line in enumerate(rows):
        for column, panel in enumerate(line):
            if panel is not None:
                frames, label = panel
                place = stacked[:, row * down :, column * right : column * right + width]
                place[:, :strip] = _label_strip(label, width, strip, font)
                place[:, strip : strip + height] = frames
    return stacked


def _label_strip(
    label: str,
    width: int,
    height: int,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> np.ndarray:
    """Return the label on black, ``[height, width, 3]``, without the last words that do not fit."""
    strip = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(strip)
    words = label.split()
    while len(words) > 1 and draw.textlength(" ".join(words), font=font) > width - 4:
        words.pop()
    draw.text((2, 2), " ".join(words), fill="white", font=font)
    return np.asarray(strip)


# Heat-maps.


def difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the largest absolute difference of each pixel's channels, uint8 ``[F, H, W]``."""
    largest: np.ndarray = (np.maximum(a, b) - np.minimum(a, b)).max(axis=-1)
    return largest


def choose_factor(differences: list[np.ndarray]) -> int:
    """Return the largest power of two, at most 64, that takes hardly any pixel off the scale.

    A difference is amplified by so much: all but one pixel in two hundred stay on the scale.
    """
    counts = np.sum([np.bincount(values.ravel(), minlength=256) for values in differences], axis=0)
    for factor in FACTORS:
        beyond = counts[255 // factor + 1 :].sum()
        if beyond <= SATURATED_SHARE * counts.sum():
            return factor
    return FACTORS[-1]


def heat_map(differences: np.ndarray, factor: int) -> np.ndarray:
    """Return colours of differences uint8 ``[F, H, W]``, amplified; uint8 ``[F, H, W, 3]``."""
    amplified = np.minimum(np.arange(256) * factor, 255)
    places = np.linspace(0, 255, len(COLOURS))
    channels = [np.interp(amplified, places, channel) for channel in zip(*COLOURS, strict=True)]
    table = np.rint(np.stack(channels, axis=-1)).astype(np.uint8)
    return table[differences]

"""Clips beside and above each other in one clip, each under its label, and their difference.

Frames are `[F, H, W, 3]` uint8 arrays. A heat-map is black where two clips are the same, and white
where they differ most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

GAP_PIXELS = 4
# From no difference to the largest that is told apart; each is lighter than the one before.
COLOURS = ((0, 0, 0), (50, 10, 120), (180, 30, 110), (245, 130, 30), (255, 225, 90), (255,) * 3)
FACTORS = (64, 32, 16, 8, 4, 2, 1)
SATURATED_SHARE = 0.005

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
Named = tuple[np.ndarray, str]  # uint8 `[F, H, W, 3]`, and its label


@dataclass(frozen=True)
class Panel:
    """One of several clips in one.

    Attributes:
        frames: uint8 ``[F, H, W, 3]``.
        label: stands above it; words that do not fit are left out from the end.
    """

    frames: np.ndarray
    label: str


def difference_rows(
    reference: Named, others: Sequence[Named], *, factor: int | None, in_one_row: bool = False
) -> tuple[list[list[Panel | None]], int]:
    """Panels of the clips, and of their absolute difference from the reference.

    Args:
        others: at least one, of its shape.
        factor: by how much differences are amplified; None chooses one for all.
        in_one_row: heat-maps stand behind the clips, not each under its own.

    Returns:
        The rows, and the factor that was used.
    """
    differences = [difference(reference[0], frames) for frames, _ in others]
    used = factor or choose_factor(differences)
    clips: list[Panel | None] = [Panel(*reference), *(Panel(*other) for other in others)]
    maps: list[Panel | None] = [
        Panel(heat_map(each, used), heat_map_label(used)) for each in differences
    ]
    return ([[*clips, *maps]] if in_one_row else [clips, [None, *maps]]), used


def stack_panels(rows: Sequence[Sequence[Panel | None]]) -> np.ndarray:
    """Rows of clips of one shape, from top to bottom; None leaves a place black.

    Raises:
        ValueError: the clips differ in shape, the rows in length, or there is no clip.
    """
    shapes = {panel.frames.shape for row in rows for panel in row if panel is not None}
    if len(shapes) != 1:
        raise ValueError(f"the clips differ in shape: {' and '.join(map(str, sorted(shapes)))}")
    if len({len(row) for row in rows}) != 1:
        raise ValueError(f"the rows differ in length: {[len(row) for row in rows]}")
    shape = shapes.pop()
    font = ImageFont.load_default(size=max(10, min(28, shape[1] // 20)))
    labels = [panel.label for row in rows for panel in row if panel is not None]
    height = _strip_height("".join(labels), font)
    joined = [_row(row, shape, font, height) for row in rows]
    return np.concatenate(_with_gaps(joined, axis=1), axis=1)


def _row(
    panels: Sequence[Panel | None], shape: tuple[int, ...], font: Font, strip_height: int
) -> np.ndarray:
    frames, _, width, _ = shape
    columns = []
    for panel in panels:
        shown = Panel(np.zeros(shape, np.uint8), "") if panel is None else panel
        strip = _strip(shown.label, width, strip_height, font)
        strips = np.broadcast_to(strip, (frames, *strip.shape))
        columns.append(np.concatenate([strips, shown.frames], axis=1))
    return np.concatenate(_with_gaps(columns, axis=2), axis=2)


def _with_gaps(clips: list[np.ndarray], *, axis: int) -> list[np.ndarray]:
    shape = list(clips[0].shape)
    shape[axis] = GAP_PIXELS
    gap = np.zeros(shape, np.uint8)
    return [piece for clip in clips for piece in (gap, clip)][1:]


def _strip_height(labels: str, font: Font) -> int:
    return (int(font.getbbox(labels)[3]) + 6) // 2 * 2


def _strip(label: str, width: int, height: int, font: Font) -> np.ndarray:
    strip = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(strip)
    words = label.split()
    while len(words) > 1 and draw.textlength(" ".join(words), font=font) > width - 4:
        words.pop()
    draw.text((2, 2), " ".join(words), fill="white", font=font)
    return np.asarray(strip)


# Heat-maps.


def difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The largest absolute difference of each pixel's channels, uint8 ``[F, H, W]``."""
    largest = np.empty(a.shape[:3], np.uint8)
    for index, (x, y) in enumerate(zip(a, b, strict=True)):
        largest[index] = np.abs(x.astype(np.int16) - y).max(axis=-1)
    return largest


def choose_factor(differences: list[np.ndarray]) -> int:
    """The largest power of two, at most 64, with which hardly any pixel leaves the scale.

    So many times is a difference amplified: all but one pixel in two hundred stay on it.
    """
    counts = np.sum([np.bincount(each.ravel(), minlength=256) for each in differences], axis=0)
    for factor in FACTORS:
        beyond = int(counts[255 // factor + 1 :].sum())
        if beyond <= SATURATED_SHARE * int(counts.sum()):
            return factor
    return FACTORS[-1]


def heat_map(differences: np.ndarray, factor: int) -> np.ndarray:
    """Colours of differences uint8 ``[F, H, W]``, amplified; uint8 ``[F, H, W, 3]``."""
    amplified = np.minimum(np.arange(256) * factor, 255)
    places = np.linspace(0, 255, len(COLOURS))
    channels = [np.interp(amplified, places, channel) for channel in zip(*COLOURS, strict=True)]
    table = np.rint(np.stack(channels, axis=-1)).astype(np.uint8)
    return table[differences]


def heat_map_label(factor: int) -> str:
    """What stands above a heat-map."""
    return f"difference x{factor}"

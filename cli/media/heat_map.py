"""Where two clips differ, in colours: black where they are the same, white where they differ most.

Clips are `[F, H, W, 3]` uint8 arrays.
"""

from __future__ import annotations

import numpy as np

# From no difference to the largest that is told apart; each is lighter than the one before.
COLOURS = ((0, 0, 0), (50, 10, 120), (180, 30, 110), (245, 130, 30), (255, 225, 90), (255,) * 3)
FACTORS = (64, 32, 16, 8, 4, 2, 1)
SATURATED_SHARE = 0.005


def difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The largest absolute difference of each pixel's channels, uint8 ``[F, H, W]``."""
    found = np.empty(a.shape[:3], np.uint8)
    for index, (x, y) in enumerate(zip(a, b, strict=True)):
        found[index] = np.abs(x.astype(np.int16) - y).max(axis=-1)
    return found


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

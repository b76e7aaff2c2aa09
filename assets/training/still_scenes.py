"""Still scenes for the tiny Flux: what an image shows, where its objects are, and its pixels.

As in `scenes.py`, a `Still` is what a caption says, and staging adds what the caption leaves open
(exact places, shades, phases) as plain arrays. Both are functions of a seed and an index. Shapes,
colours, fills and backgrounds are those of the clips; instead of a motion an object has a place.

Units: pixels of a `SIDE` x `SIDE` canvas, x to the right, y downwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from drawing import draw
from scenes import (
    BACKGROUND_COLOURS,
    BACKGROUNDS,
    OBJECT_COLOURS,
    Look,
    sample_look,
    stage_objects,
)
from torch import Tensor

SIDE = 256
MAX_THINGS = 3
RADII = {"small": 30.0, "medium": 42.0, "large": 56.0}
SCALES = (1.0, 0.85, 0.68)  # of the radii, with one, two and three objects

# Column and row of each place, from -1 to 1; a lone object may also be anywhere.
PLACES: dict[str, tuple[int, int] | None] = {
    "anywhere": None,
    "left": (-1, 0),
    "right": (1, 0),
    "top": (0, -1),
    "bottom": (0, 1),
    "middle": (0, 0),
    "upper left": (-1, -1),
    "upper right": (1, -1),
    "lower left": (-1, 1),
    "lower right": (1, 1),
}
# The places that several objects take together, in any order.
LAYOUTS = {
    1: tuple((place,) for place in PLACES),
    2: (
        ("left", "right"),
        ("top", "bottom"),
        ("upper left", "lower right"),
        ("upper right", "lower left"),
    ),
    3: (
        ("left", "middle", "right"),
        ("top", "middle", "bottom"),
        ("top", "lower left", "lower right"),
        ("bottom", "upper left", "upper right"),
    ),
}


@dataclass(frozen=True)
class Thing(Look):
    """One object of a still."""

    place: str


@dataclass(frozen=True)
class Still:
    """One to three objects over a background of a named kind and colour."""

    things: tuple[Thing, ...]
    background: str
    background_colour: str


def sample_still(rng: np.random.Generator) -> Still:
    """Draws a still. Objects differ in colour from each other and from the background."""
    background_colour = str(rng.choice(list(BACKGROUND_COLOURS)))
    colours = [c for c in OBJECT_COLOURS if c != background_colour]
    count = int(rng.choice((1, 2, 3), p=(0.4, 0.35, 0.25)))
    chosen = rng.choice(len(colours), size=count, replace=False)
    if count == 1 and rng.random() < 0.4:
        places: list[str] = ["anywhere"]
    else:
        layout = LAYOUTS[count][rng.integers(len(LAYOUTS[count]))]
        places = [layout[i] for i in rng.permutation(count)]
    things = tuple(
        _sample_thing(rng, colour=colours[i], place=place)
        for i, place in zip(chosen, places, strict=True)
    )
    return Still(things, str(rng.choice(BACKGROUNDS)), background_colour)


def _sample_thing(rng: np.random.Generator, *, colour: str, place: str) -> Thing:
    shape, size, fill = sample_look(rng)
    return Thing(shape, colour, fill, size, place)


def stage_still(still: Still, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Places a still: `stage_objects` of `MAX_THINGS` and one frame, for one image."""
    background = (still.background, still.background_colour)
    return stage_objects(still.things, *background, _positions, slots=MAX_THINGS, rng=rng)


def _positions(things: tuple[Thing, ...], rng: np.random.Generator) -> np.ndarray:
    """float32 (objects, 1, 4): x, y, angle, radius. Of random ones, some that do not touch."""
    best, best_gap = np.zeros((len(things), 4)), -np.inf
    for _ in range(24):
        drawn = np.stack([_position(thing, rng, scale=SCALES[len(things) - 1]) for thing in things])
        gap = np.inf
        for i in range(len(things)):
            for j in range(i):
                distance = np.hypot(*(drawn[i, :2] - drawn[j, :2]))
                gap = min(gap, distance - 1.08 * (drawn[i, 3] + drawn[j, 3]))
        if gap > best_gap:
            best, best_gap = drawn, gap
        if gap > 4.0:
            break
    return best[:, None].astype(np.float32)


def _position(thing: Thing, rng: np.random.Generator, *, scale: float) -> np.ndarray:
    """float64 (4,): x, y, angle, radius of an object somewhere in its place."""
    radius = RADII[thing.size] * scale * rng.uniform(0.95, 1.05)
    reach = 1.12 * radius + 2.0  # how far the object's outline gets from its centre
    place = PLACES[thing.place]
    if place is None:
        x, y = rng.uniform(reach, SIDE - reach, size=2)
    else:
        x, y = (_along(at, reach, rng) for at in place)
    return np.array([x, y, 0.0, radius])


def _along(at: int, reach: float, rng: np.random.Generator) -> float:
    """One coordinate at the canvas's beginning (-1), middle (0) or end (1)."""
    if at == 0:
        return SIDE * rng.uniform(0.45, 0.55)
    near = rng.uniform(reach, max(reach, 0.32 * SIDE))
    return near if at < 0 else SIDE - near


def draw_still(staging: dict[str, Tensor]) -> Tensor:
    """Images (B, 3, SIDE, SIDE), float32 in [-1, 1], of a batch of `stage_still` arrays."""
    return draw(staging, side=SIDE)[:, :, 0]

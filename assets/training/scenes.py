"""Scenes: what a clip shows (a symbolic description) and where everything is in each frame.

A `Scene` is what a caption says. A `Staging` adds what a caption leaves open (exact place, speed,
phase, shade) as plain arrays which `drawing.py` turns into pixels. Both are deterministic functions
of a seed and an index.

Units: pixels of a `SIZE` x `SIZE` canvas, x to the right, y downwards; angles in radians,
clockwise. `enlarge` turns them into those of another canvas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

SIZE = 128
FRAMES = 33
MAX_OBJECTS = 2
PAIRS = 0.35  # share of scenes that show two objects

SHAPES = ("circle", "square", "triangle", "star", "ring", "diamond", "cross", "heart")
FILLS = ("solid", "striped", "dotted", "checkered")
BACKGROUNDS = ("plain", "gradient", "checkerboard", "stripes", "dots")
SIZES = {"small": 15.0, "medium": 21.0, "large": 28.0}

# Direction (dx, dy) of each straight motion.
DIRECTIONS = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
    "upper left": (-0.72, -0.72),
    "upper right": (0.72, -0.72),
    "lower left": (-0.72, 0.72),
    "lower right": (0.72, 0.72),
}
MOTIONS = (*DIRECTIONS, "spin", "grow", "shrink", "orbit", "bounce", "still")
# How often each motion is drawn, relative to the others.
MOTION_WEIGHTS = np.array([1.6] * 4 + [0.5] * 4 + [1.6, 1.2, 1.2, 1.6, 1.4, 1.0])

# Bright colours for objects, RGB in [0, 1].
OBJECT_COLOURS = {
    "red": (0.93, 0.15, 0.15),
    "green": (0.18, 0.80, 0.24),
    "blue": (0.20, 0.40, 0.98),
    "yellow": (1.00, 0.90, 0.14),
    "orange": (1.00, 0.54, 0.08),
    "purple": (0.66, 0.24, 0.92),
    "cyan": (0.15, 0.88, 0.94),
    "pink": (1.00, 0.54, 0.76),
    "white": (0.97, 0.97, 0.97),
}
# Muted (dark, light) shades for backgrounds, RGB in [0, 1].
BACKGROUND_COLOURS = {
    "red": ((0.30, 0.09, 0.10), (0.46, 0.17, 0.18)),
    "green": ((0.07, 0.24, 0.12), (0.14, 0.38, 0.21)),
    "blue": ((0.08, 0.13, 0.34), (0.17, 0.25, 0.52)),
    "yellow": ((0.31, 0.28, 0.07), (0.47, 0.43, 0.15)),
    "orange": ((0.36, 0.19, 0.06), (0.54, 0.31, 0.13)),
    "purple": ((0.22, 0.10, 0.31), (0.36, 0.20, 0.48)),
    "cyan": ((0.05, 0.25, 0.28), (0.12, 0.40, 0.44)),
    "gray": ((0.19, 0.19, 0.20), (0.34, 0.34, 0.35)),
}


@dataclass(frozen=True)
class Look:
    """What an object looks like, as a caption names it."""

    shape: str
    colour: str
    fill: str
    size: str


@dataclass(frozen=True)
class Object(Look):
    """One object of a clip."""

    motion: str


@dataclass(frozen=True)
class Scene:
    """One or two objects over a background of a named kind and colour."""

    objects: tuple[Object, ...]
    background: str
    background_colour: str


def sample_scene(rng: np.random.Generator, *, pairs: float = PAIRS) -> Scene:
    """Draws a scene; a share of `pairs` show two objects. None has the background's colour."""
    background_colour = str(rng.choice(list(BACKGROUND_COLOURS)))
    colours = [c for c in OBJECT_COLOURS if c != background_colour]
    count = 2 if rng.random() < pairs else 1
    chosen = rng.choice(len(colours), size=count, replace=False)
    objects = tuple(_sample_object(rng, colour=colours[i]) for i in chosen)
    return Scene(objects, str(rng.choice(BACKGROUNDS)), background_colour)


def _sample_object(rng: np.random.Generator, *, colour: str) -> Object:
    motion = MOTIONS[rng.choice(len(MOTIONS), p=MOTION_WEIGHTS / MOTION_WEIGHTS.sum())]
    shape, size, fill = sample_look(rng)
    if motion == "spin" and shape in ("circle", "ring") and fill == "solid":
        size, fill = "medium", str(rng.choice(FILLS[1:]))  # a plain disc is not seen to spin
    return Object(shape, colour, fill, size, motion)


def sample_look(rng: np.random.Generator) -> tuple[str, str, str]:
    """An object's shape, size and fill."""
    shape = str(rng.choice(SHAPES))
    size = str(rng.choice(list(SIZES), p=(0.22, 0.53, 0.25)))
    fill = "solid"
    if size != "small":  # the fills would be too fine to see
        fill = str(rng.choice(FILLS, p=(0.55, 0.15, 0.15, 0.15)))
    return shape, size, fill


def stage(scene: Scene, rng: np.random.Generator, *, frames: int = FRAMES) -> dict[str, np.ndarray]:
    """Places a scene: `stage_objects` of `MAX_OBJECTS`, for one clip of so many frames.

    A longer clip shows the same motion, more slowly.
    """
    background = (scene.background, scene.background_colour)
    place = partial(_paths, frames=frames)
    return stage_objects(scene.objects, *background, place, slots=MAX_OBJECTS, rng=rng)


def enlarge(staging: dict[str, Tensor], side: int) -> dict[str, Tensor]:
    """A batch of clips' arrays, as tensors, for a canvas of `side` x `side`: all grows with it."""
    unit = staging["path"].new_tensor([1.0, 1.0, SIZE / side, 1.0])  # angles stay
    return {**staging, "path": staging["path"] * (side / SIZE) * unit}


def stage_objects(
    objects: tuple[Look, ...],
    kind: str,
    background_colour: str,
    place: Callable[[tuple, np.random.Generator], np.ndarray],
    *,
    slots: int,
    rng: np.random.Generator,
) -> dict[str, np.ndarray]:
    """The arrays that `drawing.draw` takes, of objects over a background of such a kind and colour.

    `place` gives the objects' paths, float32 (objects, F, 4).

    Returns (O = `slots`):
        path: float32 (O, F, 4), x, y, angle and radius of each object in each frame
        shape, fill: int64 (O,); shape is -1 where there is no object
        colour: float32 (O, 2, 3), the fill's two shades
        background: int64 (); ground: float32 (2, 3), its two shades
        phase: float32 (3,), shift in x and y (pixels) and direction (radians) of its pattern
    """
    shape = np.full(slots, -1, dtype=np.int64)
    fill = np.zeros(slots, dtype=np.int64)
    colour = np.zeros((slots, 2, 3), dtype=np.float32)
    for i, obj in enumerate(objects):
        shape[i] = SHAPES.index(obj.shape)
        fill[i] = FILLS.index(obj.fill)
        bright = np.array(OBJECT_COLOURS[obj.colour]) * rng.uniform(0.96, 1.0)
        colour[i] = bright, bright * 0.42
    paths = place(objects, rng)
    path = np.zeros((slots, *paths.shape[1:]), dtype=np.float32)
    path[:, :, 3] = 1.0
    path[: len(objects)] = paths

    ground = np.array(BACKGROUND_COLOURS[background_colour]) * rng.uniform(0.95, 1.05)
    directions = 4 if kind == "gradient" else 2
    return {
        "path": path,
        "shape": shape,
        "fill": fill,
        "colour": colour,
        "background": np.int64(BACKGROUNDS.index(kind)),
        "ground": ground.astype(np.float32),
        "phase": np.array(
            [*rng.uniform(0.0, 32.0, size=2), rng.integers(directions) * np.pi / 2],
            dtype=np.float32,
        ),
    }


def _paths(objects: tuple[Object, ...], rng: np.random.Generator, *, frames: int) -> np.ndarray:
    """float32 (objects, F, 4). Of two objects' random paths, a pair that stays apart."""
    if len(objects) == 1:
        return _path(objects[0], rng, scale=1.0, frames=frames)[None]
    best, best_gap = None, -np.inf
    for _ in range(24):
        pair = np.stack([_path(obj, rng, scale=0.8, frames=frames) for obj in objects])
        distance = np.hypot(*(pair[0, :, :2] - pair[1, :, :2]).T)
        gap = (distance - 1.08 * pair[:, :, 3].sum(0)).min()
        if gap > best_gap:
            best, best_gap = pair, gap
        if gap > 2.0:
            break
    return best


def _path(obj: Object, rng: np.random.Generator, *, scale: float, frames: int) -> np.ndarray:
    """float32 (F, 4): x, y, angle, radius over time; `scale` shrinks sizes and travels."""
    t = np.linspace(0.0, 1.0, frames)
    radius = SIZES[obj.size] * scale * rng.uniform(0.95, 1.05)
    reach = 1.12 * radius + 2.0  # how far the object's outline gets from its centre
    angle = np.zeros(frames)
    radii = np.full(frames, radius)

    def between(low: float, high: float) -> float:
        return rng.uniform(low, high) if low < high else (low + high) / 2

    def anywhere(margin: float) -> float:
        return between(margin, SIZE - margin)

    if obj.motion in DIRECTIONS:
        travel = rng.uniform(52.0, 60.0) * scale
        dx, dy = DIRECTIONS[obj.motion]
        x = anywhere(reach + abs(dx) * travel / 2) + dx * travel * (t - 0.5)
        y = anywhere(reach + abs(dy) * travel / 2) + dy * travel * (t - 0.5)
    elif obj.motion == "orbit":
        turn = 2 * np.pi * t + rng.uniform(0.0, 2 * np.pi)
        swing = rng.uniform(27.0, 31.0) * scale
        x = between(reach + swing, SIZE - reach - swing) + swing * np.cos(turn)
        y = between(reach + swing, SIZE - reach - swing) + swing * np.sin(turn)
    elif obj.motion == "bounce":
        height = rng.uniform(44.0, 52.0) * scale
        x = np.full(frames, anywhere(reach))
        floor = between(reach + height, SIZE - reach)
        y = floor - height * np.abs(np.sin(2 * np.pi * t + rng.uniform(0.0, np.pi)))
    else:
        x = np.full(frames, anywhere(reach))
        y = np.full(frames, anywhere(reach))
    if obj.motion == "spin":
        angle = 2 * np.pi * t * rng.uniform(0.9, 1.1)
    elif obj.motion == "grow":
        radii = radius * (0.5 + 0.65 * t)
    elif obj.motion == "shrink":
        radii = radius * (1.15 - 0.65 * t)
    return np.stack([x, y, angle, radii], axis=1).astype(np.float32)

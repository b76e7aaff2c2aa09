"""The caption grammar: says a scene in words, with a few synonyms.

Every caption names each object's colour, shape and motion, its size unless medium, its fill unless
solid, and the background's kind and colour. "a red circle moves left over a blue gradient" is one.
"""

from __future__ import annotations

import numpy as np
from scenes import (
    BACKGROUND_COLOURS,
    DIRECTIONS,
    MAX_OBJECTS,
    OBJECT_COLOURS,
    SHAPES,
    Object,
    Scene,
)

SIZE_WORDS = {"small": ("small", "little"), "medium": ("",), "large": ("large", "big")}
FILL_PHRASES = {
    "solid": ("{colour} {shape}",),
    "striped": (
        "striped {colour} {shape}",
        "{colour} striped {shape}",
        "{colour} {shape} with stripes",
    ),
    "dotted": ("dotted {colour} {shape}", "{colour} dotted {shape}", "{colour} {shape} with dots"),
    "checkered": ("checkered {colour} {shape}", "{colour} checkered {shape}"),
}
MOVE_VERBS = ("moves", "moves", "moves", "slides", "drifts")
MOTION_PHRASES = {
    "spin": ("spins", "spins", "rotates", "turns around"),
    "grow": ("grows", "grows", "gets bigger"),
    "shrink": ("shrinks", "shrinks", "gets smaller"),
    "orbit": ("moves in a circle", "circles around", "orbits"),
    "bounce": ("bounces", "bounces up and down", "jumps up and down"),
    "still": ("stays still", "stands still", "does not move"),
}
BACKGROUND_PHRASES = {
    "plain": ("a plain {colour} background", "a {colour} background"),
    "gradient": ("a {colour} gradient", "a {colour} gradient", "a {colour} gradient background"),
    "checkerboard": ("a {colour} checkerboard", "a {colour} checkered background"),
    "stripes": ("{colour} stripes", "a {colour} striped background"),
    "dots": ("{colour} dots", "a {colour} dotted background"),
}
SCENE_PHRASES = (
    "{objects} over {background}",
    "{objects} over {background}",
    "{objects} on {background}",
    "{objects} in front of {background}",
    "over {background} , {objects}",
)
JOINS = (" and ", " and ", " , while ")


def describe(scene: Scene, rng: np.random.Generator) -> str:
    """One caption of a scene, lower case."""
    return tidy(" ".join(words for words, _ in _say(scene, rng)))


def describe_with_owners(scene: Scene, rng: np.random.Generator) -> tuple[str, list[int | None]]:
    """As `describe`, and for each word or mark of the caption what it is about.

    That is the number of an object, `MAX_OBJECTS` for the background, or None for words between.
    """
    said = _say(scene, rng)
    owners = [owner for words, owner in said for _ in words.split()]
    return tidy(" ".join(words for words, _ in said)), owners


def _say(scene: Scene, rng: np.random.Generator) -> list[tuple[str, int | None]]:
    """The caption in pieces, each with its owner."""
    join = _pick(JOINS, rng)
    things = [_object(obj, rng) for obj in scene.objects]
    background = _pick(BACKGROUND_PHRASES[scene.background], rng)
    background = background.format(colour=scene.background_colour)
    objects: list[tuple[str, int | None]] = []
    for i, thing in enumerate(things):
        objects += [(thing, i), (join, None)]
    pieces = {"{objects}": objects[:-1], "{background}": [(background, MAX_OBJECTS)]}
    said: list[tuple[str, int | None]] = []
    for word in _pick(SCENE_PHRASES, rng).split():
        said += pieces.get(word, [(word, None)])
    return said


def tidy(caption: str) -> str:
    """Puts "an" before a vowel and commas next to the word before them."""
    words = caption.split()
    for i, word in enumerate(words[:-1]):
        if word == "a" and words[i + 1] == "orange":
            words[i] = "an"
    return " ".join(words).replace(" ,", ",")


def _object(obj: Object, rng: np.random.Generator) -> str:
    thing = _pick(FILL_PHRASES[obj.fill], rng).format(colour=obj.colour, shape=obj.shape)
    return f"a {_pick(SIZE_WORDS[obj.size], rng)} {thing} {_motion(obj.motion, rng)}"


def _motion(motion: str, rng: np.random.Generator) -> str:
    if motion not in DIRECTIONS:
        return _pick(MOTION_PHRASES[motion], rng)
    plain = motion in ("up", "down") or (" " not in motion and rng.random() < 0.7)
    return f"{_pick(MOVE_VERBS, rng)} {motion if plain else f'to the {motion}'}"


def _pick(options: tuple[str, ...], rng: np.random.Generator) -> str:
    return options[rng.integers(len(options))]


def vocabulary() -> list[str]:
    """All words of the grammar, sorted, and "," and "."."""
    phrases = ["a an the to , .", *SCENE_PHRASES, *JOINS, *MOVE_VERBS, *DIRECTIONS, *SHAPES]
    phrases += [*OBJECT_COLOURS, *BACKGROUND_COLOURS]
    for table in (SIZE_WORDS, FILL_PHRASES, MOTION_PHRASES, BACKGROUND_PHRASES):
        phrases += [phrase for options in table.values() for phrase in options]
    return sorted({w for phrase in phrases for w in phrase.split() if not w.startswith("{")})

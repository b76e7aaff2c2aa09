"""The caption grammar: says a scene in words, with a few synonyms.

Every caption names each object's colour, shape and motion, its size unless medium, its fill unless
solid, and the background's kind and colour. "a red circle moves left over a blue gradient" is one.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from scenes import (
    BACKGROUND_COLOURS,
    DIRECTIONS,
    MAX_OBJECTS,
    OBJECT_COLOURS,
    SHAPES,
    Look,
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

Piece = tuple[str, int | None]  # words and what they are about, as in `describe_with_owners`


def describe(scene: Scene, rng: np.random.Generator) -> str:
    """One caption of a scene, lower case."""
    return describe_with_owners(scene, rng)[0]


def describe_with_owners(scene: Scene, rng: np.random.Generator) -> tuple[str, list[int | None]]:
    """As `describe`, and for each word or mark of the caption what it is about.

    That is the number of an object, `MAX_OBJECTS` for the background, or None for words between.
    """
    join = pick(JOINS, rng)
    things = [_object(obj, rng) for obj in scene.objects]
    objects: list[Piece] = []
    for i, thing in enumerate(things):
        objects += [(thing, i), (join, None)]
    background = (scene.background, scene.background_colour)
    return say_scene(objects[:-1], *background, owner=MAX_OBJECTS, rng=rng)


def say_scene(
    objects: list[Piece], background: str, colour: str, *, owner: int, rng: np.random.Generator
) -> tuple[str, list[int | None]]:
    """The caption of such objects over a background, and the owner of each word or mark.

    `background` is the kind of the background; what is about it gets `owner`.
    """
    ground = pick(BACKGROUND_PHRASES[background], rng).format(colour=colour)
    pieces: dict[str, list[Piece]] = {"{objects}": objects, "{background}": [(ground, owner)]}
    said: list[Piece] = []
    for word in pick(SCENE_PHRASES, rng).split():
        said += pieces.get(word, [(word, None)])
    owners = [owner for words, owner in said for _ in words.split()]
    return tidy(" ".join(words for words, _ in said)), owners


def tidy(caption: str) -> str:
    """Puts "an" before a vowel and commas next to the word before them."""
    words = caption.split()
    for i, word in enumerate(words[:-1]):
        if word == "a" and words[i + 1] == "orange":
            words[i] = "an"
    return " ".join(words).replace(" ,", ",")


def say_look(look: Look, rng: np.random.Generator) -> str:
    """An object but for its motion or place: "a small dotted red circle"."""
    words = pick(FILL_PHRASES[look.fill], rng).format(colour=look.colour, shape=look.shape)
    return f"a {pick(SIZE_WORDS[look.size], rng)} {words}"


def _object(obj: Object, rng: np.random.Generator) -> str:
    return f"{say_look(obj, rng)} {_motion(obj.motion, rng)}"


def _motion(motion: str, rng: np.random.Generator) -> str:
    if motion not in DIRECTIONS:
        return pick(MOTION_PHRASES[motion], rng)
    plain = motion in ("up", "down") or (" " not in motion and rng.random() < 0.7)
    return f"{pick(MOVE_VERBS, rng)} {motion if plain else f'to the {motion}'}"


def pick(options: tuple[str, ...], rng: np.random.Generator) -> str:
    """One of the options."""
    return options[rng.integers(len(options))]


def vocabulary() -> list[str]:
    """All words of the grammar, sorted, and "," and "."."""
    phrases = ["a an the to , .", *SCENE_PHRASES, *JOINS, *MOVE_VERBS, *DIRECTIONS, *SHAPES]
    phrases += [*OBJECT_COLOURS, *BACKGROUND_COLOURS]
    for table in (SIZE_WORDS, FILL_PHRASES, MOTION_PHRASES, BACKGROUND_PHRASES):
        phrases += [phrase for options in table.values() for phrase in options]
    return words_of(phrases)


def words_of(phrases: Iterable[str]) -> list[str]:
    """All words and marks of phrases but their {fields}, sorted."""
    return sorted({w for phrase in phrases for w in phrase.split() if not w.startswith("{")})

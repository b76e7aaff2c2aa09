"""The grammar of still captions: says a `Still` in words, with the words of `captions.py`.

"a red circle to the left of a striped blue square over a green gradient" is one. Objects that
share an image are always said with their places: by place ("a red circle at the top and a blue
square at the bottom") or, where the places allow it, by relation ("a red circle above ..."). Of two
objects that one preposition governs together, the first is on the left: "a red circle above a blue
square and a pink star", "a red circle between a blue square and a pink star".
"""

from __future__ import annotations

import numpy as np
from captions import (
    BACKGROUND_PHRASES,
    FILL_PHRASES,
    SCENE_PHRASES,
    SIZE_WORDS,
    Piece,
    pick,
    say_look,
    say_scene,
    words_of,
)
from scenes import BACKGROUND_COLOURS, OBJECT_COLOURS, SHAPES
from still_scenes import MAX_THINGS, Still, Thing

PLACE_PHRASES = {
    "anywhere": ("",),
    "left": ("on the left", "on the left side"),
    "right": ("on the right", "on the right side"),
    "top": ("at the top",),
    "bottom": ("at the bottom",),
    "middle": ("in the middle", "in the center"),
    "upper left": ("in the upper left", "in the upper left corner"),
    "upper right": ("in the upper right", "in the upper right corner"),
    "lower left": ("in the lower left", "in the lower left corner"),
    "lower right": ("in the lower right", "in the lower right corner"),
}
# What may stand between objects in these places, said in this order.
RELATIONS = {
    ("left", "right"): ("to the left of", "left of"),
    ("right", "left"): ("to the right of", "right of"),
    ("top", "bottom"): ("above",),
    ("bottom", "top"): ("below", "under"),
    ("top", "lower left", "lower right"): ("above",),
    ("bottom", "upper left", "upper right"): ("below", "under"),
    ("middle", "left", "right"): ("between",),
}


def describe_still(still: Still, rng: np.random.Generator) -> str:
    """One caption of a still, lower case."""
    return describe_still_with_owners(still, rng)[0]


def describe_still_with_owners(
    still: Still, rng: np.random.Generator
) -> tuple[str, list[int | None]]:
    """As `describe_still`, and for each word or mark of the caption what it is about.

    That is the number of an object, `MAX_THINGS` for the background, or None for words between.
    """
    objects = _say_objects(still.things, rng)
    background = (still.background, still.background_colour)
    return say_scene(objects, *background, owner=MAX_THINGS, rng=rng)


def _say_objects(things: tuple[Thing, ...], rng: np.random.Generator) -> list[Piece]:
    order = _order_of_relation(things)
    if order and rng.random() < 0.6:
        relation = pick(RELATIONS[tuple(things[i].place for i in order)], rng)
        said: list[Piece] = [(say_look(things[order[0]], rng), order[0]), (relation, order[0])]
        for i in order[1:]:
            said += [(say_look(things[i], rng), i), ("and", None)]
        return said[:-1]
    said = []
    for i, thing in enumerate(things):
        if i:
            said.append(("and" if i == len(things) - 1 else ",", None))
        said += [(say_look(thing, rng), i), (pick(PLACE_PHRASES[thing.place], rng), i)]
    return said


def _order_of_relation(things: tuple[Thing, ...]) -> tuple[int, ...] | None:
    """The objects' numbers in an order that `RELATIONS` has; that of the still if it can be."""
    numbers = tuple(range(len(things)))
    turned = [numbers[i:] + numbers[:i] for i in numbers]
    for order in [*turned, *[(a, *rest[::-1]) for a, *rest in turned]]:
        if tuple(things[i].place for i in order) in RELATIONS:
            return order
    return None


def still_vocabulary() -> list[str]:
    """All words of the grammar, sorted, and "," and "."."""
    phrases = ["a an the and , .", *SCENE_PHRASES, *SHAPES, *OBJECT_COLOURS, *BACKGROUND_COLOURS]
    for table in (SIZE_WORDS, FILL_PHRASES, PLACE_PHRASES, RELATIONS, BACKGROUND_PHRASES):
        phrases += [phrase for options in table.values() for phrase in options]
    return words_of(phrases)
